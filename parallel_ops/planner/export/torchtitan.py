"""A torchtitan configuration: a Python module with a function that returns a ``Trainer.Config``.

    torchrun ... -m torchtitan.train --module plan --config planned

with the module saved as ``plan.py`` on Python's path. For a model that torchtitan has, ``planned`` starts from its
configuration there. For another, ``with_plan`` applies the plan to a given configuration.

Fields: torchtitan 0.3, ``torchtitan/config/configs.py`` and ``torchtitan/trainer.py``.
"""

from collections.abc import Iterator
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export.target import DROPLESS, PLAIN_EXPERTS, PLAIN_STATES, ExportTarget
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import chunk_layers
from parallel_ops.planner.plan import Plan

# Package, configuration and flavor of the presets that torchtitan has.
MODELS = {
    "llama3-8b": ("llama3", "llama3_8b", "8B"),
    "llama3-70b": ("llama3", "llama3_70b", "70B"),
    # llama3_405b() always converts the model to fp8, and fails on GPUs without it.
    "llama3-405b": ("llama3", "llama3_70b", "405B"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b", "671B"),
}
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
_SPLIT_BACKWARD = ("zb-v", "dualpipe-v")
_POLICIES = {"operators": "SelectiveAC", "selective": "KeepProducts", "full": "FullAC"}

# SelectiveAC recomputes every second matmul, which a plan calls "operators"; "selective" recomputes none.
_KEEP_PRODUCTS = '''

class KeepProducts(SelectiveAC):
    """Keeps what products, attention and communication give; recomputes norms, activation functions and the rest."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def _wrap_block(self, module, *, base_fqn=None):
        saved = list(self.get_save_ops())
        return checkpoint_wrapper(
            module,
            context_fn=lambda: create_selective_checkpoint_contexts(saved),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=False,
            debug=self.config.debug,
        )
'''


def _problems(model: Model, cluster: Cluster, plan: Plan) -> Iterator[str]:
    split = plan.pp > 1 and plan.schedule in _SPLIT_BACKWARD
    if split and plan.fused_ops:
        # torch.distributed.pipelining: _check_torch_compile_compatibility
        yield f"torch.compile, which fuses its elementwise ops, cannot run {plan.schedule}; add fused_ops=false"
    if split and plan.zero == 0 and plan.dp > 1:
        # pytorch/pytorch#144530: the hooks of DistributedDataParallel never run where I and W are computed apart.
        yield f"{plan.schedule} with replicated parameters loses gradients; add zero=2"
    if split and plan.zero == 3:
        # stage_backward_input finds no leaf of the graph among parameters that were resharded after forward.
        yield f"{plan.schedule} with ZeRO 3 loses gradients; add zero=2"
    if plan.offload != "none" and plan.zero == 0:
        yield "it offloads what FSDP shards: ZeRO 2 or 3"
    if plan.tp > 1 and not plan.sequence_parallel:
        yield "its tensor parallelism includes sequence parallelism"
    if model.experts and plan.ep > 1 and plan.expert_shards > 1:
        # Its experts are spread over tensor-parallel ranks, too (parallel_dims.py: dp_shard * cp * tp / ep).
        yield "its tensor parallelism does not split experts that are spread over ranks; add expert_tp=1"
    if plan.zero == 0 and plan.cp * plan.tp % plan.ep:
        yield "it spreads experts over the ranks that shard parameters; add zero=2"
    if model.experts and plan.ep == 1 and plan.expert_shards < plan.tp:
        yield "its tensor parallelism splits experts without expert parallelism; leave expert_tp out"
    if plan.dtype == "fp8_rowwise" and model.name not in MODELS:
        yield f"a model's own registry converts it to fp8, and torchtitan has none for {model.name}"


def _models(model: Model) -> Iterator[str]:
    if model.prediction_layers:
        yield "its models predict the next token alone; prediction_layers must be 0"


def _own(plan: Plan) -> dict[str, Any]:
    own: dict[str, Any] = {"fused_ops": False} if plan.pp > 1 and plan.schedule in _SPLIT_BACKWARD else {}
    return own | ({"expert_tp": 1} if plan.ep > 1 and plan.tp > 1 else {})


def _write(model: Model, cluster: Cluster, plan: Plan) -> str:
    package, config, flavor = MODELS.get(model.name, ("", "", ""))
    imports = ["from torchtitan.config import CompileConfig, ParallelismConfig"]
    if plan.recompute == "selective":
        imports = [
            "from dataclasses import dataclass",
            "",
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper",
            "from torch.utils.checkpoint import create_selective_checkpoint_contexts",
            *imports,
            "from torchtitan.distributed.activation_checkpoint import SelectiveAC",
        ]
    elif plan.recompute != "none":
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {_POLICIES[plan.recompute]}")
    losses = "ChunkedLossWrapper, CrossEntropyLoss" if plan.fused_loss else "ChunkedLossWrapper"
    imports.insert(len(imports) - (plan.recompute != "none"), f"from torchtitan.components.loss import {losses}")
    if plan.dtype == "fp8_rowwise":
        imports.append(f"from torchtitan.components.quantization import {', '.join(_converters(model))}")
    if package:
        imports.append(f"from torchtitan.models.{package} import config_registry, model_registry")
    imports.append("from torchtitan.trainer import Trainer")
    parts = ["\n".join(imports), _KEEP_PRODUCTS if plan.recompute == "selective" else "", _with_plan(model, plan)]
    if package:
        parts.append(_planned(model, config, flavor, plan))
    return f'"""{model.name}: {plan.describe()}"""\n\n' + "".join(parts)


def _with_plan(model: Model, plan: Plan) -> str:
    training = {
        # A pipeline takes all its micro-batches in one batch; otherwise they are gradient accumulation.
        "local_batch_size": plan.micro_batch * (plan.micro_batches if plan.pp > 1 else 1),
        "global_batch_size": plan.global_batch,
        "seq_len": model.seq_length,
        "mixed_precision_param": "float32" if plan.dtype == "fp32" else "bfloat16",
        "enable_cpu_offload": plan.offload != "none",
    }
    if plan.pp > 1 or plan.ep > 1:
        training["disable_cuda_graphs"] = True
    recompute = f"{_POLICIES[plan.recompute]}.Config()" if plan.recompute != "none" else "None"
    settings = "\n".join(f"    config.training.{name} = {_literal(value)}" for name, value in training.items())
    sizes = "\n".join(f"        {name}={_literal(value)}," for name, value in _parallelism(model, plan).items())
    other, loss = "ChunkedLossWrapper", "config.loss.loss_fn"
    if plan.fused_loss:
        other, loss = "CrossEntropyLoss", "ChunkedLossWrapper.Config(loss_fn=config.loss)"
    return f'''

def with_plan(config: Trainer.Config) -> Trainer.Config:
    """The configuration of a run, made to follow the plan."""
{settings}
    config.parallelism = ParallelismConfig(
{sizes}
    )
    config.activation_checkpoint = {recompute}
    config.compile = CompileConfig(enable={plan.fused_ops})
    if isinstance(config.loss, {other}.Config):
        config.loss = {loss}
    return config
'''


def _parallelism(model: Model, plan: Plan) -> dict[str, Any]:
    sharded = plan.zero > 0
    out: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp_replicate if sharded else plan.dp,
        "data_parallel_shard_degree": plan.dp_shard if sharded else 1,
        "fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never",
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
        "expert_parallel_degree": plan.ep,
    }
    if plan.pp > 1:
        stages = [[f"layers.{layer}" for layer in layers] for layers in chunk_layers(model, plan)]
        stages[0].insert(0, "tok_embeddings")
        stages[-1] += ["norm", "lm_head"]
        out |= {
            "pipeline_parallel_schedule": SCHEDULES[plan.schedule],
            "pipeline_parallel_microbatch_size": plan.micro_batch,
            "module_fqns_per_model_part": stages,
        }
    return out


