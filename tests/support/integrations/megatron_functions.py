"""Functions of Megatron-core and those of the drop-in on the same values: the loss of shards, the core of attention."""

from unittest import mock

import torch
import torch.distributed as dist

from parallel_ops.integrations import megatron
from support.integrations.megatron import LENGTH, build, drop_in, model_parallel, on_cpu


def losses_of_shards(rank, label_smoothing, fused):
    """Of logits shared by the ranks, with targets outside the vocabulary: Megatron's loss and gradient and ours; and
    with ``label_smoothing`` over the whole vocabulary. Also how often each calls ``all_reduce`` on the group."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    group, world = dist.group.WORLD, dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 3, 10 * world, generator=generator)
    target = torch.randint(10 * world, (6, 3), generator=generator)
    target[0, 0], target[1, 1] = -1, 10 * world
    grad = torch.randn(3, 6, generator=generator).t()
    counts: list[int] = []

    def run(loss_function, group=group):
        logits = whole.chunk(world, -1)[rank].clone().requires_grad_()
        doubled = logits * 1  # since both write over what they are given
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            loss = loss_function(doubled, target, group) if fused else loss_function(doubled, target, label_smoothing)
            loss.backward(grad)
        counts.append(all_reduce.call_count)
        return loss.detach(), logits.grad

    with torch.compiler.set_stance("force_eager"), model_parallel(world):
        results = {"stock": run(fused_vocab_parallel_cross_entropy if fused else vocab_parallel_cross_entropy)}
        for name, exact in (("ours", False), ("exact", True)):
            with megatron.apply("cross_entropy", exact_megatron=exact):
                from megatron.core import tensor_parallel
                from megatron.core.models.common.language_module import language_module

                unfused = tensor_parallel.vocab_parallel_cross_entropy
                results[name] = run(language_module.fused_vocab_parallel_cross_entropy if fused else unfused)
    logits = whole.double().requires_grad_()
    vocab = logits.shape[-1]
    log_p = logits.log_softmax(-1)
    inside = (target >= 0) & (target < vocab)
    hit = -log_p.gather(-1, target.clamp(0, vocab - 1)[..., None])[..., 0]
    others = -log_p.sum(-1) - hit
    loss = ((1 - label_smoothing) * hit + label_smoothing * others / (vocab - 1)) * inside
    loss.backward(grad.double())
    results["right"] = loss.detach(), logits.grad.chunk(world, -1)[rank]
    return results, inside, counts


def attention(rank, options, cases):
    """For each case, of Megatron's core of attention and ours of the same heads outputs and gradients of q, k and v."""
    with on_cpu(), model_parallel(1):
        return [_attention(options, case) for case in cases]


def _attention(options, case):
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from parallel_ops.integrations.megatron.attention import CoreAttention

    with drop_in(case):
        config, _ = build(case)
        sq = LENGTH
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(sq, 2, h, 8, generator=generator) for h in (4, config.num_query_groups, config.num_query_groups)
        )
        grad = torch.randn(2, sq, 32, generator=generator).transpose(0, 1)
        mask = None
        if options.get("mask"):
            mask = torch.rand(2, 1, sq, sq, generator=generator) < 0.3
            mask[..., 0] = False
        kind = AttnMaskType[options.get("type", "causal")]
        results = []
        for core in (DotProductAttention, CoreAttention):
            inputs = [t.clone().requires_grad_() for t in (q, k, v)]
            attend = core(config, 2, kind, "self")
            window = attend.scale_mask_softmax.window_size
            if mask is not None and window is not None and core is DotProductAttention:  # drops it, through 0.19
                ago = torch.arange(sq)[:, None] - torch.arange(sq)
                mask = mask | (ago > window[0]) | (ago < -window[1])
                attend.scale_mask_softmax.window_size = None
            if not options.get("packed"):
                out = attend(*inputs, None if mask is None else mask.clone())
            elif core is CoreAttention:
                tokens = [t.flatten(0, 1) for t in inputs]
                starts = torch.tensor([0, 12, 2 * sq], dtype=torch.int32)
                packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
                out = attend(*tokens, None, packed_seq_params=packed).view(sq, 2, -1)
            else:
                documents = zip(*(t.flatten(0, 1).split([12, 2 * sq - 12]) for t in inputs), strict=True)
                outs = [attend(*(t.unsqueeze(1) for t in document), None) for document in documents]
                out = torch.cat(outs).view(sq, 2, -1)
            out.backward(grad)
            results.append([out.detach(), *(t.grad for t in inputs)])
        return results
