"""What each rank does in the tests of the pipeline: one step of a plan, beside one process."""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.config import plain_name
from parallel_ops.pipeline_parallel import Pipeline
from parallel_ops.planner.plan import SCHEDULES, Plan
from parallel_ops.planner.schedules.action import Action
from parallel_ops.planner.schedules.schedule import Simulation, actions, simulate
from parallel_ops.train import parallelize
from support.parallelism.layers import mesh_of_plan, whole
from support.parallelism.pipeline import counted_exchanges

LLAMA = TransformerConfig(
    vocab_size=61, seq_length=24, num_layers=8, hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=16,
    ffn_hidden_size=80, activation="swiglu", norm="rms_norm", bias=False, positions="rotary", tied_embeddings=False,
    init_std=0.1,
)  # fmt: skip
GPT2 = TransformerConfig(
    vocab_size=61, seq_length=24, num_layers=8, hidden_size=48, num_heads=4, ffn_hidden_size=80, init_std=0.1
)
CONFIGS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "untied": dataclasses.replace(GPT2, tied_embeddings=False),
    "dropout": dataclasses.replace(GPT2, dropout=0.2, attention_dropout=0.1),
    "further": dataclasses.replace(LLAMA, prediction_layers=2),
}
# Documents of a row, for models that keep them apart.
DOCUMENTS = (0, 7, 8, 19, 24)
SEED = 5


def inputs_of(config: TransformerConfig, plan: Plan, replica: int, documents: bool) -> list[dict[str, Any]]:
    """The micro-batches of a data-parallel rank."""
    generator = torch.Generator().manual_seed(100 + replica)
    found = []
    for number in range(plan.micro_batches):
        text = torch.randint(config.vocab_size, (config.seq_length + 1, plan.micro_batch), generator=generator)
        given: dict[str, Any] = {"tokens": text[:-1], "targets": text[1:].clone()}
        if documents:
            given |= {"cu_seqlens": torch.tensor(DOCUMENTS)}
        given["targets"][number % config.seq_length] = -100
        found.append(given | {"dropout_seed": SEED + 1000 * replica + number})
    return found


def one_process(
    config: TransformerConfig, plan: Plan, documents: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a step."""
    torch.manual_seed(0)
    model = Transformer(config).to(dtype)
    total = 0.0
    for replica in range(plan.dp):
        for given in inputs_of(config, plan, replica, documents):
            loss = model(**given) / (plan.dp * plan.micro_batches)
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def build(text: str, config: TransformerConfig, split: bool = True) -> tuple[Transformer, Pipeline, Plan, Any]:
    """This rank's stages, with the weights of one process."""
    plan = Plan.parse(text)
    mesh = mesh_of_plan(plan)
    model: Any = parallelize(Transformer(config, device="meta"), mesh, plan)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    half = plan.dtype != "fp32" and plan.dp * plan.cp > 1
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[plan.dtype] if half else torch.float32
    return model, Pipeline(model, mesh, plan, dtype=dtype, split=split), plan, mesh


def step(
    rank: int, text: str, kind: str, documents: bool = False, steps: int = 1, split: bool = True
) -> tuple[float, dict[str, Tensor], float, dict[str, int]]:
    """(loss of this rank's replica, whole gradients of its stages, norm, what was sent and held) of the last step."""
    config = CONFIGS[kind]
    model, pipeline, plan, mesh = build(text, config, split)
    given = inputs_of(config, plan, mesh.rank("dp"), documents)
    autocast = plan.dtype != "fp32" and plan.dp * plan.cp == 1

    def around() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()

    for _ in range(steps):
        model.zero_grad()
        losses = pipeline.step(given, lambda _: 1 / plan.micro_batches, around=around)
    grads = {plain_name(name): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    counts = {
        "bytes": pipeline.messages.bytes_sent // steps,
        "live": pipeline.executor.peak_live,
        "deferred": pipeline.executor.peak_deferred,
    }
    return (
        sum(loss.item() for loss in losses.values()) / plan.micro_batches,
        grads,
        pipeline.total_norm().item(),
        counts,
    )


def accumulated(rank: int, text: str) -> list[tuple[dict[str, Tensor], float]]:
    """(gradients, norm) of a step, and of two without ``zero_grad``, with an evaluation between them."""
    model, pipeline, plan, mesh = build(text, GPT2)
    given, found = inputs_of(GPT2, plan, mesh.rank("dp"), False), []
    for _ in range(2):
        pipeline.step(given, lambda _: 1.0)
        grads = {plain_name(name): whole(p.grad).clone() for name, p in model.named_parameters()}
        found.append((grads, pipeline.total_norm().item()))
        pipeline.evaluate(given)
    return found


def work(rank: int, text: str, split: bool) -> tuple[dict[str, int], dict[str, int]]:
    """(matmuls, exchanges) by kind of a step of a sequence-parallel model, after a first one."""
    config = dataclasses.replace(LLAMA, num_layers=2)
    _, pipeline, plan, mesh = build(text, config, split)
    given = inputs_of(config, plan, mesh.rank("dp"), False)
    pipeline.step(given, lambda _: 1.0)
    with (
        counted_exchanges() as made,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        pipeline.step(given, lambda _: 1.0)
    # ``key_averages`` takes ten times as long as the step.
    counted = collections.Counter(event.name() for event in profile.profiler.kineto_results.events())  # type: ignore[union-attr]
    names = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "parallel_ops::flash_attention")
    return {name: counted[name] for name in names if counted[name]}, dict(made)


def draws(seed: int, count: int) -> list[tuple[str, str, bool]]:
    """Random plans of four ranks: every schedule and parallelism with one another."""
    from random import Random

    random, found = Random(seed), []
    layouts = [
        {"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "dp": 2, "dp_replicate": 2},
    ]  # fmt: skip
    for layout, kind in itertools.islice(itertools.cycle(itertools.product(layouts, SCHEDULES)), count):
        plan: dict[str, Any] = {**layout, "schedule": kind, "dtype": "fp32"}
        pp, least = layout["pp"], 2 * layout["pp"] if kind == "dualpipe-v" else 1
        m = random.randint(least, 12)
        if kind == "interleaved":
            m, plan["virtual_stages"] = pp * random.randint(1, 3), 2
        if kind in ("zb-v", "dualpipe-v"):
            plan["virtual_stages"] = 2
        plan["micro_batch"] = random.randint(1, 2)
        plan["global_batch"] = m * plan["micro_batch"] * layout.get("dp", 1)
        plan["recompute"] = random.choice(["none", "none", "full", "selective"])
        if layout.get("tp") and random.random() < 0.5:
            plan["sequence_parallel"] = "true"
        if layout.get("dp") or layout.get("cp"):
            plan["zero"] = random.randint(0, 3)
        documents = random.random() < 0.3
        if documents:
            plan["global_batch"] //= plan["micro_batch"]
            plan["micro_batch"] = 1
        found.append((",".join(f"{k}={v}" for k, v in plan.items()), random.choice(["llama", "gpt2"]), documents))
    random.shuffle(found)
    return found


def simulation(plan: Plan) -> Simulation:
    """The planner's simulation of a plan's schedule."""
    return simulate(actions(plan.schedule, plan.pp, plan.micro_batches, plan.virtual_stages))


def peak_deferred(order: Sequence[Action]) -> int:
    """The most weight gradients that wait between I and W on a rank."""
    held = most = 0
    for action in order:
        held += {"I": 1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most
