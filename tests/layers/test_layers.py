"""Every layer over 1, 2 and 4 tensor-parallel ranks is the same layer."""

import copy

import pytest
import torch
from torch import nn

from parallel_ops import layers
from support import layer_modes
from support import layers as on_rank
from support.distributed import Raised, ranks
from support.layers import KINDS

kinds = pytest.mark.parametrize("kind", KINDS)
groups = pytest.mark.parametrize("size", [2, 4])


def compare(got, want, eps):
    """(output, gradient of the input, gradients of the parameters)"""
    assert on_rank.close(got[0], want[0], eps), "output"
    if want[1] is not None:
        assert on_rank.close(got[1], want[1], eps), "gradient of the input"
    assert got[2].keys() == want[2].keys()
    for name, grad in want[2].items():
        assert on_rank.close(got[2][name], grad, eps), f"gradient of {name}"


@groups
@kinds
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_output_and_gradients_are_those_of_one_process(size, kind, sequence_parallel):
    for s, options in ((8, {}), (7, {"overlap": 2})):
        want = on_rank.step(0, kind, s, False, torch.float64)
        run = ranks(size).run(on_rank.step_with, kind, s, sequence_parallel, torch.float64, options)
        compare(on_rank.gathered(run, kind, s, sequence_parallel), want, 1e-13)


@pytest.mark.parametrize("kind", ["llama", "layer", "embedding", "column", "row"])
def test_ranks_without_a_token_take_part(kind):
    want = on_rank.step(0, kind, 2, False, torch.float64)
    for options in ({}, {"overlap": 2}):
        run = ranks(4).run(on_rank.step_with, kind, 2, True, torch.float64, options)
        compare(on_rank.gathered(run, kind, 2, True), want, 1e-13)


@groups
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_that_of_one_process(size, sequence_parallel):
    options = {"dropout": 0.4}
    want = on_rank.step(0, "layer", 7, False, torch.float64, **options)
    kept = on_rank.step(0, "layer", 7, False, torch.float64)
    assert not on_rank.close(want[0], kept[0], 1e-2)
    run = ranks(size).run(on_rank.step_with, "layer", 7, sequence_parallel, torch.float64, options)
    compare(on_rank.gathered(run, "layer", 7, sequence_parallel), want, 1e-13)


@kinds
def test_one_seed_gives_one_model(kind):
    want = on_rank.weights(0, kind)
    for size in (2, 4):
        for got in ranks(size).run(on_rank.weights, kind):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want)


def test_weights_are_drawn_as_torch_draws_them():
    for ours, theirs in (
        (lambda: layers.ColumnParallelLinear(6, 8, group=None), lambda: nn.Linear(6, 8)),
        (lambda: layers.RowParallelLinear(6, 8, group=None), lambda: nn.Linear(6, 8)),
        (lambda: layers.VocabParallelEmbedding(7, 5, group=None), lambda: nn.Embedding(7, 5)),
    ):
        states = []
        for build in (ours, theirs):
            torch.manual_seed(2)
            states.append(build().state_dict())
        assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    drawn = layers.ParallelMLP(4, 6, group=None, activation="swiglu", init_method=lambda w: w.fill_(w.shape[0]))
    assert (drawn.up.weight == 12).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["embedding", "grouped", "llama", "layer"])
def test_a_checkpoint_of_two_ranks_loads_on_one_and_on_four(kind, tmp_path):
    saved, other = ranks(2).run(on_rank.save, kind, str(tmp_path))
    assert all(torch.equal(saved[name], other[name]) for name in saved)
    loaded = [on_rank.load(0, kind, str(tmp_path)), *ranks(4).run(on_rank.load, kind, str(tmp_path))]
    for state in loaded:
        assert state.keys() == saved.keys()
        assert all(torch.equal(state[name], saved[name]) for name in saved)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_one_process_loads_on_two_ranks(tmp_path):
    saved = on_rank.save_one("swiglu", str(tmp_path))
    for state in ranks(2).run(on_rank.load, "swiglu", str(tmp_path)):
        assert all(torch.equal(state[name], saved[name]) for name in saved)


