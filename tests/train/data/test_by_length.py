"""Groups of ranks by length of documents: the steps of one process, from rows that follow the lengths."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from support.parallelism.layers import mesh_of
from support.ranks.distributed import ranks
from support.runs import trainer as runs

MODEL = {**runs.MODELS["llama"], "seq_length": 32}
BATCH = {"global_batch": 8, "micro_batch": 1}
PLANS = [
    {"dp": 2, "cp": 2, "zero": 3},
    {"dp": 4, "zero": 2, "micro_batch": 2},
    {"cp": 4, "zero": 1, "cp_layout": "auto"},
    {"dp": 2, "tp": 2},
    {"dp": 4, "dp_replicate": 2, "zero": 3},
]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Tokens in documents of 1 to 80, most of them short."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, runs.VOCABULARY, 6000)
    tokens[np.cumsum(np.minimum(80, rng.lognormal(1.5, 1.2, 2000).astype(int) + 1)) % 6000] = 0
    path = tmp_path_factory.mktemp("documents") / "tokens.bin"
    tokens.astype("uint16").tofile(path)
    return path


def settings_of(data, plan, groups="by_length", /, **sections):
    model = {**MODEL, **sections.pop("model", {})}
    parallel = {**BATCH, **plan, "cp_groups": groups}
    given = {"data": {"document_mask": True}, "run": {"steps": 3}, **sections}
    return runs.settings_of(data, model=model, parallel=parallel, **given)


def steps_of(rank, given):
    """Losses and gradient norms of each plan, the sizes of the groups that this rank was in, and its losses in turn."""
    out = []
    for settings in given:
        with runs.trainer_of(settings) as trainer:
            found, sizes = [], []
            for _ in range(settings.run.steps):
                seen = trainer.loader.step(trainer.samples_seen)
                sizes += [(batch.first_rank, batch.cp_ranks, len(batch.tokens)) for batch in seen]
                step = trainer.step()
                found.append((step.loss, step.grad_norm))
            evaluated = trainer.evaluate() if trainer.evaluation is not None else 0.0
        out.append((found, sizes, evaluated))
    return out


def test_steps_are_those_of_one_process(documents):
    """Loss to 1e-6 and gradient norm, whatever the mesh; evaluation has the groups of the mesh."""
    sections = {"evaluation": {"share": 0.1}}
    ((want, _, evaluated),) = steps_of(0, [settings_of(documents, {}, "fixed", **sections)])
    got = ranks(4).run(steps_of, [settings_of(documents, plan, **sections) for plan in PLANS])
    taken = [{size for of_rank in got for _, size, _ in of_rank[number][1]} for number in range(len(PLANS))]
    assert set.union(*taken) == {1, 2, 4} and max(map(len, taken)) > 1, taken
    for number, plan in enumerate(PLANS):
        for of_rank in got:
            found, _, value = of_rank[number]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=2e-6, atol=1e-6)
            assert value == pytest.approx(evaluated, rel=1e-5)
        if plan.get("tp"):
            continue
        for micro_batch in zip(*(of_rank[number][1] for of_rank in got), strict=True):
            # Ranks agree on the groups, whose documents are those of all rows.
            assert all(first <= rank < first + size for rank, (first, size, _) in enumerate(micro_batch))
            heads = {first: tokens for first, _, tokens in micro_batch}
            assert sum(heads.values()) == 32 * plan.get("dp", 1) * plan.get("micro_batch", 1)


def test_windows_learned_positions_further_tokens_and_dropout_train(documents):
    """The loss with windows is that of one process; masks of dropout are others, and the same each time."""
    models = [{"window": (5, None)}, {"positions": "learned"}, {"prediction_layers": 2}, *[{"dropout": 0.2}] * 2]
    plan = {"dp": 2, "cp": 2, "zero": 2}
    got = ranks(4).run(steps_of, [settings_of(documents, plan, model=model) for model in models])
    want = steps_of(0, [settings_of(documents, {}, "fixed", model=model) for model in models[:3]])
    for of_rank in got:
        for (found, *_), (wanted, *_) in zip(of_rank, want, strict=False):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=2e-6, atol=1e-6)
        assert of_rank[3][0] == of_rank[4][0] == got[0][3][0]


def groups_of(rank):
    mesh = mesh_of(dp_shard=2, cp=2)
    found, again = mesh.parts("loss"), mesh.parts("loss")
    members = {size: None if g is None else dist.get_process_group_ranks(g) for size, g in found.items()}
    return members, [found[size] is again[size] for size in found]


def test_the_groups_of_a_mesh_are_aligned():
    for rank, (found, same) in enumerate(ranks(4).run(groups_of)):
        assert found == {1: None, 2: [rank // 2 * 2, rank // 2 * 2 + 1], 4: [0, 1, 2, 3]} and all(same)
