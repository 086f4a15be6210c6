"""The description and the result of a run in labelled lines."""

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from parallel_ops._internal.files import described
from parallel_ops._internal.module_names import some_of
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.lora import add_adapters
from parallel_ops.pipeline_parallel import ModuleChain, cut
from parallel_ops.train.data.split import in_both

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings
    from parallel_ops.train.data.any_samples import AnySamples
    from parallel_ops.train.data.tokens import TokenStream
    from parallel_ops.train.report.settings import LoggingSettings
    from parallel_ops.train.results import Result
    from parallel_ops.train.run_state import RunState
    from parallel_ops.train.settings.model import LoraSettings

Line = tuple[str, str]
# Columns of the labels.
_LABEL = 12


def text(lines: Iterable[Line], width: int | None = None) -> str:
    """The lines as text, with labels in a column; contents are broken at spaces and commas, to ``width`` columns.

    Args:
        width: ``None`` for the width of the terminal, or for no limit if standard output is none.
    """
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    rows: list[str] = []
    for label, content in lines:
        parts = [content] if width is None else _broken(content, max(width - _LABEL - 1, 20))
        rows += [f"{'' if number else label:{_LABEL}} {part}" for number, part in enumerate(parts)]
    return "\n".join(rows)


def _broken(content: str, width: int) -> list[str]:
    """Rows of at most ``width`` columns, unless a word is longer."""
    rows = [""]
    for word in re.findall(r"[^ ,]*[ ,]+|[^ ,]+", content):
        if rows[-1] and len((rows[-1] + word).rstrip()) > width:
            rows.append("")
        rows[-1] += word
    return [row.rstrip() for row in rows]


