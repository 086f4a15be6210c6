"""What each rank does in the tests of ``Trainer``, and the settings that they train."""

import contextlib
import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel_ops.train import Trainer
from parallel_ops.train.checkpoint import resume
from parallel_ops.train.config import Settings
from parallel_ops.train.results import Result, Step
from support.parallelism.layers import mesh_of_plan

VOCABULARY = 31
MODELS = {
    "gpt": {"vocab_size": VOCABULARY, "seq_length": 16, "num_layers": 2, "hidden_size": 32, "num_heads": 4},
    "llama": {
        "vocab_size": VOCABULARY, "seq_length": 16, "num_layers": 2, "hidden_size": 32, "num_heads": 4,
        "num_kv_heads": 4, "activation": "swiglu", "norm": "rms_norm", "bias": False, "positions": "rotary",
        "tied_embeddings": False,
    },
}  # fmt: skip
# As DeepSeek's: a first layer without experts, a shared one, groups, and both kinds of balance.
MODELS["experts"] = MODELS["llama"] | {
    "experts": {
        "num_experts": 8, "top_k": 2, "ffn_hidden_size": 16, "shared_experts": 1, "dense_layers": 1, "score": "sigmoid",
        "groups": 4, "top_groups": 2, "selection_bias": True, "balance_rate": 0.01, "scale": 2.0, "aux_loss": 0.05,
        "z_loss": 0.01,
    }
}  # fmt: skip
# With latent attention, and a layer that predicts further tokens.
MODELS["deepseek"] = {name: value for name, value in MODELS["experts"].items() if name != "num_kv_heads"} | {
    "latent": {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 16},
    "prediction_layers": 1,
}  # fmt: skip
# As GPT-OSS: sinks, windows in turn, biases of attention, of the router and of experts, clamped SwiGLU, and YaRN.
MODELS["gpt-oss"] = MODELS["llama"] | {
    "attention_bias": True, "attention_sinks": True, "window": (5, None),
    "rotary_scaling": {"factor": 4.0, "original_length": 12, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False},
    "experts": {
        "num_experts": 8, "top_k": 2, "ffn_hidden_size": 16, "top_k_first": True, "router_bias": True, "bias": True,
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "swiglu_up_offset": 1.0, "aux_loss": 0.05,
    },
}  # fmt: skip


# A run of two ranks as a file, of tokens.bin beside it.
RUN = """
[run]
steps = 400
[model]
vocab_size = 64
seq_length = 32
num_layers = 1
hidden_size = 32
num_heads = 4
[data]
paths = ["tokens.bin"]
[parallel]
dp = 2
zero = 3
global_batch = 4
[precision]
dtype = "fp32"
[checkpoint]
dir = "checkpoints"
[logging]
jsonl = "metrics.jsonl"
"""


def data_file(folder: Path) -> Path:
    """Tokens that follow one another by a rule, in documents of some 12."""
    generator = np.random.default_rng(0)
    steps = generator.integers(1, 3, 6000)
    tokens = 1 + np.cumsum(steps) % (VOCABULARY - 1)
    tokens[np.cumsum(generator.integers(2, 22, 400))] = 0
    path = folder / "tokens.bin"
    tokens.astype("uint16").tofile(path)
    return path


def write_tokens(path: Path, *, seed: int, count: int) -> None:
    """A token file that is there as a whole."""
    part = path.with_name(f".{path.name}")
    np.random.default_rng(seed).integers(1, VOCABULARY, count).astype("uint16").tofile(part)
    part.rename(path)


def parallel_ops(*arguments: str) -> tuple[int, str]:
    """Exit code of the command line, and what it prints."""
    from typer.testing import CliRunner

    from parallel_ops._commands import app

    done = CliRunner().invoke(app, arguments, prog_name="parallel-ops")
    if isinstance(done.exception, ValueError):  # which the program prints
        return 2, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def settings_of(data: Path, /, **sections: Any) -> Settings:
    """Of a small run; ``sections`` go over it key by key."""
    base: dict[str, Any] = {
        "run": {"steps": 5, "device": "cpu", "seed": 3},
        "model": MODELS["gpt"],
        "data": {"paths": [str(data)], "eos_id": 0},
        "optimizer": {"lr": 1e-2, "eps": 1e-4, "grad_clip": 0.5, "warmup": 2},
        "parallel": {"global_batch": 8, "micro_batch": 1},
        "precision": {"dtype": "fp32"},
    }
    for name, section in sections.items():
        own = {} if name == "model" else base.get(name, {})
        base[name] = {**own, **section}
    if "sources" in base["data"]:
        del base["data"]["paths"]
    return Settings.model_validate(base)


def trainer_of(settings: Settings, source: Path | None = None, **options: Any) -> Trainer:
    """A trainer of this rank, resumed from a checkpoint if one is given."""
    trainer = Trainer(settings, mesh_of_plan(settings.plan) if dist.is_initialized() else None, **options)
    if source is not None:
        trainer.resume(source)
    return trainer


