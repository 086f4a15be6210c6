"""An optimizer's state, saved by some ranks, goes on at others."""

import collections

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from parallel_ops.layers import load_optimizer_state_dict, optimizer_state_dict
from support import optimizer_state as on_rank
from support.distributed import Raised, ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def same(got, want):
    """Bit for bit: these optimizers take each element by itself."""
    assert not on_rank.differing(got, want)


# embedding: uneven parts. llama: packed halves, no biases. layer: biases, split and whole. The last two have a frozen
# parameter, and one whose first gradient comes after the checkpoint.
@pytest.mark.parametrize(
    ("kind", "optimizer", "saved_after"),
    [
        ("embedding", "adamw", 2),
        ("llama", "adamw", 2),
        ("layer", "adamw", 0),
        ("layer", "nadam", 2),
        ("llama", "nadam", 0),
        ("layer", "momentum", 2),
        ("layer", "plain", 2),
        ("llama", "master", 2),
    ],
)
def test_saved_by_two_ranks_it_goes_on_at_one_two_and_four(kind, optimizer, saved_after, tmp_path):
    want = on_rank.run(0, kind, optimizer, saved_after, None)
    for state in ranks(2).run(on_rank.run, kind, optimizer, saved_after, str(tmp_path)):
        same(state, want)
    same(on_rank.resume(0, kind, optimizer, saved_after, str(tmp_path)), want)
    for size in (2, 4):
        for state in ranks(size).run(on_rank.resume, kind, optimizer, saved_after, str(tmp_path)):
            same(state, want)


def test_saved_by_one_rank_it_goes_on_at_two_that_have_stepped(tmp_path):
    want = on_rank.run(0, "llama", "adamw", 2, str(tmp_path))
    for state in ranks(2).run(on_rank.resume, "llama", "adamw", 2, str(tmp_path), 1):
        same(state, want)


def test_replicas_of_a_sharded_model_save_it_once(tmp_path):
    """Two by two ranks: data parallel, tensor parallel."""
    want = on_rank.run(0, "llama", "adamw", 2, None)
    for state in ranks(4).run(on_rank.run_in_pairs, "llama", "adamw", 2, str(tmp_path)):
        same(state, want)
    same(on_rank.resume(0, "llama", "adamw", 2, str(tmp_path)), want)


def test_a_part_that_is_sharded_again_is_refused():
    for state_dict, optimizer_state in ranks(2).run(on_rank.sharded_again):
        assert state_dict.startswith("weight is one rank's part of a whole, which something else has sharded again")
        assert optimizer_state.startswith("optimizer_state_dict: parameter 'weight' is a part of a whole and must be")


@pytest.mark.parametrize("kind", ["llama", "embedding"])
def test_whole_tensors_load_into_parts(kind):
    want = on_rank.run(0, kind, "adamw", 0, None)
    for state in ranks(4).run(on_rank.load_whole, kind, "adamw", want):
        same(state, want)


def test_parts_are_placed_as_the_parameters_are():
    for rank, state in enumerate(ranks(4).run(on_rank.kinds, "embedding", "adamw")):
        rows = [8, 8, 8, 6][rank]
        assert state["weight"]["exp_avg"] == ("DTensor", [30, 16], [rows, 16])
        assert state["weight"]["step"] == ("Tensor", [], [])
    for state in ranks(2).run(on_rank.kinds, "llama", "momentum"):
        assert state["mlp.up.weight"] == {"momentum_buffer": ("DTensor", [2, 24, 16], [2, 12, 16])}
        assert state["mlp.out.weight"] == {"momentum_buffer": ("DTensor", [16, 24], [16, 12])}
        assert state["norm_mlp.weight"] == {"momentum_buffer": ("Tensor", [16], [16])}
        assert on_rank.FROZEN not in state


def test_the_dictionary_is_laid_out_as_torchs():
    module, optimizer = on_rank.make("layer", "adamw")
    for number in range(3):
        on_rank.step(module, optimizer, number)
    ours = optimizer_state_dict(module, optimizer)
    assert ours.pop("not_stepped") == []
    theirs = get_optimizer_state_dict(module, optimizer)
    same(ours, theirs)
    module, other = on_rank.make("layer", "adamw")
    set_optimizer_state_dict(module, other, ours)
    same(get_optimizer_state_dict(module, other), theirs)
    module, other = on_rank.make("layer", "adamw")
    load_optimizer_state_dict(module, other, theirs)
    same(get_optimizer_state_dict(module, other), theirs)


def test_asking_for_the_state_changes_nothing():
    """Between backward and step, of parameters of which some have no state yet."""
    module, optimizer = on_rank.make("layer", "adamw")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    on_rank.step(module, optimizer, 0)
    scheduler.step()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    stepped = list(optimizer.state)
    state = optimizer_state_dict(module, optimizer)
    assert state["not_stepped"] == [on_rank.LATE] and on_rank.LATE in state["state"]
    assert calls == ["step"] and scheduler.last_epoch == 1 and list(optimizer.state) == stepped
    assert all(torch.equal(p, before[name]) and p.grad.all() for name, p in module.named_parameters())
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.01])
    # The optimizer's own memory where there is state, so that a checkpoint is read into place.
    weight = module.get_parameter("mlp.up.weight")
    assert state["state"]["mlp.up.weight"]["exp_avg"].data_ptr() == optimizer.state[weight]["exp_avg"].data_ptr()