def plan_lines(settings: "Settings", device: str, parameters: int) -> list[Line]:
    """Plan, ranks, model and step of a run."""
    plan, config = settings.plan, settings.config
    sizes = {"pp": plan.pp, "dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard, "cp": plan.cp, "tp": plan.tp}
    shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    ranks = f"{plan.gpus}: {shape}, neighbours in the last dimension" if shape else "1"
    across = f" on each of {plan.dp} data-parallel ranks" if plan.dp > 1 else ""
    stages: list[Line] = []
    if plan.pp > 1:
        found = cut(config.num_layers, plan)
        held = ", ".join(f"{rank}: {_ranges(found.layers_on(rank))}" for rank in range(plan.pp))
        stages = [("stages", f"{found.count}, {plan.schedule}; layers of pipeline rank {held}")]
    experts: list[Line] = []
    if (of := config.experts) is not None:
        layers = _count(config.num_layers - of.dense_layers, "layer")
        held = f", {of.num_experts // plan.ep} on each of {plan.ep} ranks" if plan.ep > 1 else ""
        experts = [("experts", f"{of.num_experts} in {layers}{held}; {of.top_k} for each token")]
    return [
        ("plan", plan.text or "one rank"),
        ("ranks", f"{ranks}; {device}"),
        *stages,
        *experts,
        ("model", f"{parameters:,} parameters: {config.num_layers} layers, hidden {config.hidden_size}"),
        ("step", f"{plan.global_batch} x {settings.seq_length:,} = {plan.global_batch * settings.seq_length:,} tokens: "
                 f"{_count(plan.micro_batches, 'micro-batch', 'es')} of {plan.micro_batch}{across}"),
    ]  # fmt: skip


def parameters_of(config: TransformerConfig, lora: "LoraSettings | None" = None) -> int:
    """The number of parameters of a whole model, with its adapters. Buffers, such as a selection bias, are none."""
    model = Transformer(config, device="meta")
    if lora is not None:
        add_adapters(model, lora.options)
    return sum(p.numel() for p in model.parameters())


def start_lines(trainer: "RunState") -> list[Line]:
    """The description of a run from its current step on."""
    settings, samples = trainer.settings, trainer.samples
    if isinstance(trainer.model, ModuleChain):
        parameters = trainer.model.num_parameters
    elif settings.plan.pp > 1:  # those of this rank's stages are a part
        parameters = parameters_of(settings.config, settings.lora)
    else:
        parameters = sum(p.numel() for p in trainer.model.parameters())
    left, batch = settings.run.steps - trainer.global_step, settings.plan.global_batch
    tokens = left * batch * settings.seq_length
    span = f"steps {trainer.global_step + 1:,} to {settings.run.steps:,}" if left > 0 else "no step is left"
    position = f", from sample {trainer.samples_seen:,} on" if trainer.samples_seen else ""
    lines = [
        *plan_lines(settings, device_name(trainer.device), parameters),
        ("run", f"{span}: {tokens:,} tokens, {left * batch / samples.in_epoch:.3g} epochs{position}"),
        *_schedule(settings),
        *data_lines(samples, left * batch),
    ]
    if trainer.evaluation is not None:
        held_out, many = trainer.evaluation.samples.stream, _count(trainer.evaluation.sequences, "sequence")
        counted = _counted(trainer.evaluation.samples)
        lines += [("evaluation", f"{many} of {_files(held_out)}, {_when(settings.evaluation.interval)}; {counted}")]
    own = settings.checkpoint
    best = " and the best" if own.keep_best else ""
    lines += [
        ("checkpoints", "none" if own.dir is None else f"{own.dir}, {_when(own.interval)}; {own.keep}{best} are kept")
    ]
    return lines + _logs(settings.logging)


def _schedule(settings: "Settings") -> list[Line]:
    whole, steps = settings.schedule_steps, settings.run.steps
    return [("", f"the learning rate is that of a run of {whole:,} steps, cut short")] if whole > steps else []


def data_lines(samples: "AnySamples", taken: int) -> list[Line]:
    """The data of a run. ``taken``: Samples that it takes."""
    stream, shuffled = samples.stream, "shuffled" if samples.shuffle else "as they lie in the packed documents"
    return [
        ("data", f"{len(stream):,} tokens in {_count(stream.documents, 'document')}: {_files(stream)}"),
        ("", f"{_count(samples.in_epoch, 'sequence')} of {samples.seq_length:,} an epoch, {shuffled}"),
        ("", _counted(samples)),
        *(("", line) for line in samples.details(taken)),
    ]


def _counted(samples: "AnySamples") -> str:
    """The share of the tokens that count in the loss."""
    share = samples.stream.share_counted if samples.masked else 1.0
    by = f", by {', '.join(dict.fromkeys(name for f in samples.stream.files for name in f.masks))}" if share < 1 else ""
    if not share:
        return f"no token counts in the loss{by}"
    return f"{'all' if share == 1 else f'{100 * share:.3g}% of the'} tokens count in the loss{by}"


def warnings(data: "AnySamples", evaluation: "AnySamples | None") -> list[str]:
    """Warnings about files that are not read, data of which nothing counts, and evaluation data that is trained on."""
    found = []
    for name, samples in (("data", data), ("evaluation", evaluation)):
        if samples is None:
            continue
        if skipped := samples.stream.skipped:
            found.append(
                f"warning: {name}: not read: {described(skipped)}. To train on the bytes of a text, name its file in "
                'data.paths, with data.dtype = "uint8"'
            )
        if samples.masked and not samples.stream.share_counted:
            found.append(
                f"warning: {name}: no token counts in the loss, since the masks leave out all; data.prompt_loss = true "
                "counts them"
            )
    if evaluation is not None and (both := in_both(data.stream, evaluation.stream)):
        found.append(
            f"warning: evaluation: the data that is trained on has tokens of {some_of(list(map(str, both)))} too"
        )
    return found


def end_lines(trainer: "RunState", result: "Result", first: int, seconds: float) -> list[Line]:
    """The result of a run.

    Args:
        first: Steps taken before this run. seconds: From its start to the end of its last step.
    """
    settings, steps = trainer.settings, result.step - first
    tokens = steps * settings.plan.global_batch * settings.seq_length
    before = f", {first:,} of them before" if first else ""
    took = f"; {tokens:,} tokens in {timedelta(seconds=round(seconds))}, {tokens / seconds:,.0f} tokens/s; last loss "
    reached = f"{result.step:,} of {settings.run.steps:,} steps{before}" + (f"{took}{result.loss:.4f}" if steps else "")
    lines = [("stopped" if result.stopped else "done", reached)]
    if result.evaluation_loss is not None:
        lines += [("evaluation", f"last loss {result.evaluation_loss:.4f}")]
    if result.checkpoint is not None:
        lines += [("checkpoint", str(result.checkpoint))]
    if result.best is not None:
        lines += [("best", f"{result.best[1]}, with an evaluation loss of {result.best[0]:.4f}")]
    return lines + _logs(settings.logging)


def _when(interval: int) -> str:
    return f"every {interval} steps and at the end" if interval else "at the end"


def device_name(device: torch.device) -> str:
    """The name of this rank's device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {_count(torch.get_num_threads(), 'thread')} each"


def _logs(settings: "LoggingSettings") -> list[Line]:
    files: dict[str, Path | None] = {
        "a line a step": settings.jsonl, "TensorBoard": settings.tensorboard, "plot": settings.plot,
        "pipeline": settings.trace, "profile": settings.profile,
    }  # fmt: skip
    written = [f"{file} ({kind})" for kind, file in files.items() if file is not None]
    return [("logs", ", ".join(written))] if written else []


def _files(stream: "TokenStream") -> str:
    return some_of([f"{file.path} ({size:,})" for file, size in zip(stream.files, stream.sizes, strict=True)])


def _ranges(numbers: Sequence[int]) -> str:
    """``(0, 1, 2, 7)`` as ``0-2+7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
