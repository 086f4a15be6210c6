"""Trains one model over the ranks of a mesh, one step after another.

A step is ``micro_batches`` forwards and backwards, whose gradients are reduced no more often than the plan's ``zero``
asks for, one norm over all ranks, one update. Everything in it follows from the settings and the number of the step:
samples, learning rate, and the seed of what is drawn at random, so a run that goes on from a checkpoint of the same
plan takes the same steps, bit by bit.
"""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from parallel_ops.comm import ParallelMesh
from parallel_ops.models import Transformer
from parallel_ops.models.context import IGNORE_INDEX
from parallel_ops.train import outputs
from parallel_ops.train.checkpoint import checkpoints
from parallel_ops.train.checkpoint import resume as resuming
from parallel_ops.train.checkpoint.checkpoints import Checkpoints
from parallel_ops.train.data.loader import Loader
from parallel_ops.train.data.packing import Batch, Samples
from parallel_ops.train.data.tokens import TokenStream
from parallel_ops.train.launch.consistency import comparison_of_world, values_of
from parallel_ops.train.launch.signals import SIGNALS, Stopping
from parallel_ops.train.launch.watch import Activity, group_timeout, longest
from parallel_ops.train.metrics import Metrics
from parallel_ops.train.optimizer import LossScale, adamw, learning_rate, update
from parallel_ops.train.parallelize_model import PRECISIONS, micro_batch, parallelize
from parallel_ops.train.progress import Progress
from parallel_ops.train.results import NotFinite, Result, Step

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings

_SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Trainer:
    """A model, its optimizer and its data, on this rank.

    Args:
        settings: the run.
        mesh: the ranks, as many in each dimension as ``settings.plan`` says; ``None`` for this process alone.
        model: in the place of that of ``settings.model``: a module that returns the mean loss of tokens and targets,
            both ``[s, b]``. It has its parameters.
        stream: documents in the place of ``settings.data.paths``.
        activity: is set to what this rank does, for who watches over it.

    Attributes:
        global_step: optimizer steps taken. samples_seen: samples taken from the data.
        origin: what checkpoints say that the run was started from; ``None`` for nothing.

    Raises:
        ValueError: settings that do not fit the mesh; data that cannot be read. OSError: as the file system says.
        Disagreement: a ValueError, on every rank: the ranks have other settings or data, or one of them failed.
    """

    def __init__(
        self,
        settings: "Settings",
        mesh: ParallelMesh | None = None,
        *,
        model: nn.Module | None = None,
        stream: TokenStream | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.settings, self.activity = settings, Activity() if activity is None else activity
        plan = settings.plan
        self.activity("reading data", slow=True)
        with comparison_of_world(longest(settings.run.timeout)) as compare:
            self.mesh = ParallelMesh() if mesh is None else mesh
            self.device, self.samples = self._device_and_samples(stream)
            own: dict[str, Any] = {
                "data.tokens": len(self.samples.stream),
                "data.documents": self.samples.stream.documents,
            }
            own |= {"model": None if model is None else type(model).__name__, "device": self.device.type}
            compare(values_of(settings) | own)
        self.activity("building the model", slow=True)
        self.loader = Loader(
            self.samples, global_batch=plan.global_batch, micro_batch=plan.micro_batch, replicas=self.mesh.size("dp"),
            replica=self.mesh.rank("dp"), vocabulary=settings.config.vocab_size if model is None else None,
            pinned=self.device.type == "cuda",
        )  # fmt: skip
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        # Checkpoints are written beside the steps: their messages need a group of their own.
        self.writers: ProcessGroup | None = None
        if self.world > 1:
            self.writers = dist.new_group(backend="gloo", timeout=group_timeout(settings.run.timeout))
        torch.manual_seed(settings.run.seed)
        self.model = self._built(model)
        self.optimizer = adamw(self.model, settings.optimizer)
        dtype = PRECISIONS[plan.dtype]
        # FSDP2 and replicate cast what they hold; where they hold nothing, autocast does it, op by op.
        self._autocast = not isinstance(self.model, FSDPModule) and dtype is not torch.float32
        self._dtype = dtype
        precision = settings.precision
        is_half = dtype is torch.float16
        self.scale = LossScale(precision.initial_scale, precision.growth_interval) if is_half else LossScale()
        self.global_step = self.samples_seen = 0
        self.origin: str | None = None
        self._saved = -1
        self._stepped = False

    def _device_and_samples(self, stream: TokenStream | None) -> tuple[torch.device, Samples]:
        from parallel_ops.train.planner_bridge import uses_cuda  # needs pydantic, as settings do

        settings, plan, data = self.settings, self.settings.plan, self.settings.data
        for name in _SIZES:
            if self.mesh.size(name) != getattr(plan, name):
                raise ValueError(f"Trainer: the plan has {name}={getattr(plan, name)}, the mesh {self.mesh.size(name)}")
        device = torch.device("cuda", torch.cuda.current_device()) if uses_cuda(settings) else torch.device("cpu")
        if stream is None:
            stream = TokenStream(data.paths, dtype=data.dtype, eos_id=data.eos_id, column=data.column)
        options: Any = {"seed": settings.run.seed, "document_mask": data.document_mask, "shuffle": data.shuffle}
        return device, Samples(stream, seq_length=settings.seq_length, **options)

    def _built(self, given: nn.Module | None) -> nn.Module:
        settings = self.settings
        options: Any = {"recompute_every": settings.recompute.every, "compile": settings.run.compile}
        if given is not None:
            return parallelize(given.to(self.device), self.mesh, settings.plan, **options)
        if settings.model.dir is not None:
            Transformer.check_pretrained(settings.model.dir, settings.config)
        empty = Transformer(settings.config, overlap=settings.model.overlap, device="meta")
        model = parallelize(empty, self.mesh, settings.plan, **options)
        # Offloaded parameters stay on the CPU.
        model.to_empty(device="cpu" if settings.plan.offload != "none" else self.device)
        if settings.model.dir is None:
            model.reset_parameters()  # type: ignore[operator]
        else:
            model.load_pretrained(settings.model.dir)  # type: ignore[operator]
        return model

    def train(self, stopping: Stopping | None = None) -> Result:
        """Takes the steps that are left, saves and reports as the settings say.

        SIGTERM and Ctrl-C end it after the step that they come in, with a checkpoint.

        Raises:
            NotFinite: with ``on_nan`` of ``"stop"``. CheckpointError: a checkpoint cannot be written.
            ValueError, OSError: data that cannot be read, files that cannot be written. ImportError: TensorBoard or
                matplotlib is wanted, and not installed.
        """
        settings, loss = self.settings, math.nan
        stopped: str | None = None
        outputs.check(settings)
        store = self._store()
        if store is not None:
            store.begin(self.global_step)
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(Stopping() if stopping is None else stopping)
            progress = stack.enter_context(Progress(self))
            metrics = stack.enter_context(Metrics(self))
            try:
                while self.global_step < settings.run.steps:
                    step = self.step(asked=lambda: signals.asked)
                    problem = self._problem(step)
                    metrics.add(step)
                    progress.add(step, stops=problem is not None)
                    if problem is not None:
                        raise problem
                    loss = step.loss
                    stopped = step.stop
                    if stopped is not None:
                        break
                    if (
                        store is not None
                        and settings.checkpoint.interval
                        and self.global_step % settings.checkpoint.interval == 0
                    ):
                        self._save(store)
                if store is not None and self._saved != self.global_step:
                    self._save(store)
            finally:
                self.loader.close()
                if store is not None:
                    self.activity("writing the last checkpoint", slow=True)
                    store.wait()
            self.activity("writing what was measured", slow=True)
        found = {} if store is None else checkpoints.steps_in(store.folder)
        result = Result(self.global_step, loss, stopped, found[max(found)] if found else None)
        progress.end(result)
        return result

    def step(self, *, asked: Callable[[], str | None] = lambda: None) -> Step:
        """Takes one step; all ranks call it.

        Args:
            asked: the signal that asks this rank to stop, if one does; every rank's ``Step`` says if one came.
        """
        start = time.perf_counter()
        settings, scale = self.settings, self._gradient_scale
        what, slow = f"step {self.global_step + 1}", not self._stepped  # the first compiles
        self.activity(f"{what}, reading data", slow=True)
        batches = self.loader.step(self.samples_seen)
        self._seed()
        rate = learning_rate(settings.optimizer, settings.run.steps, self.global_step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        counts, everything = self._targets(batches)
        total = torch.zeros((), device=self.device)
        for number, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            micro_batch(self.model, settings.plan.zero, last=number == len(batches) - 1)
            part = f"{what}, micro-batch {number + 1} of {len(batches)}"
            self.activity(f"{part}, forward", slow=slow)
            with torch.autocast(self.device.type, dtype=self._dtype, enabled=self._autocast):
                loss = self._loss(batch.to(self.device), count)
            share = count / everything
            self.activity(f"{part}, backward", slow=slow)
            # Data-parallel ranks take the mean of their gradients.
            (loss * (share * (self.mesh.size("dp") * scale))).backward()
            total += loss.detach() * share
        self.activity(f"{what}, update", slow=slow)
        norm = update(self.optimizer, settings.optimizer.grad_clip, scale)
        self._stepped = True
        self.global_step += 1
        self.samples_seen += settings.plan.global_batch
        found, grad_norm, stop = self._read(total, norm, asked())
        return Step(
            number=self.global_step,
            loss=found,
            grad_norm=grad_norm,
            tokens=settings.plan.global_batch * settings.seq_length,
            seconds=time.perf_counter() - start,
            lr=rate,
            skipped=not math.isfinite(grad_norm),
            stop=stop,
        )

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer, by names that do not depend on the plan, and how far the run is."""
        return resuming.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` gave, on these ranks or on others."""
        resuming.load_state_dict(self, state)

    def save(self) -> None:
        """Saves a checkpoint in the folder of the settings, and waits for it; all ranks call it."""
        store = self._store()
        if store is None:
            raise ValueError("Trainer: checkpoint.dir is not set")
        self._save(store)
        store.wait()

    def resume(self, path: Path | None = None) -> Path:
        """Goes on from a checkpoint; all ranks call it.

        Args:
            path: a checkpoint, or a folder of them, of which the newest; ``None`` for the folder of the settings.

        Returns:
            the checkpoint. It may be of any other plan. Other data begin with their first sample.

        Raises:
            CheckpointError: there is none, a file of it is damaged, or it is of another model.
        """
        folder = self.settings.checkpoint.dir if path is None else Path(path)
        if folder is None:
            raise ValueError("Trainer: checkpoint.dir is not set, and no checkpoint is named")
        self.activity(f"resuming from {folder}", slow=True)
        with comparison_of_world(longest(self.settings.run.timeout)) as compare:
            source = checkpoints.newest(folder)
            compare({"checkpoint": source.name})
        source = resuming.resume(self, folder)
        self._saved = self.global_step
        return source

    def save_pretrained(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        """Writes the model as a Hugging Face folder; all ranks call it. See ``Transformer.save_pretrained``."""
        self.model.save_pretrained(folder, dtype=dtype)  # type: ignore[operator]

    @property
    def _gradient_scale(self) -> float:
        """What the gradients of a step are multiplied by.

        Each context-parallel rank has ``cp`` times its part of a sequence's gradient, of which the reduction takes the
        mean. In fp16 that factor would overflow where one process with the whole sequence does not, so the scale, which
        is that of one process, is divided by it.
        """
        return self.scale.scale / self.mesh.size("cp") if self._dtype is torch.float16 else 1.0

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.world > 1 else 0

    def _loss(self, batch: Batch, count: int) -> Tensor:
        extra = {"positions": batch.positions, "cu_seqlens": batch.cu_seqlens} if self.samples.document_mask else {}
        # Without a target the loss counts for nothing, and a mean over none may be NaN: any targets will do.
        loss: Tensor = self.model(batch.tokens, batch.targets if count else batch.tokens, **extra)
        return loss

    def _targets(self, batches: list[Batch]) -> tuple[list[int], int | Tensor]:
        """How many tokens of each micro-batch have a target, and how many of the step have one, over all ranks; at
        least 1, to divide by."""
        if not self.samples.document_mask:
            counts = [batch.targets.numel() for batch in batches]
            return counts, sum(counts) * self.mesh.size("dp")
        counts = [int((batch.targets != IGNORE_INDEX).sum()) for batch in batches]
        group = self.mesh.group("dp")
        if group is None:
            return counts, max(1, sum(counts))
        everything = torch.tensor(float(sum(counts)), device=self.device)
        dist.all_reduce(everything, group=group)
        return counts, everything.clamp_(min=1)

    def _seed(self) -> None:
        """Ranks that have the same data draw the same, those with other data something else."""
        key = np.random.SeedSequence([self.settings.run.seed, self.global_step, self.mesh.rank("dp")])
        seed = int(key.generate_state(1, np.uint64)[0] >> 1)
        # torch.manual_seed costs a millisecond, and keeps every call, where CUDA is not in use.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _read(self, total: Tensor, norm: Tensor, asked: str | None) -> tuple[float, float, str | None]:
        """Loss over all ranks, norm, and the signal that came to one: one reduction, one wait for the device."""
        values = torch.stack([total, *(torch.full_like(total, asked == name) for name in SIGNALS)])
        if self.world > 1:
            dist.all_reduce(values)
        loss, *came, grad_norm = torch.cat([values, norm.to(values)[None]]).tolist()
        stop = next((name for name, ranks in zip(SIGNALS, came, strict=True) if ranks), None)
        # The ranks that share weights or a sequence have the same loss each.
        return loss / (self.mesh.size("tp") * self.mesh.size("cp")), grad_norm, stop

    def _problem(self, step: Step) -> NotFinite | None:
        """Why a step that is not finite ends the run; ``None`` if the run goes on."""
        finite = math.isfinite(step.grad_norm) and math.isfinite(step.loss)
        first = self.samples_seen - self.settings.plan.global_batch
        where = f"step {step.number}, samples {first} to {self.samples_seen - 1}"
        # In fp16 gradients that overflow are no news; a loss that does is.
        if not finite and not (self.scale.growth_interval and math.isfinite(step.loss)):
            if self.settings.run.on_nan == "stop":
                kept = "; no parameter was changed" if step.skipped else ""
                return NotFinite(f"{where}: loss {step.loss}, gradient norm {step.grad_norm}{kept}")
            return None
        try:
            self.scale.update(finite)
        except FloatingPointError as error:
            return NotFinite(f"{where}: {error}")
        return None

    def _store(self) -> Checkpoints | None:
        own = self.settings.checkpoint
        if own.dir is None:
            return None
        return Checkpoints(own.dir, keep=own.keep, asynchronous=own.asynchronous, group=self.writers)

    def _save(self, store: Checkpoints) -> None:
        self.activity(f"saving step {self.global_step}", slow=True)
        resuming.save(self, store)
        self._saved = self.global_step