def taken(trainer: Trainer, end: int | None = None) -> Iterator[Step]:
    """Takes the steps that are left, or those up to ``end``; the loader's thread ends after them."""
    while trainer.global_step < (trainer.settings.run.steps if end is None else end):
        yield trainer.step()
    trainer.loader.close()


def steps_of(
    rank: int, settings: Settings, resume: Path | None = None, steps: int | None = None
) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps that are left, or of some; a checkpoint after them if there is a folder."""
    trainer = trainer_of(settings, resume)
    return _stepped(trainer, None if steps is None else trainer.global_step + steps)


def steps_of_phase(rank: int, settings: Settings, source: Path) -> tuple[list[str], list[tuple[float, float]]]:
    """The lines at the start of a phase, and the same of its first two steps."""
    trainer = trainer_of(settings)
    return trainer.begin_phase(source), _stepped(trainer, 2)


def _stepped(trainer: Trainer, end: int | None) -> list[tuple[float, float]]:
    found = [(step.loss, step.grad_norm) for step in taken(trainer, end)]
    if trainer.settings.checkpoint.dir is not None:
        trainer.save()
    return found


def steps_of_each(rank: int, settings: list[Settings]) -> list[tuple[float, float]]:
    """As ``steps_of``, each rank with settings of its own."""
    return steps_of(rank, settings[rank])


def resumed_from_each(rank: int, settings: Settings, checkpoints: list[Path]) -> None:
    """Each rank resumes from a checkpoint of its own."""
    trainer_of(settings, checkpoints[rank])


def printed(rank: int, settings: Settings) -> tuple[str, str]:
    """What a whole run prints on this rank: standard output and error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        train(rank, settings)
    return out.getvalue(), err.getvalue()


def train(rank: int, settings: Settings, resume: Path | None = None) -> Result:
    return trainer_of(settings, resume).train()


def saved_while_it_changes(rank: int, settings: Settings) -> bool:
    """Whether what is written beside the steps is what was there when the save began."""
    trainer = trainer_of(settings)
    trainer.step()
    store = resume.checkpointer(trainer)
    assert store is not None
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    resume.save(trainer, store)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    for state in trainer.optimizer.state.values():
        state["exp_avg"].zero_()
    store.wait()
    trainer.resume()
    moved = all(bool((state["exp_avg"] != 0).any()) for state in trainer.optimizer.state.values())
    return moved and all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def scales_of(rank: int, settings: Settings) -> tuple[list[float], list[bool]]:
    """The loss scale after each step, and which were skipped."""
    trainer = trainer_of(settings)
    scales, skipped = [], []
    for step in taken(trainer):
        scales.append(trainer.scale.scale)
        skipped.append(step.skipped)
    return scales, skipped


def tuned(rank: int, settings: Settings, folder: Path) -> tuple[list[float], torch.Tensor]:
    """The losses of a run, and the logits ``[s, vocabulary]`` of a row of tokens after it; saved for transformers.

    With a checkpoint too, if there is a folder for it.
    """
    trainer = trainer_of(settings)
    losses = [loss for loss, _ in _stepped(trainer, None)]
    trainer.save_pretrained(folder)
    with torch.no_grad():
        logits = trainer.model.eval()(torch.arange(12)[:, None] % VOCABULARY)[:, 0]
    return losses, logits


def bytes_a_parameter(rank: int, settings: Settings) -> float:
    """Of all tensors that are alive when the optimizer takes its second step, beside what was there before."""
    before, found = _alive(), []  # kept alive, or a new tensor could have the address of one that was freed
    trainer = trainer_of(settings)
    whole = sum(p.numel() for p in trainer.model.parameters())

    def count(*_: Any) -> None:
        found.append(sum(storage.nbytes() for memory, storage in _alive().items() if memory not in before))

    trainer.optimizer.register_step_pre_hook(count)
    for _ in range(2):
        trainer.step()
    trainer.loader.close()
    return found[-1] / whole


def _alive() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors, by its address."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta]
    storages = [t.untyped_storage() for t in found if t.layout is torch.strided]
    return {storage.data_ptr(): storage for storage in storages}


def evaluated(rank: int, settings: Settings) -> list[tuple[float, float, float]]:
    """Loss and gradient norm of each step, and the loss of an evaluation after it."""
    trainer = trainer_of(settings)
    return [(step.loss, step.grad_norm, trainer.evaluate()) for step in taken(trainer)]


def saved_both_ways(rank: int, settings: Settings, folder: Path) -> None:
    """A checkpoint after a step, and the Hugging Face folder of the same model."""
    trainer = trainer_of(settings)
    trainer.step()
    trainer.loader.close()
    trainer.save()
    if settings.plan.pp == 1:
        trainer.save_pretrained(folder)
