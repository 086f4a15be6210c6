"""The option ``grad_reduce`` of the layers and of ``Transformer``: how their linears add partial sums of the ranks."""

import pytest
import torch

from parallel_ops import layers
from parallel_ops.models import Transformer
from support.further import thinned
from support.numerics import layer_reductions as on_rank
from support.parallelism import layers as of_layers
from support.ranks.distributed import ranks

LINEARS = {"column": 1, "row": 1, "gelu": 2, "swiglu": 3, "attention": 4, "layer": 6, "llama": 7}

# What Megatron-LM's linears call: forward, backward.
PLAIN = {
    ("column", True): (["all_gather"], ["all_gather", "reduce_scatter"]),
    ("column", False): ([], ["all_reduce"]),
    ("row", True): (["reduce_scatter"], ["all_gather"]),
    ("row", False): (["all_reduce"], []),
}


@pytest.mark.parametrize(("kind", "sequence_parallel"), PLAIN)
@pytest.mark.parametrize("size", [2, 4])
def test_linears_by_the_backend_make_its_calls(size, kind, sequence_parallel):
    for got in ranks(size).run(on_rank.calls_of_linear, kind, sequence_parallel, "backend"):
        assert got == PLAIN[kind, sequence_parallel]
    for got in ranks(size).run(on_rank.calls_of_linear, kind, sequence_parallel, "fp32"):
        assert not {"all_reduce", "reduce_scatter"} & {*got[0], *got[1]}


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_those_are_the_calls_of_megatrons_linears(kind, sequence_parallel):
    pytest.importorskip("megatron.core", exc_type=ImportError)
    from support.integrations import megatron_linears

    for stock, drop_in in ranks(2).run(megatron_linears.calls_of_linears, kind, sequence_parallel):
        assert stock == drop_in == PLAIN[kind, sequence_parallel]


@pytest.mark.parametrize("kind", ["swiglu", "attention", "layer"])
def test_no_sum_of_a_layer_by_the_backend_is_an_exchange(kind):
    for sequence_parallel, plain in ((True, "reduce_scatter"), (False, "all_reduce")):
        for got in ranks(2).run(on_rank.calls_of_layer, kind, sequence_parallel, "backend"):
            assert plain in got and "all_to_all" not in got
        for got in ranks(2).run(on_rank.calls_of_layer, kind, sequence_parallel, "fp32"):
            assert plain not in got and "all_to_all" in got


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("size", [2, 4])
def test_layers_by_the_backend_have_the_gradients_of_the_exact_sum(size, kind):
    for sequence_parallel in (False, True):
        exact, backend = (
            of_layers.gathered(
                ranks(size).run(
                    of_layers.step_with, kind, 8, sequence_parallel, torch.float64, {"grad_reduce": grad_reduce}
                ),
                kind,
                sequence_parallel,
            )
            for grad_reduce in ("fp32", "backend")
        )
        assert of_layers.close(backend[0], exact[0], 1e-13) and of_layers.close(backend[1], exact[1], 1e-13)
        torch.testing.assert_close(backend[2], exact[2], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", on_rank.MODELS)
@pytest.mark.parametrize("size", thinned([4, 2]))
def test_models_by_the_backend_have_the_gradients_of_the_exact_sum(size, kind):
    for sequence_parallel in (False, True):
        exact, backend = (
            ranks(size).run(on_rank.train_with, kind, sequence_parallel, grad_reduce)
            for grad_reduce in ("fp32", "backend")
        )
        for got, want in zip(backend, exact, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", LINEARS)
def test_every_linear_of_a_layer_has_its_reduction(kind):
    for grad_reduce in ("fp32", "backend"):
        assert on_rank.reductions(of_layers.build(kind, grad_reduce=grad_reduce)) == [grad_reduce] * LINEARS[kind]
    assert on_rank.reductions(of_layers.build(kind)) == ["fp32"] * LINEARS[kind]


def test_every_linear_of_a_model_has_its_reduction():
    found = on_rank.reductions(Transformer(on_rank.MODELS["latent"], grad_reduce="backend", device="meta"))
    assert found == ["backend"] * 2 * (3 + 3)  # q, kv and out; gate, up and down of the shared MLP
    assert on_rank.reductions(on_rank.of_moe("backend")) == ["backend"] * 3


def test_unknown_reductions_are_named():
    message = "must be 'fp32' or 'backend', got 'exact'"
    with pytest.raises(ValueError, match=f"RowParallelLinear: grad_reduce {message}"):
        layers.RowParallelLinear(8, 8, tp_mesh=None, grad_reduce="exact")
    with pytest.raises(ValueError, match=f"ColumnParallelLinear: grad_reduce {message}"):
        Transformer(on_rank.MODELS["gpt"], grad_reduce="exact", device="meta")
