"""A small GPT of Megatron-core, trained some steps on the CPU with and without the drop-in: on one rank or several."""

import contextlib
import io
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.distributed import distributed_c10d

from parallel_ops.integrations import megatron
from parallel_ops.integrations.megatron._rebind import Binding, Replaced
from support.numerics.recorded_calls import recorded_calls

VOCAB, LENGTH, BATCH, MICRO_BATCHES = 64, 16, 2, 2
# SwiGLU, as most models have it.
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}


class AttentionWithoutWidths(DotProductAttention):
    """Megatron's own core of attention, which latent attention gives the widths of heads, which it does not take."""

    def __init__(self, *args, k_channels=None, v_channels=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


@dataclass(frozen=True)
class Case:
    """``drop_in``: "stock", "apply" or "spec" (which applies too). ``pattern``: the layers of a ``HybridModel``."""

    drop_in: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    steps: int = 2
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    pattern: str | None = None
    exact: bool = False
    grad_reduce: str = "fp32"
    deterministic: bool = False


def tagged_torch_norm(_, config, hidden_size, eps=1e-5, **__):
    """What Megatron lacks without Apex: torch's norm, with parameters that say that they saw a part of the tokens, and
    with results in their dtype, as Transformer Engine's norms have it."""
    kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
    norm = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    norm.register_forward_hook(lambda norm, _, y: y.to(norm.weight.dtype))
    return norm


@contextlib.contextmanager
def on_cpu():
    """Megatron on the CPU; its own compiled fusions run as they are written. Leaving takes a third of a second."""
    with torch.compiler.set_stance("force_eager"), megatron.on_cpu():
        yield


@contextlib.contextmanager
def drop_in(case):
    """Megatron with what the case says."""
    with contextlib.ExitStack() as stack:
        if case.drop_in != "stock":
            stack.enter_context(megatron.apply(exact_megatron=case.exact, deterministic=case.deterministic))
        else:
            if case.config.get("sequence_parallel"):
                made = vars(WrappedTorchNorm)["__new__"]
                tagged = Binding(WrappedTorchNorm, "__new__", made, staticmethod(tagged_torch_norm))
                stack.enter_context(Replaced("megatron", [tagged]))
            if case.config.get("gradient_accumulation_fusion"):  # which needs Apex or this
                stack.enter_context(megatron.apply(["weight_gradient"]))
        yield


@contextlib.contextmanager
def model_parallel(*sizes, **more_sizes):
    """Megatron's groups, which end with the block. Megatron only forgets them: dozens a model, with threads of their
    own, that would stay for as long as the ranks do. Groups of this package's meshes in the same ranks stay."""
    parallel_state.initialize_model_parallel(*sizes, **more_sizes)
    try:
        yield
    finally:
        groups = [vars(parallel_state)[name] for name in vars(parallel_state) if name.isupper() and "GROUP" in name]
        flat = [g for found in groups for g in (found if isinstance(found, list) else [found])]
        parallel_state.destroy_model_parallel()
        for group in {g for g in flat if isinstance(g, dist.ProcessGroup)} - {dist.group.WORLD}:
            if group in distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


def train(rank, *cases):
    """For each case, losses (on the last stage) and gradient norms of each step. The group of all ranks exists."""
    return _each(cases, _train)


def restart(rank, *cases):
    """The same, of a run that ends in the middle, and of one that goes on from the checkpoint of the first."""

    def halves(case):
        saved = io.BytesIO()
        first = _train(case, until=case.steps // 2, save=saved)
        saved.seek(0)
        second = _train(case, load=torch.load(saved))
        return [a + b for a, b in zip(first, second, strict=True)]

    return _each(cases, halves)


def _each(cases, run):
    results = []
    with on_cpu():
        for case in cases:
            more = {"expert_model_parallel_size": case.ep, "expert_tensor_parallel_size": case.etp}
            with drop_in(case), model_parallel(case.tp, case.pp, context_parallel_size=case.cp, **more):
                results.append(run(case))
    return results


def build(case, **stages):
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    torch.manual_seed(1234)
    kind = MLATransformerConfig if case.config.get("multi_latent_attention") else TransformerConfig
    config = kind(
        **{
            "num_layers": len(case.pattern.partition("/")[0].replace("|", "")) if case.pattern else 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "use_cpu_initialization": True,
            "init_method_std": 0.3,  # at the default the losses barely depend on what the layers do
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "bias_activation_fusion": True,
            "bias_dropout_fusion": True,
            "tensor_model_parallel_size": case.tp,
            "pipeline_model_parallel_size": case.pp,
            "context_parallel_size": case.cp,
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": case.etp,
            "pipeline_dtype": case.dtype,
            "params_dtype": case.dtype,
            "bf16": case.dtype is torch.bfloat16,
            **case.config,
        }
    )
    arguments = {"vocab_size": VOCAB, "max_sequence_length": LENGTH, **case.model, **stages}
    if case.pattern is not None:
        from support.integrations import megatron_hybrids

        return config, megatron_hybrids.build(case, config, AttentionWithoutWidths, **arguments).to(case.dtype)
    if case.drop_in == "spec":
        spec = megatron.gpt_block_spec(config, grad_reduce=case.grad_reduce)
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
        )
        if config.multi_latent_attention:
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = AttentionWithoutWidths
    if config.mtp_num_layers:
        arguments["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return config, GPTModel(config, spec, **arguments).to(case.dtype)


def surface(rank, case):
    """What Megatron's optimizer, data parallelism and checkpoints read of a model's parameters."""
    with on_cpu(), drop_in(case), model_parallel(case.tp):
        _, model = build(case)
        names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")
        attributes = {
            name: (tuple(p.shape), {a: getattr(p, a) for a in names if hasattr(p, a)})
            for name, p in model.named_parameters()
        }
        groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state = model.sharded_state_dict(metadata=groups)
        shards = {
            key: (s.key, s.global_shape, s.global_offset, s.replica_id)
            for key, s in state.items()
            if hasattr(s, "global_offset")
        }
        return attributes, shards, sorted(model.state_dict())


def _train(case, *, until=None, save=None, load=None):
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    config, model = build(case, pre_process=first, post_process=last)
    ddp_config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **case.ddp})
    model = DistributedDataParallel(config, ddp_config, model)
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = model.no_sync
    batches = torch.Generator().manual_seed(0)
    losses, norms = [], []
    steps = range(case.steps if until is None else until)
    if load is not None:
        model.load_state_dict(load["model"])
        torch.set_rng_state(load["rng"])
        get_cuda_rng_tracker().set_states(load["tracker"])
        batches.set_state(load["batches"])
        steps = range(load["step"], case.steps)
    for _ in steps:
        tokens = torch.randint(VOCAB, (MICRO_BATCHES, BATCH, LENGTH + 1), generator=batches)
        model.zero_grad_buffer()
        results = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(tokens),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH // case.cp,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        losses.append(sum(r["loss"].item() for r in results) / MICRO_BATCHES if last else None)
        norms.append(_gradient_norm(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.01 * parameter.main_grad.to(parameter.dtype))
    if save is not None:
        states = {"rng": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        states |= {"batches": batches.get_state(), "step": len(steps)}
        torch.save({"model": model.state_dict(), **states}, save)
    return losses, norms


def _forward_step(batches, model):
    tokens = next(batches)
    rank, ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    chunks = torch.arange(LENGTH).chunk(2 * ranks)
    positions = torch.cat((chunks[rank], chunks[-1 - rank])) if ranks > 1 else chunks[0].new_tensor(range(LENGTH))
    output = model(tokens[:, positions], positions.expand(BATCH, -1), None, labels=tokens[:, positions + 1])
    # Megatron multiplies a loss by the number of context-parallel ranks.
    return output, lambda loss: (loss.float().mean() / ranks, {"loss": loss.detach().float().mean()})


def _gradient_norm(model):
    """Of all parameters of all ranks, each counted once."""
    first_rank = parallel_state.get_tensor_model_parallel_rank() == 0
    squares = [
        parameter.main_grad.double().square().sum()
        for parameter in model.parameters()
        if (first_rank or getattr(parameter, "tensor_model_parallel", False))
        and not getattr(parameter, "shared", False)
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt().item()


def plain_linear_calls(rank, sequence_parallel):
    """The collectives that Megatron's own column-parallel linear starts: in its forward, and in its backward."""
    x, weight = torch.ones(4, 2, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True)
    parallel_state._set_global_memory_buffer()
    try:
        with on_cpu():
            with recorded_calls() as forward:
                y = linear_with_grad_accumulation_and_async_allreduce(
                    x, weight, None, gradient_accumulation_fusion=False, allreduce_dgrad=not sequence_parallel,
                    sequence_parallel=sequence_parallel, tp_group=dist.group.WORLD,
                )  # fmt: skip
            with recorded_calls() as backward:
                y.sum().backward()
    finally:
        parallel_state.destroy_global_memory_buffer()
    return forward, backward