def _converters(model: Model) -> dict[str, str]:
    """Names of the classes that convert the linears of layers to fp8, with arguments; they scale rows."""
    if model.experts:
        linears = 'filter_fqns=["lm_head", "router.gate"], '
        return {"Float8GroupedExpertsConverter": "", "Float8LinearConverter": linears}
    return {"Float8LinearConverter": 'filter_fqns=["lm_head"], '}


def _planned(model: Model, config: str, flavor: str, plan: Plan) -> str:
    compiled = f"model_compile_enabled={plan.fused_ops}"
    made = ", ".join(f"{name}.Config({given}{compiled})" for name, given in _converters(model).items())
    converters = f", converters=[{made}]" if plan.dtype == "fp8_rowwise" else ""
    assets = '\n    config.hf_assets_path = "./assets/hf/Llama-3.1-405B"' if flavor == "405B" else ""
    # The last call runs the checks of Trainer.Config again.
    return f'''

def planned() -> Trainer.Config:
    config = with_plan(config_registry.{config}())
    config.model_spec = model_registry("{flavor}"{converters}){assets}
    config.__post_init__()
    return config
'''


def _literal(value: Any) -> str:
    """Python source of a value; a list of lists has one line per list."""
    if not isinstance(value, list):
        return f'"{value}"' if isinstance(value, str) else repr(value)
    rows = ("            [" + ", ".join(f'"{name}"' for name in row) + "]," for row in value)
    return "\n".join(["[", *rows, "        ]"])


TORCHTITAN = ExportTarget(
    name="torchtitan",
    adapters="the module that is written converts no linears to adapters",
    write=_write,
    command=("-m", "torchtitan.train", "--module", "plan", "--config", "planned"),
    config="plan.py",
    environment=lambda cluster, plan: {"PYTHONPATH": '"$PWD${PYTHONPATH:+:$PYTHONPATH}"'},
    limits={
        **PLAIN_STATES,
        **PLAIN_EXPERTS,
        **DROPLESS,
        "expert_tp": ((0, 1), "its tensor parallelism splits all experts or none"),
        "zero": ((0, 2, 3), "it shards gradients with the optimizer: ZeRO 0, 2 or 3"),
        "schedule": (tuple(SCHEDULES), f"it has {', '.join(SCHEDULES)}"),
        "cp_kind": (("ring",), "its context parallelism is a ring"),
        "dtype": (("bf16", "fp8_rowwise", "fp32"), "it trains in bf16, fp8_rowwise or fp32"),
        "grad_dtype": (("fp32",), "it reduces gradients in fp32"),
        "offload": (("none", "optimizer"), "it offloads parameters and optimizer"),
        "recompute": (
            ("none", *_POLICIES),
            "it recomputes layers, every second product, or norms and activation functions",
        ),
        "flash_attention": ((True,), "its attention stores no scores"),
        "fsdp": ((True,), "its shards are FSDP2's"),
        "gather_parameters": ((False,), "FSDP2 gathers layers"),
        "overlap": ((True,), "FSDP overlaps its communication"),
        "optimizer_barrier": ((True,), "it waits for the gradient norm of all ranks"),
        "input_grad_first": ((False,), "its backward pass sends the gradient of the input at its end"),
    },
    models=_models,
    problems=_problems,
    software="torchtitan-2025",
    own=_own,
)
