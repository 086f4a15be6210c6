"""Models that mix kinds of layers: recurrent mixers, compressed attention, layers that are an MLP or a mixer alone."""

from dataclasses import replace

import pytest

from parallel_ops.planner import Model, Plan, SearchOptions, efficiency, estimate, presets, search
from parallel_ops.planner.cli.huggingface_config import model_of
from parallel_ops.planner.communication.traffic import layer_traffic
from parallel_ops.planner.compute.compute import layer_passes
from parallel_ops.planner.compute.linears import linear_shapes
from parallel_ops.planner.compute.work import work_of
from parallel_ops.planner.export import export, systems
from parallel_ops.planner.feasibility import problem
from parallel_ops.planner.memory.activations import layer_activations
from parallel_ops.planner.memory.memory import memory
from parallel_ops.planner.placement import layer_counts, stage_layout

H100, NODE = presets.cluster("h100x64"), presets.cluster("h100x8")
# Parameters of the language models, as Transformers 5.23 builds them without what the presets leave out: norms of
# queries and keys, gates of shared experts. Where it has other defaults, totals of the publishers.
PARAMETERS = {
    "qwen3-next-80b-a3b": (79_674_391_296, 1e-5),
    "qwen3.5-35b-a3b": (34_660_610_688, 1e-5),
    "nemotron3-nano-30b-a3b": (31_577_937_344, 0),
    "deepseek-v4-flash": (284e9, 0.002),
    "deepseek-v4-pro": (1.6e12, 0.02),
    "qwen3.5-397b-a17b": (397e9, 0.005),
    "qwen3.5-27b": (27e9, 0.005),
}
ACTIVE = {"qwen3.5-397b-a17b": 17e9, "nemotron3-nano-30b-a3b": 3.6e9, "deepseek-v4-pro": 49e9}
NANO, QWEN, FLASH = (presets.model(n) for n in ("nemotron3-nano-30b-a3b", "qwen3.5-35b-a3b", "deepseek-v4-flash"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    expected, within = PARAMETERS[name]
    model = presets.model(name)
    assert model.parameters == pytest.approx(expected, rel=within)
    if name in ACTIVE:
        assert model.active_parameters == pytest.approx(ACTIVE[name], rel=0.025)


def test_layers_are_counted_by_kind():
    assert [(kind.shape.layers[0], kind.sparse) for kind in NANO.kinds] == [
        ("recurrent_only", False), ("mlp_only", True), ("full_only", False)
    ]  # fmt: skip
    assert NANO.kind_counts == (23, 23, 6) and NANO.sparse_layers == 23 and NANO.mlp_layers == 0
    assert QWEN.kind_counts == (30, 10) and FLASH.kind_counts == (2, 21, 20)
    for plan in (Plan(pp=4, global_batch=8), Plan(pp=4, global_batch=8, schedule="interleaved", virtual_stages=2)):
        stages = layer_counts(NANO, stage_layout(plan))
        assert tuple(map(sum, zip(*stages, strict=True))) == NANO.kind_counts
        assert sum(stage.parameters for stage in memory(NANO, plan)) == pytest.approx(2 * NANO.parameters)


def test_what_a_rank_does_not_split_and_what_it_splits_are_the_model():
    """Eight ranks hold the model, and seven more copies of what none of them splits."""
    for model in (NANO, QWEN, FLASH):
        held = memory(model, Plan(tp=8, zero=0, sequence_parallel=True))[0].parameters / 2
        counted = zip(model.kind_counts, model.kinds, strict=True)
        whole = sum(n * shape.whole_in_layer(sparse, 8) for n, (shape, sparse) in counted)
        whole += model.head_parameters - model.hidden_size * model.vocab_size
        assert 8 * held - 7 * whole == pytest.approx(model.parameters)
        # The linears of a rank add up to its share of the weights.
        for shape, sparse in model.kinds:
            alone, split = (
                sum(i * o * n for _, i, o, n in linear_shapes(shape, tp, 1.0, sparse=sparse)) for tp in (1, 8)
            )
            router = model.hidden_size * model.experts if sparse else 0
            kept = sum(each.inputs * each.outputs for each in shape.mixer_linears if not each.split) + router
            assert 8 * split - 7 * kept == pytest.approx(alone)


def test_a_recurrence_takes_as_long_for_every_token():
    (mamba, _), *_ = NANO.kinds
    short, long = (replace(mamba, seq_length=s) for s in (4096, 65536))
    c, n, p, heads, groups = 128, 128, 64, 64, 8
    assert short.attention_flops == long.attention_flops == 2 * c * n * groups + heads * (2 * c * p + 4 * n * p)
    constants = efficiency("hopper")
    once, twice = (
        layer_passes(mamba, NODE.gpu, constants, work_of(Plan(micro_batch=b, global_batch=b)), False) for b in (1, 2)
    )
    assert twice.total == pytest.approx(2 * once.total, rel=0.03)
    *_, (attention, _) = NANO.kinds

    def longer(model):
        """Seconds of a token in sequences of 131,072, in those in sequences of 8,192."""
        each = [replace(model, seq_length=s) for s in (131072, 8192)]
        long, short = (
            layer_passes(m, NODE.gpu, constants, work_of(Plan()), False).forward / m.seq_length for m in each
        )
        return long / short

    assert longer(mamba) == pytest.approx(1, rel=0.03) and longer(attention) > 3


def test_compressed_attention_sees_a_window_and_entries():
    window, csa, hca = (kind.shape for kind in FLASH.kinds)
    found, heads = FLASH.compressed, 4 * FLASH.query_width

    def flops(shape, s):
        return replace(shape, seq_length=s).attention_flops

    near = 128 - 128**2 / (2 * 65536)
    assert flops(window, 65536) == pytest.approx(heads * near)
    assert flops(hca, 65536) == pytest.approx(heads * (near + 65536 / 256))
    most, indexed = 512 - 512**2 * 4 / (2 * 65536), 2 * found.index_heads * found.index_head * 65536 / 8
    assert flops(csa, 65536) == pytest.approx(heads * (near + most) + indexed)
    # Fewer entries than the indexer chooses: all of them, of half of the tokens on average.
    assert found.seen("csa", 1024, 128) == pytest.approx(128 - 8 + 1024 / 8)
    assert csa.mixed_flops(0.5 * 65536) < csa.mixed_flops(65536)


def test_a_block_of_its_own_communicates_like_half_a_layer():
    plan = Plan(tp=8, sequence_parallel=True, flash_attention=True)
    for model in (NANO, QWEN):
        for shape, sparse in model.kinds:
            found = layer_traffic(shape, NODE, work_of(plan), efficiency("hopper"), sparse).transfers
            gathers = sum(n for each, n in found if each.collective == "all-gather")
            assert gathers == 3 * shape.blocks, shape.layers


def test_context_parallelism_exchanges_heads_of_a_recurrence_and_keys_of_attention():
    plan, constants = Plan(cp=2, global_batch=2), efficiency("hopper")
    for shape, sparse in QWEN.kinds:
        groups = [each for each, _ in layer_traffic(shape, NODE, work_of(plan), constants, sparse).transfers]
        kinds = {each.collective for each in groups if each.group == "cp"}
        assert kinds == ({"all-to-all"} if shape.mixer == "recurrent" else {"send-receive"})
    assert problem(QWEN, NODE, Plan(dp=4, cp=2, ep=8, global_batch=8)) is None


def test_streams_of_the_residual_are_kept_and_sent():
    one = replace(FLASH, residual_streams=1)
    for recompute, extra in (("full", 3), ("none", 6)):
        many, few = (layer_activations(model, Plan(), recompute)[0] for model in (FLASH, one))
        assert many - few == extra * 2 * FLASH.hidden_size
    plan = Plan(pp=8, global_batch=8)
    sent = [next(t for t in estimate(model, NODE, plan).transfers if t.group == "pp").bytes for model in (FLASH, one)]
    assert sent[0] == 4 * sent[1]


def test_hybrids_can_be_searched_and_what_cannot_train_them_is_said():
    options = SearchOptions(tp=(1,), pp=(1,), cp=(1,), schedules=("1f1b",))
    best = search(QWEN, presets.cluster("b200x64"), batch=1024, options=options).best
    assert best.plan.ep > 1 and 0.1 < best.mfu < 0.6
    assert "parallel_ops" not in systems(QWEN, H100, Plan(dp=64, zero=3, fsdp=False, global_batch=64))
    for model, reason in ((QWEN, "layers of the kind recurrent"), (FLASH, "layers of the kind csa, hca")):
        with pytest.raises(ValueError, match=f"cannot train {model.name}: this package cannot train {reason}"):
            search(model, H100, batch=64, options=SearchOptions(target="parallel_ops"))
    with pytest.raises(ValueError, match="hybrid ones are a pattern"):
        export("megatron", QWEN, NODE, Plan(dp=8, zero=1, global_batch=8))


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (QWEN, Plan(tp=8, cp=4, sequence_parallel=True), r"TP \* CP \(32\) does not divide recurrent.groups \(16\)"),
        (NANO, Plan(tp=4, cp=4, sequence_parallel=True), r"TP \* CP \(16\) does not divide recurrent.groups \(8\)"),
        (FLASH, Plan(tp=16, sequence_parallel=True), r"does not divide compressed.output_groups \(8\)"),
        (FLASH, Plan(cp=2), "not split over CP"),
    ],
)
def test_sizes_that_do_not_divide_a_mixer_are_refused(model, plan, message):
    cluster = replace(presets.cluster("gb200x64"), gpus=plan.gpus, gpus_per_node=plan.gpus)
    with pytest.raises(ValueError, match=message):
        estimate(model, cluster, plan)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": ("recurent",)}, "unknown kind of Model.layers 'recurent'; nearest: recurrent"),
        ({"layers": ("recurrent", "full")}, "need the field recurrent"),
        ({"layers": ("csa",), "window": 128}, "need the field compressed"),
        ({"compressed": FLASH.compressed, "layers": ("full",)}, "has a window and layers of the kinds window, csa and"),
        ({"residual_streams": 0}, "residual_streams must be at least 1"),
    ],
)
def test_wrong_kinds_are_refused(fields, message):
    sizes = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 1000, "seq_length": 128}
    with pytest.raises(ValueError, match=message):
        Model(name="x", **sizes, **fields)
    with pytest.raises(TypeError, match="layers must be a list of kinds, got 'full'"):
        replace(NANO, layers="full")
    with pytest.raises(ValueError, match="heads \\(7\\) must be a multiple of groups \\(2\\)"):
        replace(NANO.recurrent, heads=7, groups=2)