@pytest.mark.parametrize("kind", ["llama", "embedding"])
def test_whole_tensors_load_into_parts(kind):
    whole = on_rank.weights(0, kind)
    flat = {k: v.flatten(0, 1) if v.dim() == 3 else v for k, v in whole.items()}  # as nn.Linear has the halves
    for source in (whole, flat):
        for state in ranks(4).run(on_rank.load_whole, kind, source):
            assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_a_state_dict_of_another_shape_is_named():
    module = layers.ColumnParallelLinear(4, 6, group=None)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict({"weight": torch.zeros(5, 4), "bias": torch.zeros(6)})


@groups
def test_clipping_by_the_norm_of_the_whole_model(size):
    module = on_rank.build("llama")
    x, grad = on_rank.inputs("llama", 8, torch.float32)
    module(x, on_rank.angles(8, "llama")).backward(grad)
    want = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    grads = {name: p.grad for name, p in module.named_parameters()}
    parts = []
    for norm, part in ranks(size).run(on_rank.clipped, "llama", 0.5):
        torch.testing.assert_close(norm, want, rtol=1e-5, atol=0)
        parts.append((torch.zeros(1), None, part))
    got = on_rank.gathered(parts, "llama", 8, False)[2]
    torch.testing.assert_close(got, grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["layer", "llama"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiles_to_one_graph(kind, sequence_parallel):
    for eager, compiled in ranks(2).run(layer_modes.compiled, kind, sequence_parallel, "aot_eager"):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_gradients_go_where_the_layer_is_told(sequence_parallel):
    plain = ranks(2).run(on_rank.with_handles, sequence_parallel, False, False)
    for main, defer in ((True, False), (False, True), (True, True)):
        outcomes = ranks(2).run(on_rank.with_handles, sequence_parallel, main, defer)
        for (grads, pending), (want, _) in zip(outcomes, plain, strict=True):
            assert pending == (4 if defer else 0)
            torch.testing.assert_close(grads, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("main", "defer"), [(False, False), (True, False), (False, True), (True, True)])
def test_activation_checkpointing(main, defer):
    for sequence_parallel in (False, True):
        for reentrant in (False, True):
            for plain, again in ranks(2).run(
                layer_modes.checkpointed, "llama", sequence_parallel, main, defer, reentrant
            ):
                assert len(plain) == len(again) > 6
                assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("kind", ["row", "swiglu", "attention", "llama"])
def test_autocast_gives_the_dtypes_of_one_process(kind):
    want, dtypes = layer_modes.under_autocast(0, kind, False)
    for sequence_parallel in (False, True):
        parts = ranks(2).run(layer_modes.under_autocast, kind, sequence_parallel)
        y = torch.cat([y for y, _ in parts]) if sequence_parallel else parts[0][0]
        assert y.dtype is want.dtype
        torch.testing.assert_close(y, want, rtol=5e-2, atol=2e-2)
        assert all(got == dtypes for _, got in parts)


def test_parameters_that_are_frozen_leave_the_gradients_of_the_others_alone():
    for every, some in ranks(2).run(layer_modes.frozen_norms):
        for name, grad in some.items():
            wanted = not name.startswith(("norm_mlp", "attention"))
            assert torch.equal(grad, every[name]) if wanted else grad is None


def test_an_embedding_compiles_to_one_graph():
    for sequence_parallel in (False, True):
        for eager, compiled in ranks(2).run(layer_modes.compiled_embedding, sequence_parallel):
            assert torch.equal(eager, compiled)


def test_attention_without_causality_sees_the_mask():
    torch.manual_seed(0)
    attention = layers.ParallelSelfAttention(8, 2, group=None, causal=False).double()
    causal = layers.ParallelSelfAttention(8, 2, group=None).double()
    causal.load_state_dict(attention.state_dict())
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(attention(x, mask=future), causal(x))
    assert not torch.allclose(attention(x), causal(x))
    narrow = layers.ParallelSelfAttention(8, 2, group=None, window=2).double()
    narrow.load_state_dict(attention.state_dict())
    torch.testing.assert_close(attention(x, mask=future | torch.ones(5, 5, dtype=torch.bool).tril(-2)), narrow(x))


def test_layers_can_be_copied_and_moved():
    module = on_rank.build("layer")
    copied = copy.deepcopy(module).double()
    x, _ = on_rank.inputs("layer", 4, torch.float64)
    assert next(module.parameters()).dtype is torch.float32
    torch.testing.assert_close(copied(x).float(), module(x.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layers.ColumnParallelLinear(4, 6, group=None, parts=4), r"parts \(4\) must divide out_features \(6\)"),
        (lambda: layers.ColumnParallelLinear(4, 6, group=None, overlap="never"), "overlap must be"),
        (lambda: layers.RowParallelLinear(0, 6, group=None), "in_features must be positive, got 0"),
        (lambda: layers.ParallelMLP(4, group=None, activation="relu"), "activation must be 'gelu' or 'swiglu'"),
        (lambda: layers.ParallelSelfAttention(10, 4, group=None), r"hidden \(10\) must be a multiple of heads"),
        (lambda: layers.ParallelSelfAttention(8, 4, kv_heads=3, group=None), r"heads \(4\) must be a multiple of kv"),
        (lambda: layers.ParallelSelfAttention(8, 4, causal=False, window=2, group=None), "window needs causal"),
        (lambda: layers.ParallelTransformerLayer(8, 2, dropout=1.5, group=None), "dropout must be from 0 to 1"),
        (lambda: layers.ParallelTransformerLayer(8, 2, norm="batch", group=None), "kind must be 'layer_norm' or"),
        (lambda: layers.clip_grad_norm(nn.Linear(2, 2), 0.0, None), "max_norm must be positive"),
        (
            lambda: layers.ParallelSelfAttention(8, 2, group=None)(torch.zeros(3, 8)),
            r"x must be \[s, b, 8\], got \[3, 8\]",
        ),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("column", "out_features / parts must be a multiple of the size of the group, got 6 for 4 ranks"),
        ("row", "got 6 for 4 ranks; groups that fit have 1, 2, 3, 6 ranks"),
        ("attention", "kv_heads must be a multiple of the size of the group, got 2 for 4 ranks"),
        (
            "heads",
            ": heads must be a multiple of the size of the group, got 6 for 4 ranks; groups that fit have 1, 2, 3",
        ),
        ("embedding", "num_embeddings (5) leaves some of the 4 ranks without a row; pad the vocabulary"),
    ],
)
def test_a_group_that_does_not_fit_is_named(kind, message):
    for outcome in ranks(4).outcomes(on_rank.too_many_ranks, kind):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert message in outcome.message


def test_tokens_outside_the_vocabulary_raise_on_every_rank():
    with pytest.raises(IndexError):
        on_rank.bad_token(0)
    assert all(isinstance(o, Raised) and o.type == "IndexError" for o in ranks(2).outcomes(on_rank.bad_token))
    with pytest.raises(TypeError, match=r"tokens must be an int64 or int32 tensor, got torch\.float32"):
        on_rank.build("embedding")(torch.zeros(2, 2))


def test_a_weight_of_another_layout_is_refused():
    """A transposed weight has as many elements."""
    layer = layers.ColumnParallelLinear(4, 8, group=None)
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.randn(4, 8), "bias": torch.randn(8)})
    for outcome in ranks(2).outcomes(on_rank.loads_transposed):
        assert isinstance(outcome, Raised) and "size mismatch" in outcome.message


def test_a_row_of_nan_stays_with_its_token():
    for result, expected in ranks(2).run(on_rank.embeds_nan):
        assert torch.equal(result.isnan(), expected)


def test_clipping_nothing_is_fine():
    layer = layers.ColumnParallelLinear(4, 8, group=None)
    assert layers.clip_grad_norm(layer, 1.0, None).item() == 0.0
    layer.half().weight.grad = torch.full((8, 4), 3e4, dtype=torch.float16)
    assert layers.clip_grad_norm(layer, 1e9, None).item() == pytest.approx(3e4 * 32**0.5, rel=1e-3)
