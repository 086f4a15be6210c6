"""Muon on any plan."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parallel_ops.train import CheckpointError
from parallel_ops.train.step import muon, muon_owners
from parallel_ops.train.step.muon import MuonAndAdamW, newton_schulz
from parallel_ops.train.step.optimizer import optimizer_of, update
from parallel_ops.train.step.settings import OptimizerSettings
from support.ranks.distributed import ranks
from support.runs import trainer as runs

MUON = {"kind": "muon", "lr": 1e-2, "momentum": 0.9}


class Layers(nn.Module):
    """With the names of a transformer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 5)
        self.layers = nn.ModuleDict({"0": nn.Linear(5, 9), "1": nn.Linear(9, 4)})
        self.layers["0"].router = nn.Linear(5, 3)


def gradients(model, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def orthogonalised(rank, each):
    """Shapes of the matrices that this rank orthogonalises in a step, for each of several settings."""
    found = []
    for settings in each:
        trainer, shapes = runs.trainer_of(settings), []

        def counted(update, shapes=shapes):
            shapes += [tuple(update.shape[-2:])] * (update.shape[0] if update.dim() > 2 else 1)
            return newton_schulz(update)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(muon, "newton_schulz", counted)
            trainer.step()
        trainer.loader.close()
        found.append(shapes)
    return found


def rounds_in_turn(rank):
    """What this rank does for each round of matrices, one an owner, in order."""
    mesh, log = init_device_mesh("cpu", (2, 2)), []
    some = [distribute_tensor(torch.full((4, 4), float(n)), mesh, [Shard(0), Shard(1)]) for n in range(16)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon_owners, "_ROUND_BYTES", 1)
        found = muon_owners.rounds_of(some, lambda parameter: 1.0)

    def exchanged(number, part):
        def compute(matrices, whole):
            log.append(("compute", number))
            for m, t in zip(matrices, whole, strict=True):
                assert torch.equal(t, m.parameter.to_local()[0, 0].bfloat16().expand(4, 4))
            return [t + 1 for t in whole]

        def put(matrix, result):
            log.append(("put", number))
            assert torch.equal(result, matrix.parameter.to_local().bfloat16() + 1)

        def take(matrix):
            log.append(("take", number))
            return matrix.parameter.to_local().bfloat16()

        return muon_owners.exchange(part, take, compute, put)

    muon_owners.interleaved(exchanged(number, part) for number, part in enumerate(found))
    return log


def stacked_updates(rank, experts):
    """This rank's part of a stack of matrices over two mesh dimensions after a step, and that of one process."""
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    torch.manual_seed(0)
    gradient, weight = torch.randn(2, experts, 6, 4)
    alone = stepped([weight], [gradient], joined=2)[0]
    for placements in (
        [Shard(0), Shard(1)], [Shard(2), Shard(0)], [Replicate(), Shard(0)], [Shard(2), Shard(1)],
        [Shard(1), Shard(1)], [Replicate(), Replicate()],
    ):  # fmt: skip
        parts = [distribute_tensor(t, mesh, placements) for t in (weight, gradient)]
        own = stepped([parts[0]], [parts[1]], joined=2)[0]
        found.append((own.to_local(), distribute_tensor(alone, mesh, placements).to_local()))
    return found


def stepped(weights, gradients, joined=1):
    """Weights after two steps of Muon."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    own = MuonAndAdamW([{"params": parameters, "momentum": 0.9, "joined": joined}], lr=0.1)
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        own.step()
    return [parameter.detach() for parameter in parameters]


def momenta(optimizer):
    return [state for state in optimizer.state.values() if "momentum_buffer" in state]


def test_it_is_torchs():
    """Matrices as ``torch.optim.Muon``, everything else as ``torch.optim.AdamW``, bit by bit."""
    torch.manual_seed(0)
    model, other = Layers(), Layers()
    other.load_state_dict(model.state_dict())
    own = optimizer_of(model, OptimizerSettings(kind="muon", weight_decay=0.1, momentum=0.8))
    matrices = [other.layers["0"].weight, other.layers["1"].weight]
    decayed = [other.tokens.weight, other.layers["0"].router.weight]
    rest = [p for p in other.parameters() if not any(p is q for q in (*matrices, *decayed))]
    theirs = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                          lr=0.02, betas=(0.9, 0.95), fused=True),
    ]  # fmt: skip
    for group in own.param_groups:
        group["lr"] = 0.02
    for step in range(3):
        for m in (model, other):
            gradients(m, step)
        own.step()
        for optimizer in theirs:
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_singular_values_become_about_one():
    found = torch.linalg.svdvals(newton_schulz(torch.randn(40, 90)).float())
    assert found.min() > 0.5 and found.max() < 1.4
    assert newton_schulz(torch.zeros(3, 4)).abs().max() == 0


@pytest.mark.parametrize("scale", [1.0, 512.0])
def test_what_is_not_finite_changes_nothing(scale):
    model = Layers()
    own = optimizer_of(model, OptimizerSettings(kind="muon"))
    for group in own.param_groups:
        group["lr"] = 0.1
    gradients(model, 0)
    update(own, 1.0, scale)
    before = [p.clone() for p in model.parameters()], [s["momentum_buffer"].clone() for s in momenta(own)]
    gradients(model, 1)
    model.tokens.weight.grad[0, 0] = torch.inf
    assert not update(own, 1.0, scale).isfinite()
    after = list(model.parameters()), [s["momentum_buffer"] for s in momenta(own)]
    assert all(torch.equal(p, q) for a, b in zip(before, after, strict=True) for p, q in zip(a, b, strict=True))


def test_the_loss_scale_is_undone():
    found = []
    for scale in (1.0, 512.0):
        torch.manual_seed(0)
        model = Layers()
        own = optimizer_of(model, OptimizerSettings(kind="muon"))
        for group in own.param_groups:
            group["lr"] = 0.1
        gradients(model, 0)
        for p in model.parameters():
            p.grad *= scale
        update(own, None, scale)
        found.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("llama", {"tp": 2, "dp": 2, "zero": 3}),
        pytest.param("llama", {"dp": 4, "dp_replicate": 2, "zero": 2}, marks=pytest.mark.runs),
        ("llama", {"pp": 2, "tp": 2, "schedule": "zb-h1"}),
        pytest.param("llama", {"cp": 2, "dp": 2, "zero": 1}, marks=pytest.mark.runs),
        ("experts", {"dp": 4, "ep": 2, "zero": 3}),
        pytest.param("experts", {"dp": 4, "ep": 1, "zero": 2}, marks=pytest.mark.runs),
        ("experts", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}),
        pytest.param("experts", {"tp": 2, "dp": 2, "ep": 4, "zero": 1}, marks=pytest.mark.runs),
        ("experts", {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "zb-h1"}),
    ],
    ids=str,
)
def test_any_plan_takes_the_same_steps(data, tmp_path, kind, plan):
    """Up to bfloat16, in which an update of other rounding may be another number; and resumes on one process."""
    sections = {"model": runs.MODELS[kind], "optimizer": MUON}
    want = runs.steps_of(0, runs.settings_of(data, **sections))
    settings = runs.settings_of(data, **sections, parallel=plan, checkpoint={"dir": str(tmp_path)})
    got = ranks(4).run(runs.steps_of, settings, None, 3)
    np.testing.assert_allclose(got[0], want[:3], rtol=5e-3)
    resumed = runs.steps_of(0, runs.settings_of(data, **sections), tmp_path)
    np.testing.assert_allclose(resumed, want[3:], rtol=2e-2)
    assert kind == "experts" or want[-1][0] < want[0][0] - 0.2


def test_experts_are_matrices_of_their_own(data):
    """Each expert's gate, up and down as ``torch.optim.Muon`` updates them, routers and biases by AdamW."""
    trainer = runs.trainer_of(runs.settings_of(data, model=runs.MODELS["gpt-oss"], optimizer=MUON))
    of = {id(p): g["momentum"] for g in trainer.optimizer.param_groups for p in g["params"]}
    named = dict(trainer.model.named_parameters())
    assert {name for name, p in named.items() if of[id(p)]} == {
        f"layers.{n}.{rest}"
        for n in range(2)
        for rest in ("attention.q.weight", "attention.k.weight", "attention.v.weight", "attention.out.weight",
                     "mlp.experts.gate_up", "mlp.experts.down")
    }  # fmt: skip
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.02
    for name, pieces in (("gate_up", 2), ("down", 1)):
        own = named[f"layers.1.mlp.experts.{name}"]
        own.grad = torch.randn_like(own)
        parts = [nn.Parameter(m.clone()) for expert in own.detach() for m in expert.chunk(pieces)]
        for part, gradient in zip(parts, (m for e in own.grad for m in e.chunk(pieces)), strict=True):
            part.grad = gradient.clone()
        theirs = torch.optim.Muon(
            parts, lr=0.02, weight_decay=0.1, momentum=MUON["momentum"], adjust_lr_fn="match_rms_adamw"
        )
        theirs.step()
        trainer.optimizer.step()
        torch.testing.assert_close(own, torch.cat([p.detach() for p in parts]).view(own.shape), rtol=0, atol=1e-5)
        assert len({round(float(p.grad.norm()), 3) for p in parts}) > 1


@pytest.mark.parametrize("experts", [1, 3, 6])
def test_rows_or_columns_of_experts_are_sharded_too(experts):
    """Of experts that the ranks do not divide, FSDP2 shards rows or columns, or has uneven shards."""
    for found in ranks(4).run(stacked_updates, experts):
        for own, whole in found:
            torch.testing.assert_close(own, whole, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_each_matrix_is_orthogonalised_once(data, kind):
    """Over all ranks, and about as much by each."""
    plans = [{"dp": 4}, {"dp": 4, "zero": 3}, {"tp": 2, "dp": 2, "zero": 1},
             {"dp": 4, "dp_replicate": 2, "zero": 2},
             {"pp": 2, "tp": 2}, {"cp": 2, "dp": 2, "zero": 2}]  # fmt: skip
    if kind == "experts":
        plans = [{"dp": 4, "ep": 2, "zero": 3}, {"tp": 2, "dp": 2, "ep": 4}, {"pp": 2, "dp": 2, "ep": 2, "zero": 2}]
    sections = {"model": runs.MODELS[kind], "optimizer": MUON}
    want = orthogonalised(0, [runs.settings_of(data, **sections)])[0]
    found = ranks(4).run(orthogonalised, [runs.settings_of(data, **sections, parallel=plan) for plan in plans])
    for plan, each in zip(plans, zip(*found, strict=True), strict=True):
        assert sorted(shape for shapes in each for shape in shapes) == sorted(want), plan
        work = [sum(min(s) ** 2 * (2 * max(s) + min(s)) for s in shapes) for shapes in each]
        assert max(work) < 1.5 * sum(work) / 4, (plan, work)


def test_messages_of_a_round_pass_while_another_is_computed():
    """A round is gathered before an older one is computed, and scattered after a younger one."""
    for log in ranks(4).run(rounds_in_turn):
        began, ends = {}, {}
        for at, (kind, number) in enumerate(log):
            (began if kind == "take" else ends if kind == "put" else {}).setdefault(number, at)
        computed = {number: at for at, (kind, number) in enumerate(log) if kind == "compute"}
        last = max(began)
        assert last >= 3
        for number in range(last):
            assert began[number + 1] < computed[number] < computed[number + 1] < ends[number]


def test_a_checkpoint_of_the_other_optimizer_is_refused(data, tmp_path):
    runs.steps_of(0, runs.settings_of(data, checkpoint={"dir": str(tmp_path)}), steps=1)
    trainer = runs.trainer_of(runs.settings_of(data, optimizer=MUON, checkpoint={"dir": str(tmp_path)}))
    with pytest.raises(CheckpointError, match=r"has the state of adamw, but optimizer\.kind is 'muon': set it"):
        trainer.resume()