def configurations():
    models = pytest.importorskip("transformers.models")
    pattern = "".join({"recurrent_only": "M", "mlp_only": "E", "full_only": "*"}[kind] for kind in NANO.layers)
    nano = {
        "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "chunk_size": 128, "conv_kernel": 4, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 3712,
        "intermediate_size": 1856, "vocab_size": 131072, "hybrid_override_pattern": pattern,
    }  # fmt: skip
    ratios = [0, 0, *([4, 128] * 20), 4]
    return {
        "nemotron3-nano-30b-a3b": models.nemotron_h.NemotronHConfig(**nano),
        "qwen3-next-80b-a3b": models.qwen3_next.Qwen3NextConfig(),
        "qwen3.5-35b-a3b": models.qwen3_5_moe.configuration_qwen3_5_moe.Qwen3_5MoeTextConfig(),
        "deepseek-v4-flash": models.deepseek_v4.DeepseekV4Config(compress_ratios=ratios),
    }


def test_configurations_of_transformers_are_read_as_the_presets():
    for name, config in configurations().items():
        expected = presets.model(name)
        found, assumed = model_of(config.to_dict(), name, expected.seq_length)
        assert assumed == ()
        assert found.kind_of == expected.kind_of and found.parameters == expected.parameters, name
        assert found.forward_flops == expected.forward_flops, name
    nano = configurations()["nemotron3-nano-30b-a3b"].to_dict()
    nano["layers_block_type"] = ["mlp" if kind == "moe" else kind for kind in nano["layers_block_type"]]
    # Its class has a number of experts for models without any.
    assert model_of({**nano, "hybrid_override_pattern": None}, "x", 4096)[0].experts == 0
    wrong = {name: config.to_dict() for name, config in configurations().items()}
    del wrong["qwen3-next-80b-a3b"]["linear_value_head_dim"]
    with pytest.raises(ValueError, match="no linear_value_head_dim"):
        model_of(wrong["qwen3-next-80b-a3b"], "x", 4096)
    with pytest.raises(ValueError, match="moe_latent_size"):
        model_of(wrong["nemotron3-nano-30b-a3b"] | {"moe_latent_size": 1024}, "x", 4096)
