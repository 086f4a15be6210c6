"""Random settings: a model of any family and size, a plan of several processes for it, and the same on one process."""

import itertools
import random
from pathlib import Path
from typing import Any

from torch import Tensor

from parallel_ops.models.config import plain_name
from parallel_ops.train.config import Settings
from parallel_ops.train.settings import patterns
from support.parallelism.layers import whole
from support.ranks.distributed import Raised, ranks
from support.runs import trainer as runs

Sections = dict[str, dict[str, Any]]
# Loss and gradient norm of each step, the loss of an evaluation, and whole weights and buffers of a rank.
Found = tuple[list[tuple[float, float]], float | None, dict[str, Tensor]]
STEPS, SAVED = 4, 2
_LLAMA = {"activation": "swiglu", "norm": "rms_norm", "bias": False, "positions": "rotary"}
_PATTERNS = ("tokens.*", "layers.0.*", "layers.*.attention.*", "*norm*", "layers.*", "*bias")
_SCALINGS = (
    {"kind": "linear", "factor": 2.0}, {"kind": "dynamic", "factor": 2.0, "original_length": 6},
    {"kind": "llama3", "factor": 4.0, "low_frequency": 1.0, "high_frequency": 4.0, "original_length": 8},
)  # fmt: skip
_YARN = {"factor": 4.0, "original_length": 12, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False}


