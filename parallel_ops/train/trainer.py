"""Trains one model over the ranks of a mesh, one step after another.

A step is ``micro_batches`` forwards and backwards, with as few gradient reductions as the plan's ``zero`` allows, one
norm over all ranks and one update. Samples, learning rate and random seed depend on the settings and the number of the
step alone, so a run that is resumed on the same plan takes the same steps, bit by bit.
"""

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_ops._internal.command_line import unbroken_output
from parallel_ops.comm import ParallelMesh
from parallel_ops.models.lora import save_adapters
from parallel_ops.train.build import build_loader, build_model, build_samples, checked_device, compared_values
from parallel_ops.train.checkpoint import new_phase
from parallel_ops.train.checkpoint import resume as resuming
from parallel_ops.train.data.tokens import TokenStream
from parallel_ops.train.launch.consistency import comparison_of_world, values_of
from parallel_ops.train.launch.signals import GracefulShutdown
from parallel_ops.train.launch.watchdog import Activity, group_timeout, longest, noted
from parallel_ops.train.loop import take_steps
from parallel_ops.train.results import Result, Step
from parallel_ops.train.run_state import RunState
from parallel_ops.train.step.evaluation import Evaluation
from parallel_ops.train.step.expert_use import METRICS as EXPERT_METRICS
from parallel_ops.train.step.expert_use import expert_use, overflowed
from parallel_ops.train.step.forward_backward import StepInputs, forward_backward_of
from parallel_ops.train.step.layer_graphs import graph_of
from parallel_ops.train.step.optimizer import LossScale, learning_rate, optimizer_of, update
from parallel_ops.train.step.reductions import count_targets, micro_batch_seed, of_first_rank, reduce_results

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings


class Trainer(RunState):
    """A model, its optimizer and its data, on this rank; a context manager, which calls ``close``.

    Args:
        settings: The settings of the run.
        mesh: The ranks, with the sizes of ``settings.plan``; ``None`` for this process alone.
        model: Replaces ``settings.model``: an initialised module that returns the mean loss of tokens and targets, both
            int64 ``[s, b]``.
        stream: Documents that replace ``settings.data.paths``.
        activity: Receives a description of what this rank does, for ``Watchdog``.

    Attributes:
        global_step: Optimizer steps taken. samples_seen: Samples taken from the data.
        evaluation_loss: Loss of the evaluation after the last step; ``None`` if there was none.
        saved_step: Step of the newest checkpoint of this run, or of the one that it was resumed from; -1 for none.
        origin: The checkpoint from which the run was started, as checkpoints record it; ``None`` for none.
        own_base: The base of the adapters is that of no ``model.dir``, so checkpoints have it.
        eager_reason: Why ``run.cuda_graph`` captures nothing; ``None`` if it does, or is off.

    Raises:
        ValueError: The settings do not fit the mesh, or the data cannot be read. OSError: From the file system.
        Disagreement: A ValueError on every rank: settings or data differ between ranks, or one rank failed.
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
            self.device = checked_device(settings, self.mesh)
            self.samples, held_out = build_samples(settings, stream)
            built = {"model": None if model is None else type(model).__name__, "device": self.device.type}
            compare(values_of(settings) | built | compared_values(settings, self.samples, held_out))
        self.activity("building the model", slow=True)
        self.world, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        # Checkpoints are written while steps run, so their messages need their own group; for one rank of NCCL, too.
        self.writers = None
        if dist.is_initialized():
            self.writers = dist.new_group(backend="gloo", timeout=group_timeout(settings.run.timeout))
        torch.manual_seed(settings.run.seed)
        self.model = build_model(settings, self.mesh, self.device, model)
        vocabulary = settings.config.vocab_size if model is None else None
        load = functools.partial(build_loader, settings, self.mesh, self.model, vocabulary, self.device.type == "cuda")
        self.loader = load(self.samples, grouped=True)
        self.optimizer = optimizer_of(self.model, settings.optimizer)
        self.forward_backward = forward_backward_of(
            self.model, self.mesh, plan, self.device, self.activity, documents=self.samples.document_mask,
            split=settings.splits_backward,
        )  # fmt: skip
        self.graph, self.eager_reason = graph_of(settings, self.model, self.optimizer, self.device)
        self.scale = LossScale.of(settings.precision)
        self.global_step = self.samples_seen = 0
        self._look_ahead()
        self.evaluation = None
        if held_out is not None:
            self.evaluation = Evaluation(settings, self.forward_backward, held_out, load(held_out))
        self.evaluation_loss = self.origin = self.wandb_run = None
        self.own_base, self.saved_step, self._stepped = False, -1, False

    def close(self) -> None:
        """Ends the reading thread, closes the data's files and destroys the process group of the checkpoints' messages.

        All ranks call it. Model, optimizer and ``state_dict`` stay; a step or a save raises ``AttributeError``. The
        mesh is the caller's: see ``ParallelMesh.close``.
        """
        self._release()
        if self.graph is not None:
            self.graph.reset()
        if self.writers is not None:
            dist.destroy_process_group(self.writers)
            self.writers = None

    def _release(self) -> None:
        if "loader" in vars(self):
            self.loader.close()
            del self.loader, self.samples, self.evaluation

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
        else:  # destroying a group could wait for lost ranks
            self._release()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            closed = ": the trainer is closed" if name in ("loader", "samples", "evaluation") else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{closed}", name=name, obj=self
            )

    def train(self, stopping: GracefulShutdown | None = None) -> Result:
        """Takes the remaining steps, with checkpoints and logs as in the settings.

        SIGTERM, SIGHUP and Ctrl-C end it after the current step, with a checkpoint. Lines and logs that cannot be
        written, as to a closed pipe, do not end it.

        Raises:
            NotFinite: A step is not finite, with ``on_nan="stop"``. CheckpointError: A checkpoint cannot be written.
            ValueError, OSError: Data cannot be read, or files cannot be written. ImportError: TensorBoard or matplotlib
                is needed and not installed.
        """
        with unbroken_output():
            return take_steps(self, GracefulShutdown() if stopping is None else stopping)

    def step(
        self, *, stop_signal: Callable[[], str | None] = lambda: None, failed: Callable[[], bool] = lambda: False
    ) -> Step:
        """Takes one step; all ranks call it.

        Args:
            stop_signal: Returns the signal that this rank has received, or ``None``; ``Step.stop`` has it on all.
            failed: Returns true if the current save has failed on this rank; ``Step.save_failed`` has it on every rank.
        """
        start = time.perf_counter()
        settings, scale = self.settings, self.scale.of_gradients(self.mesh.size("cp"))
        what, slow = f"step {self.global_step + 1}", not self._stepped  # the first compiles
        self.activity(f"{what}, reading data", slow=True)
        self._look_ahead()
        batches = self.loader.step(self.samples_seen)
        rows = [self.mesh.rank("dp") if batch.first_rank is None else batch.first_rank for batch in batches]
        seeds = [micro_batch_seed(settings.run.seed, self.global_step, n, row) for n, row in enumerate(rows)]
        rate = learning_rate(settings.optimizer, settings.schedule_steps, self.global_step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_ratio"]
        counts, targets, divisor = count_targets(batches, self.mesh, self.device, ignores=self.samples.ignores)
        # What cp ranks share counts cp times; groups by length have other sizes.
        cp = self.mesh.size("cp")
        parts = [1.0 if batch.cp_ranks is None else cp / batch.cp_ranks for batch in batches]
        shares = [count / divisor * part for count, part in zip(counts, parts, strict=True)]
        # Data-parallel ranks take the mean of their gradients.
        factors = [share * (self.mesh.size("dp") * scale) for share in shares]
        given = StepInputs(batches, counts, shares, factors, seeds, scale)
        compute = functools.partial(self._compute, what=what, slow=slow)
        self.activity(f"{what}, forward, backward and update", slow=slow)
        with noted(self.activity):
            total, norm, use = compute(given) if self.graph is None else self.graph.step(given, compute)
        self._stepped, self.evaluation_loss = True, None
        self.global_step += 1
        self.samples_seen += settings.plan.global_batch
        found, grad_norm, without_target, stop, unsaved, *of_experts = reduce_results(
            total, norm, targets, stop_signal(), failed(), self.mesh, use
        )  # fmt: skip
        self.scale.update(found, grad_norm)
        return Step(
            number=self.global_step, loss=found, grad_norm=grad_norm, lr=rate, seconds=time.perf_counter() - start,
            tokens=settings.plan.global_batch * settings.seq_length, skipped=not math.isfinite(grad_norm), stop=stop,
            without_target=without_target, save_failed=unsaved, redone=self.graph is not None and self.graph.redone,
            experts=dict(zip(EXPERT_METRICS, of_experts, strict=True)) if of_experts else None,
        )  # fmt: skip

    def _compute(self, given: StepInputs, what: str, slow: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's share of the loss, the gradient norm and the use of experts: all that a CUDA graph computes."""
        total = self.forward_backward.run(given, what, slow=slow)
        self.activity(f"{what}, update", slow=slow)
        total_norm = self.forward_backward.total_norm()
        use = expert_use(self.model, self.device)
        checked = self.graph is not None and self.graph.capacity is not None
        norm = update(
            self.optimizer, self.settings.optimizer.grad_clip, given.scale, total_norm=total_norm,
            discard=overflowed(use) if checked and use is not None else None,
        )  # fmt: skip
        return total, norm, use

    def _look_ahead(self) -> None:
        """Looks for the data of the next two steps, of which one is read ahead."""
        self.samples.reach(self.samples_seen + 2 * self.settings.plan.global_batch, of_first_rank)

    def evaluate(self) -> float:
        """The mean loss on the evaluation data, in nats; all ranks call it. See ``train.step.evaluation``.

        Raises:
            ValueError: The settings have no data to evaluate on, or it cannot be read.
        """
        if self.evaluation is None:
            raise ValueError("Trainer: there is no data to evaluate on; set evaluation.paths or evaluation.share")
        with noted(self.activity):
            self.evaluation_loss = self.evaluation.run(self.global_step)
        return self.evaluation_loss

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and progress of the run, by names that do not depend on the plan."""
        return resuming.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a ``state_dict``, which may come from other ranks."""
        resuming.load_state_dict(self, state)

    def save(self) -> None:
        """Saves a checkpoint in ``checkpoint.dir`` and waits until it is written; all ranks call it. Those of more
        steps, which another run has left, are renamed to ``abandoned-...``."""
        resuming.save_and_wait(self)

    def resume(self, path: Path | None = None) -> Path:
        """Resumes from a checkpoint of any plan; all ranks call it. With other data, the first sample is next.

        Args:
            path: A checkpoint, or a folder whose newest checkpoint is taken; ``None`` for ``checkpoint.dir``.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: There is no checkpoint, a file of it is damaged, or it has another model.
        """
        folder = self.settings.checkpoint.dir if path is None else Path(path)
        if folder is None:
            raise ValueError("Trainer: checkpoint.dir is not set, and no checkpoint is named")
        resuming.common_source(self, folder, f"resuming from {folder}")
        source = resuming.resume(self, folder)
        self.saved_step = self.global_step
        return source

    def begin_phase(self, path: Path) -> list[str]:
        """Begins a new phase of training from a checkpoint of any plan; all ranks call it.

        Frozen parameters, adapters, sequence length, vocabulary, rotary positions, data and optimizer may be others
        than before. Weights are kept, and what else can be; steps and learning rate begin anew.

        Args:
            path: A checkpoint, or a folder whose newest checkpoint is taken.

        Returns:
            What is kept and what begins anew, a line each.

        Raises:
            CheckpointError: There is no checkpoint, a file of it is damaged, or it has another model.
        """
        source = resuming.common_source(self, Path(path), f"beginning a new phase from {path}")
        found = new_phase.begin(self, source)
        self.saved_step = -1
        return found

    def save_pretrained(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        """Writes a Hugging Face folder, or with ``lora`` the folder of the adapters as peft has it; all ranks call it.

        See ``Transformer.save_pretrained`` and ``models.lora.save_adapters``.
        """
        if self.own_base:
            raise ValueError("Trainer: no folder has the base of these adapters: save a checkpoint, and export it")
        if self.settings.lora is not None:
            save_adapters(self.model, folder, base=resuming.base_of(self), dtype=dtype)  # type: ignore[arg-type]
            return
        self.model.save_pretrained(folder, dtype=dtype)  # type: ignore[operator]