def test_hyperparameters_are_loaded_and_groups_are_found_by_name():
    module, optimizer = on_rank.make("layer", "adamw")
    on_rank.step(module, optimizer, 0)
    state = optimizer_state_dict(module, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    state["param_groups"].reverse()
    state["param_groups"][0]["params"].reverse()
    load_optimizer_state_dict(module, optimizer, state)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.1, 0.1), (0.1, 0.0)]
    moments = state["state"]["mlp.out.bias"]["exp_avg"]
    assert torch.equal(optimizer.state[module.get_parameter("mlp.out.bias")]["exp_avg"], moments)


def test_state_keeps_the_dtype_of_the_optimizer():
    module, optimizer = on_rank.make("layer", "master")
    on_rank.step(module, optimizer, 0)
    state = optimizer_state_dict(module, optimizer)
    fresh_module, fresh = on_rank.make("layer", "master", seed=1)
    load_optimizer_state_dict(fresh_module, fresh, state)
    for name, parameter in fresh_module.named_parameters():
        if parameter in fresh.state:
            assert fresh.state[parameter]["master"].dtype is torch.float32
            assert torch.equal(fresh.state[parameter]["master"], state["state"][name]["master"])


def test_on_one_rank_any_state_is_saved():
    module, optimizer = on_rank.make("layer", "adafactor")
    for number in range(3):
        on_rank.step(module, optimizer, number)
    want = on_rank.result(module, optimizer)
    same(on_rank.load_whole(0, "layer", "adafactor", want), want)


def test_state_of_another_shape_is_named_on_several_ranks():
    for outcome in ranks(2).outcomes(on_rank.adafactor):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert outcome.message == (
            "optimizer_state_dict: row_var of 'attention.qkv.weight' must be a single number or a tensor of the "
            "parameter's shape [24, 16] to be re-sharded, got [24, 1]"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "transposed",
            "exp_avg of 'mlp.up.weight' must have the layout of model.state_dict(), [2, 24, 16], got [24, 2",
        ),
        (
            "another",
            "exp_avg of 'mlp.up.weight' must have the layout of model.state_dict(), [2, 24, 16], got [16, 24]",
        ),
        ("rows", "exp_avg of 'mlp.up.weight' must have the layout of model.state_dict(), [2, 24, 16], got [3]"),
    ],
)
def test_another_layout_is_named_before_anything_is_loaded(change, message):
    for error, unchanged in [on_rank.another_layout(0, change), *ranks(2).run(on_rank.another_layout, change)]:
        assert message in error and unchanged


def without(key, name):
    def change(state):
        del state[key][name]

    return change


def rename(old, new):
    def change(state):
        state["state"][new] = state["state"].pop(old)
        for group in state["param_groups"]:
            group["params"] = [new if name == old else name for name in group["params"]]

    return change


def regroup(state):
    first, second = state["param_groups"]
    second["params"].append(first["params"].pop())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("state", "mlp.out.bias"), "must have step, exp_avg, exp_avg_sq of 'mlp.out.bias', got nothing of it"),
        (lambda s: s["state"]["mlp.out.bias"].pop("exp_avg"), "have exp_avg of 'mlp.out.bias', got step, exp_avg_sq"),
        (rename("mlp.out.bias", "mlp.b"), "but lacks: 'mlp.out.bias' and has too much: 'mlp.b'"),
        (lambda s: s["state"].update(more={}), "but has too much: 'more'"),
        (lambda s: s["param_groups"].pop(), "but lacks: 'attention.out.bias', 'attention.qkv.bias', .* and 5 more"),
        (regroup, "none has just the parameters of group 0: 'attention.out.weight', .* and 1 more"),
        (lambda s: s.pop("state"), r"but has no 'state' among its keys \['param_groups', 'not_stepped'\]"),
        (lambda s: s["param_groups"][0].update(amsgrad=True), "must have max_exp_avg_sq of 'attention.qkv.weight'"),
    ],
)
def test_bad_dictionaries_are_named_before_anything_is_loaded(change, message):
    module, optimizer = on_rank.make("layer", "adamw")
    on_rank.step(module, optimizer, 2)
    state = optimizer_state_dict(module, optimizer)
    module, optimizer = on_rank.make("layer", "adamw", seed=1)
    change(state)
    with pytest.raises(ValueError, match=f"load_optimizer_state_dict: .*{message}"):
        load_optimizer_state_dict(module, optimizer, state)
    assert not optimizer.state


def test_bad_arguments_are_named():
    module, optimizer = on_rank.make("layer", "adamw")
    with pytest.raises(TypeError, match=r"optimizer_state_dict: model must be a torch\.nn\.Module, got AdamW"):
        optimizer_state_dict(optimizer, module)
    with pytest.raises(
        TypeError, match=r"optimizer_state_dict: optimizer must be a torch\.optim\.Optimizer, got Linear"
    ):
        optimizer_state_dict(module, nn.Linear(1, 1))
    with pytest.raises(TypeError, match="load_optimizer_state_dict: state_dict must be a dict, got list"):
        load_optimizer_state_dict(module, optimizer, [])
    with pytest.raises(ValueError, match=r"group 0 has one of shape \[24, 16\] that is not in model"):
        optimizer_state_dict(module.mlp.out, torch.optim.SGD(module.mlp.up.parameters(), lr=0.1))
    lbfgs = torch.optim.LBFGS(module.parameters())
    with pytest.raises(RuntimeError, match=r"LBFGS cannot make the state of parameter 'norm_attention.bias'"):
        optimizer_state_dict(module, lbfgs)
    assert isinstance(lbfgs.state, collections.defaultdict) and not lbfgs.state