def model_of(draw: random.Random) -> dict[str, Any]:
    """A model of some family, with sizes that nothing need divide."""
    family = draw.choice(("gpt", "llama", "qwen", "olmo", "gpt-oss", "mixtral", "deepseek", "latent"))
    heads, size = draw.choice((1, 2, 3, 4, 4, 4, 6, 8)), draw.choice((2, 4, 6, 8))
    model: dict[str, Any] = {
        "vocab_size": draw.choice((31, 32, 37, 48, 64)), "seq_length": draw.choice((1, 2, 3, 5, 8, 12, 15, 16, 16, 24)),
        "num_layers": draw.choice((1, 2, 3, 4, 4, 5)), "num_heads": heads, "init_std": 0.1,
        "hidden_size": draw.choice((heads * size, 24, 32, 36, 30, 33)), "head_dim": size,
        "ffn_hidden_size": draw.choice((24, 32, 36, 40, 44, 33)), "tied_embeddings": draw.random() < 0.5,
    }  # fmt: skip
    if family == "gpt":
        return model | {"activation": draw.choice(("gelu", "gelu_exact")), "dropout": 0.0}
    model |= _LLAMA | {"num_kv_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0])}
    if draw.random() < 0.2:
        model["window"] = draw.randint(1, 20)
    elif draw.random() < 0.1:
        model["window"] = [draw.choice((2, 3, 7, "none")) for _ in range(model["num_layers"])]
    if draw.random() < 0.2:
        model["prediction_layers"] = draw.randint(1, 2)
    if draw.random() < 0.2:
        model["rotary_scaling"] = draw.choice(_SCALINGS)
    if draw.random() < 0.2:
        model |= {"bias": True, "norm": "layer_norm", "activation": draw.choice(("gelu", "swiglu"))}
    if family == "qwen":
        model |= {"qk_norm": True, "qkv_bias": draw.random() < 0.5}
    if family == "olmo":
        model |= {"qk_norm": True, "qk_norm_over": "all_heads"}
    if family in ("deepseek", "latent"):
        model |= {"num_kv_heads": None, "head_dim": None, "latent": {
            "kv_lora_rank": draw.choice((6, 8)), "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": size,
        } | ({"q_lora_rank": 10} if draw.random() < 0.5 else {})}  # fmt: skip
        model = {name: value for name, value in model.items() if value is not None}
    if family == "gpt-oss":
        model |= {"attention_bias": True, "attention_sinks": True, "rotary_scaling": _YARN}
        model["window"] = [(5, "none")[layer % 2] for layer in range(model["num_layers"])]
    if family in ("mixtral", "deepseek", "gpt-oss"):
        model["experts"] = _experts(draw, family, model["num_layers"])
    return model


def _experts(draw: random.Random, family: str, layers: int) -> dict[str, Any]:
    count = draw.choice((2, 4, 6, 8))
    found: dict[str, Any] = {
        "num_experts": count, "top_k": draw.randint(1, 2), "ffn_hidden_size": draw.choice((8, 12, 16, 7)),
        "aux_loss": draw.choice((0.0, 0.05)), "z_loss": draw.choice((0.0, 0.01)),
        "aux_loss_over": draw.choice(("layer", "model")),
    }  # fmt: skip
    if family == "deepseek":
        found |= {"shared_experts": draw.randint(0, 2), "dense_layers": draw.randint(0, layers - 1), "score": "sigmoid"}
        found |= {"selection_bias": True, "balance_rate": 0.01, "scale": 2.0}
        if count % 4 == 0:
            found |= {"groups": 4, "top_groups": 2}
    if draw.random() < 0.3:
        found["normalize"] = False
    if family == "gpt-oss":
        found |= {"top_k_first": True, "router_bias": True, "bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    if draw.random() < 0.2:  # so many that none is dropped: what is dropped depends on the ranks
        found["capacity_factor"] = float(count)
    return found


def sections_of(draw: random.Random) -> Sections:
    """The sections that a plan does not change."""
    found: Sections = {"model": model_of(draw), "run": {"steps": STEPS}}
    if draw.random() < 0.3:
        found["model"] |= {"overlap": draw.choice(("off", 1, 2, 3)), "grad_reduce": draw.choice(("fp32", "backend"))}
    length = found["model"]["seq_length"]
    found["data"] = {
        "document_mask": draw.random() < 0.4, "packing": draw.choice(("concatenate", "concatenate", "best_fit")),
        "shuffle": draw.random() < 0.8, "seq_length": length if draw.random() < 0.7 else draw.randint(1, length),
    }  # fmt: skip
    # A token that attends to itself alone has no gradient of queries and keys: Muon makes a matrix of its rounding.
    alone = found["data"]["seq_length"] == 1 or found["model"].get("window") == 1
    found["optimizer"] = {
        "kind": draw.choice(("adamw", "adamw", "adamw" if alone else "muon")), "grad_clip": draw.choice((0.5, "none")),
    }  # fmt: skip
    if draw.random() < 0.2:
        found["optimizer"]["groups"] = [{"match": draw.choice(("tokens.*", "*norm*")), "lr_ratio": 0.5}]
    found["precision"] = {"dtype": draw.choice(("fp32",) * 6 + ("bf16", "fp16"))}
    if found["precision"]["dtype"] == "bf16" and draw.random() < 0.5:
        found["precision"] |= {"linears": "fp8_rowwise", "fp8_emulation": True, "fp8_bf16_layers": draw.randint(0, 1)}
    if found["precision"]["dtype"] == "fp16":  # low, since gradients of a replica are larger than their share
        found["precision"]["initial_scale"] = 256.0
    kind = draw.random()
    if kind < 0.15:
        targets = draw.choice((["layers.*"], ["layers.*.attention.*"], ["q_proj", "down_proj"]))
        found["lora"] = {"rank": draw.randint(1, 4), "targets": targets}
    elif kind < 0.4:
        found["model"]["freeze"] = draw.sample(_PATTERNS, draw.randint(1, 2))
    if draw.random() < 0.4:
        found["evaluation"] = {"share": 0.1, "sequences": draw.randint(1, 9)}
    return found


def plan_of(draw: random.Random, sections: Sections, processes: int, batch: dict[str, int]) -> Sections:
    """A plan over so many processes. Settings may refuse it."""
    experts = sections["model"].get("experts")
    layouts = [
        sizes for sizes in itertools.product((1, 2, 4, 8), repeat=5)
        if sizes[0] * sizes[1] * sizes[2] * sizes[3] * sizes[4] == processes
    ]  # fmt: skip
    with_stages = [sizes for sizes in layouts if sizes[0] > 1]
    pp, tp, cp, replicate, shard = draw.choice(with_stages if with_stages and draw.random() < 0.5 else layouts)
    plan: dict[str, Any] = {
        **batch, "pp": pp, "tp": tp, "cp": cp, "dp": replicate * shard, "dp_replicate": replicate,
        "zero": draw.randint(0, 3), "sequence_parallel": tp > 1 and draw.random() < 0.6,
        "cp_kind": draw.choice(("ring", "all_to_all")) if cp > 1 else "ring",
    }  # fmt: skip
    if draw.random() < 0.2:
        plan["cp_groups"] = "by_length"
    if experts and pp > 1 and draw.random() < 0.3:
        plan["ep_overlap"] = True
    if draw.random() < 0.2:
        plan["tp_overlap"] = False
    if cp > 1:
        plan["cp_layout"] = draw.choice(("zigzag", "balanced", "contiguous", "auto"))
    if plan["zero"] and shard * cp > 1 and draw.random() < 0.3:
        plan["offload"] = "optimizer"
    if experts:
        plan["ep"] = draw.choice([n for n in (1, 2, 4, 8) if (shard * cp * tp) % n == 0])
    if pp > 1:
        plan["schedule"] = draw.choice(("1f1b", "gpipe", "zb-h1", "zb-2p", "interleaved", "zb-v", "dualpipe-v"))
        if draw.random() < 0.3:
            ends = sorted(draw.choices(range(sections["model"]["num_layers"] + 1), k=pp - 1))
            plan["layers_per_chunk"] = [
                b - a for a, b in itertools.pairwise([0, *ends, sections["model"]["num_layers"]])
            ]
    kinds = ("none", "none", "selective", "full") + ("experts",) * bool(experts)
    recompute: dict[str, Any] = {"kind": draw.choice(kinds), "every": draw.choice((1, 2))}
    if draw.random() < 0.2:
        recompute |= {"offload": draw.choice(("inputs", "all")), "offload_least_bytes": draw.choice((0, 256))}
    return {"parallel": plan, "recompute": recompute}


class Case:
    """One random case.

    Args:
        most: Processes of a plan at most.

    Attributes:
        sections: Of all three. plans: Of the first process group, and of one that resumes after ``SAVED`` steps.
        refused: Errors of ``Settings`` for plans.
    """

    def __init__(self, number: int, data: Path, folder: Path, *, most: int = 8) -> None:
        draw = random.Random(f"case {number}")
        self.number, self.folder, self.refused = number, folder, list[str]()
        while True:
            self.sections = sections_of(draw)
            micro = draw.choice((1, 1, 2, 4))
            batch = {"global_batch": draw.choice((8, 8, 16, 4 * micro)), "micro_batch": micro}
            try:
                self.alone = runs.settings_of(data, **self.sections, parallel=batch)
                patterns.check(self.alone, patterns.names_of(self.alone))
            except ValueError:
                continue
            break
        self.plans: list[tuple[Sections, Settings]] = []
        for processes in (min(most, draw.choice((2, 2, 4, 4, 4, 4, 4, 8))), draw.choice((1, 2, 4))):
            for _ in range(50):
                plan = plan_of(draw, self.sections, processes, batch)
                saved = {} if self.plans else {"checkpoint": {"dir": str(folder)}}
                try:
                    settings = runs.settings_of(data, **self.sections, **plan, **saved)
                except ValueError as error:
                    self.refused.append(str(error))
                    continue
                self.plans.append((plan, settings))
                break

    @property
    def text(self) -> str:
        return f"case {self.number}: {self.sections}, {' then '.join(str(plan) for plan, _ in self.plans)}"

    def problems(self) -> list[str]:
        """Differences from one process, and errors."""
        if len(self.plans) < 2:
            return []
        want = steps(0, self.alone, None)
        found = []
        for (_, settings), resume, done in zip(self.plans, (None, self.folder), (0, SAVED), strict=True):
            results = _run(settings, resume)
            raised = [got for got in results if isinstance(got, Raised)]
            if raised:  # the others lost this one
                first = next((got for got in raised if got.type not in ("PeerError", "Disagreement")), raised[0])
                found.append(f"{settings.plan.text}: {first.type}: {first.message}\n{first.trace}")
                break
            for rank, got in enumerate(results):
                found += [
                    f"{settings.plan.text}: rank {rank}: {line}" for line in differences(settings, got, want, done)
                ]
            if found:
                break
        return found


def differences(settings: Settings, got: "Found", want: "Found", done: int = 0) -> list[str]:
    """Differences of what a rank found from one process, whose steps after ``done`` they are."""
    half = settings.precision.dtype != "fp32"
    muon = settings.optimizer.kind == "muon"  # rounds updates to bfloat16
    found = []
    for number, (own, expected) in enumerate(zip(got[0], want[0][done:], strict=True)):
        rtol, atol = (3e-2, 1e-2) if half else (3e-3, 1e-3) if muon and number + done else (2e-5, 2e-6)
        for name, a, b in zip(("loss", "norm"), own, expected, strict=True):
            if not abs(a - b) <= atol + rtol * (1 if name == "loss" else 2) * abs(b):
                found.append(f"step {done + number + 1}: {name} {a}, not {b}")
    if got[1] is not None and want[1] is not None and abs(got[1] - want[1]) > (3e-2 if muon or half else 1e-4):
        found.append(f"evaluation {got[1]}, not {want[1]}")
    # In 16 bits a token near a border may go to another expert.
    rtol, atol = (0.15, 0.05) if half else (5e-2, 1e-2) if muon else (2e-4, 1e-4)
    for name, value in got[2].items():
        error, size = (value - want[2][name]).norm().item(), want[2][name].norm().item()
        if not error <= rtol * size + atol:
            found.append(f"{name} is off by {error:.3g} of {size:.3g}")
    return found


def _run(settings: Settings, resume: Path | None) -> list[Any]:
    if settings.plan.gpus == 1:
        return [steps(0, settings, resume)]
    group = ranks(settings.plan.gpus)
    try:
        found = group.outcomes(steps, settings, resume)
    except TimeoutError as error:
        return [Raised("TimeoutError", str(error), "")]
    if any(isinstance(got, Raised) for got in found):
        group.close()
    return found


def steps(rank: int, settings: Settings, resume: Path | None = None) -> Found:
    """Steps of a run, and what this rank has then."""
    trainer, found = runs.trainer_of(settings, resume), []
    for step in runs.taken(trainer):
        found.append((step.loss, step.grad_norm))
        if trainer.global_step == SAVED and settings.checkpoint.dir is not None:
            trainer.save()
    evaluated = trainer.evaluate() if settings.evaluates else None
    state = {name: t for name, t in trainer.model.state_dict().items() if isinstance(t, Tensor)}
    weights = {plain_name(name): whole(t.detach()).cpu().float() for name, t in state.items()}
    return found, evaluated, weights
