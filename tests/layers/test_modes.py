"""Layers that are compiled, checkpointed, frozen in part, under autocast, or whose weight gradients go elsewhere."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel_ops.tensor_parallel import DeferredWeightGradients
from support.parallelism.layers import (
    _BUILDERS,
    FEATURES_IN,
    KINDS,
    angles,
    build,
    inputs,
    local,
    set_handles,
    tp_mesh,
    whole,
)
from support.ranks.distributed import ranks


def compiled(rank: int, kind: str, sequence_parallel: bool, backend: str) -> list[list[Tensor]]:
    """(output, gradients) of the layer, eager and compiled to one graph."""
    torch._dynamo.reset()
    results = []
    for compile_it in (False, True):
        module = build(kind, sequence_parallel=sequence_parallel, overlap=2)
        run = torch.compile(module, fullgraph=True, backend=backend) if compile_it else module
        x, grad = inputs(kind, 8, torch.float32)
        if sequence_parallel:
            x, grad = (t.chunk(dist.get_world_size())[rank] for t in (x, grad))
        x = x.clone().requires_grad_()
        y = run(x)
        y.backward(grad)
        results.append([y.detach(), x.grad, *(whole(p.grad) for p in module.parameters())])
    return results


def checkpointed(rank: int, kind: str, sequence_parallel: bool, main: bool, defer: bool, reentrant: bool):
    """(output, gradients): of a layer as it is, then with its activations computed again in the backward."""
    results = []
    for again in (False, True):
        module, queue = build(kind, sequence_parallel=sequence_parallel, dropout=0.3), DeferredWeightGradients()
        set_handles(module, queue if defer else None, main)
        x, grad = inputs(kind, 8, torch.float32)
        if sequence_parallel:
            x, grad = (t.chunk(dist.get_world_size())[rank] for t in (x, grad))
        x = x.clone().requires_grad_()
        torch.manual_seed(4)
        rotation = angles(8, kind)
        y = checkpoint(module, x, rotation, use_reentrant=reentrant) if again else module(x, rotation)
        y.backward(grad)
        queue.compute()
        mains = [m.main_grad for m in module.modules() if getattr(m, "main_grad", None) is not None]
        results.append(
            [y.detach(), x.grad, *mains, *(local(p.grad) for p in module.parameters() if p.grad is not None)]
        )
    return results


def under_autocast(rank: int, kind: str, sequence_parallel: bool) -> tuple[Tensor, list[torch.dtype]]:
    """(the whole output, dtypes of all gradients) of a layer in fp32 under autocast to bfloat16."""
    module = build(kind, sequence_parallel=sequence_parallel)
    x, grad = inputs(kind, 8, torch.float32)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if sequence_parallel:
        x, grad = (t.chunk(world)[rank] if not (t is x and kind in FEATURES_IN) else t for t in (x, grad))
    x = (x.chunk(world, dim=-1)[rank] if kind in FEATURES_IN else x).clone().requires_grad_()
    rotation = angles(8, kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x) if rotation is None else module(x, rotation)
    y.backward(grad.to(y.dtype))
    return y.detach(), [x.grad.dtype, *(p.grad.dtype for p in module.parameters())]


def frozen_norms(rank: int) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Gradients of a layer's parameters, all wanted, then some."""
    results = []
    for freeze in (False, True):
        module = build("layer", sequence_parallel=True)
        module.norm_mlp.requires_grad_(not freeze)
        module.attention.requires_grad_(not freeze)
        x, grad = (t.chunk(dist.get_world_size())[rank] for t in inputs("layer", 8, torch.float32))
        module(x).backward(grad)
        results.append({n: None if p.grad is None else local(p.grad) for n, p in module.named_parameters()})
    return results[0], results[1]


def compiled_embedding(rank: int, sequence_parallel: bool) -> list[Tensor]:
    torch._dynamo.reset()
    module = build("embedding", sequence_parallel=sequence_parallel)
    tokens, _ = inputs("embedding", 8, torch.float32)
    return [module(tokens), torch.compile(module, fullgraph=True, backend="aot_eager")(tokens)]


def with_handles(rank: int, sequence_parallel: bool, main: bool, defer: bool) -> tuple[dict[str, Tensor], int]:
    """(gradients of a transformer layer whose linears' go elsewhere, how many were put off)."""
    module = build("llama", sequence_parallel=sequence_parallel)
    queue = DeferredWeightGradients()
    linears = set_handles(module, queue if defer else None, main)
    x, grad = inputs("llama", 8, torch.float32)
    if sequence_parallel:
        x, grad = (t.chunk(dist.get_world_size())[rank] for t in (x, grad))
    module(x, angles(8, "llama")).backward(grad)
    pending = len(queue)
    queue.compute()
    grads = {name: None if p.grad is None else local(p.grad) for name, p in module.named_parameters()}
    if main:
        grads |= {f"{name}.weight": linear.main_grad for name, linear in linears.items()}
    return grads, pending


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("layer", True), ("llama", False)])
def test_compiles_to_one_graph(kind, sequence_parallel):
    for eager, one_graph in ranks(2).run(compiled, kind, sequence_parallel, "aot_eager"):
        torch.testing.assert_close(one_graph, eager, rtol=1e-4, atol=1e-5)


def test_each_class_of_layers_has_a_recompilation_limit_of_its_own():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for kind in ("column", "gelu", "attention", "embedding", "layer"):
            module, (x, _) = build(kind), inputs(kind, 8, torch.float32)
            torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(x), module(x))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_gradients_go_where_the_layer_is_told(sequence_parallel):
    plain = ranks(2).run(with_handles, sequence_parallel, False, False)
    for main, defer in ((True, False), (False, True), (True, True)):
        outcomes = ranks(2).run(with_handles, sequence_parallel, main, defer)
        for (grads, pending), (want, _) in zip(outcomes, plain, strict=True):
            assert pending == (4 if defer else 0)  # q, k, v; out; gate, up; down
            torch.testing.assert_close(grads, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("main", "defer"), [(False, False), (True, False), (False, True), (True, True)])
def test_activation_checkpointing(main, defer):
    for sequence_parallel in (False, True):
        for reentrant in (False, True):
            for plain, again in ranks(2).run(checkpointed, "llama", sequence_parallel, main, defer, reentrant):
                assert len(plain) == len(again) > 6
                assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("kind", ["row", "swiglu", "attention", "llama"])
def test_autocast_gives_the_dtypes_of_one_process(kind):
    want, dtypes = under_autocast(0, kind, False)
    for sequence_parallel in (False, True):
        parts = ranks(2).run(under_autocast, kind, sequence_parallel)
        y = torch.cat([y for y, _ in parts]) if sequence_parallel else parts[0][0]
        assert y.dtype is want.dtype
        torch.testing.assert_close(y, want, rtol=5e-2, atol=2e-2)
        assert all(got == dtypes for _, got in parts)


def test_parameters_that_are_frozen_leave_the_gradients_of_the_others_alone():
    for every, some in ranks(2).run(frozen_norms):
        for name, grad in some.items():
            wanted = not name.startswith(("norm_mlp", "attention"))
            assert torch.equal(grad, every[name]) if wanted else grad is None


def test_an_embedding_compiles_to_one_graph():
    for sequence_parallel in (False, True):
        for eager, one_graph in ranks(2).run(compiled_embedding, sequence_parallel):
            assert torch.equal(eager, one_graph)


def without_memory(rank: int) -> None:
    """Layers of every kind in the context of the meta device, as ``device="meta"`` builds them."""
    for kind in KINDS:
        with torch.device("meta"):
            module = _BUILDERS[kind](tp_mesh=tp_mesh())
        found = {name: local(t) for name, t in module.state_dict().items()}
        assert all(t.is_meta for t in found.values()), kind
        want = _BUILDERS[kind](tp_mesh=tp_mesh(), device="meta").state_dict()
        assert {name: t.shape for name, t in found.items()} == {name: local(t).shape for name, t in want.items()}


def test_layers_are_built_in_the_context_of_the_meta_device():
    without_memory(0)
    ranks(2).run(without_memory)
