"""Communication: the volumes of the papers, the alpha-beta times, and which link is used."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.planner import Interconnect, Plan, communication, efficiency, presets
from parallel_ops.planner.communication.network import all_reduce_seconds, all_to_all_seconds, group_link
from parallel_ops.planner.communication.traffic import end_traffic, layer_traffic
from parallel_ops.planner.compute.work import work_of
from parallel_ops.planner.memory.memory import memory
from parallel_ops.planner.placement import leaves_node
from parallel_ops.planner.step import StepTime

LLAMA = presets.model("llama3-8b")
H100 = presets.cluster("h100x64")
CONSTANTS = efficiency("hopper", "megatron-2021")
LINK = Interconnect(name="link", latency=1e-5, bandwidth=1e10)


def traffic(model, cluster, plan, group):
    cluster = replace(cluster, gpus=plan.gpus)
    return {t.collective: t for t in communication(model, cluster, plan) if t.group == group}


@pytest.mark.parametrize(
    ("zero", "volume"),
    # In bytes of 16-bit parameters: gradients are of the same width here.
    [(0, 2), (1, 2), (2, 2), (3, 3)],
)
def test_data_parallelism_moves_two_or_three_times_the_parameters(zero, volume):
    plan = Plan(dp=64, zero=zero, grad_dtype="bf16", global_batch=64)
    found = traffic(LLAMA, H100, plan, "dp").values()
    # FSDP keeps what is beside the layers gathered from the forward pass to the backward pass.
    once = LLAMA.embedding_parameters + LLAMA.head_parameters if zero == 3 else 0
    assert sum(t.bytes for t in found) == pytest.approx(2 * (volume * LLAMA.parameters - once) * 63 / 64)


def test_replicas_of_shards_sum_what_is_reduced():
    """Once a step, whatever the micro-batches."""
    plan = Plan(dp=8, dp_replicate=2, zero=3, global_batch=32)
    summed = traffic(LLAMA, H100, plan, "dp_replicate")["all-reduce"]
    assert summed.bytes == pytest.approx(2 * 1 / 2 * 4 * LLAMA.parameters / 4) and summed.size == 2
    assert traffic(LLAMA, H100, plan, "dp")["reduce-scatter"].size == 4


@pytest.mark.parametrize(("zero", "gathers", "scatters"), [(1, 1, 1), (2, 1, 4), (3, 8, 4)])
def test_accumulation_repeats_what_is_sharded(zero, gathers, scatters):
    found = traffic(LLAMA, H100, Plan(dp=8, zero=zero, global_batch=32), "dp")
    assert found["all-gather"].count == gathers
    assert found["reduce-scatter"].count == scatters


@pytest.mark.parametrize(("zero", "gathers", "reductions"), [(0, 0, 1), (1, 1, 1), (2, 1, 4), (3, 8, 4)])
def test_copies_of_data_parallel_collectives_hide_behind_nothing(zero, gathers, reductions):
    plan, cluster = Plan(dp=8, zero=zero, dtype="fp32", global_batch=32), replace(H100, gpus=8)
    copied = replace(CONSTANTS, gather_copies=2.0, reduce_copies=3.0)
    seconds = (2 * gathers + 3 * reductions) * 4 * LLAMA.parameters / (cluster.gpu.bandwidth * CONSTANTS.memory)
    none, some = (StepTime(LLAMA, cluster, plan, constants).seconds() for constants in (CONSTANTS, copied))
    assert some - none == pytest.approx(seconds)
    one = StepTime(LLAMA, cluster, plan, replace(copied, tp_copies=9.0))
    assert one.seconds() == pytest.approx(some)


def test_copies_of_plans_with_tensor_parallelism_may_have_a_figure_of_their_own():
    plan, cluster = Plan(dp=4, tp=2, zero=1, global_batch=4), replace(H100, gpus=8)
    constants = [replace(CONSTANTS, reduce_copies=3.0, tp_copies=own) for own in (1.0, 2.0)]
    one, two = (StepTime(LLAMA, cluster, plan, each).sharding.copies for each in constants)
    assert 0 < one == pytest.approx(two / 2)
    with pytest.raises(ValueError, match="reduce_copies"):
        replace(CONSTANTS, reduce_copies=-1.0)


def test_tensor_parallelism_moves_four_all_reduces_a_layer():
    plan = Plan(tp=8, fsdp=False, global_batch=4)
    found = traffic(LLAMA, H100, plan, "tp")["all-reduce"]
    size = 2 * LLAMA.seq_length * LLAMA.hidden_size
    # Beside the layers: the embeddings, the gradient before the output embedding, the loss.
    assert found.count == (4 * LLAMA.num_layers + 3) * 4
    assert found.bytes == pytest.approx(4 * ((4 * LLAMA.num_layers + 2) * size + 12 * LLAMA.seq_length) * 2 * 7 / 8)
    assert found.exposed == pytest.approx(found.seconds)
    assert found.link == "NVLink"


def test_sequence_parallelism_gathers_again_for_the_gradients_of_weights():
    sharded = traffic(LLAMA, H100, Plan(tp=8, fsdp=False, sequence_parallel=True, global_batch=4), "tp")
    size = 2 * LLAMA.seq_length * LLAMA.hidden_size * 7 / 8
    assert sharded["all-gather"].bytes == pytest.approx(4 * (6 * LLAMA.num_layers + 3) * size)
    assert sharded["reduce-scatter"].bytes == pytest.approx(4 * (4 * LLAMA.num_layers + 2) * size)
    norms = (2 * LLAMA.num_layers + 1) * 2 * LLAMA.hidden_size
    assert sharded["all-reduce"].bytes == pytest.approx(4 * (norms + 12 * LLAMA.seq_length) * 2 * 7 / 8)


@pytest.mark.parametrize(("dtype", "share"), [("fp8", 1 / 2), ("nvfp4", 1 / 4), ("fp8_rowwise", 1)])
def test_gathers_send_the_operands_of_low_precision_matmuls(dtype, share):
    """Reduced sums stay in 16 bits; torchao gathers before it scales by rows."""
    sizes = {
        kind: layer_traffic(
            LLAMA, H100, work_of(Plan(tp=8, sequence_parallel=True, dtype=kind)), CONSTANTS, sparse=False
        )
        for kind in ("bf16", dtype)
    }
    found = {kind: {t.collective: t.bytes for t, _ in traffic.transfers} for kind, traffic in sizes.items()}
    assert found[dtype]["all-gather"] == share * found["bf16"]["all-gather"]
    assert found[dtype]["reduce-scatter"] == found["bf16"]["reduce-scatter"]


def test_a_step_waits_for_what_the_ends_of_the_model_send():
    """With sequence parallelism too, but for sums of the gradients of norms and what is gathered again."""
    small = replace(LLAMA, num_layers=1)
    for sharded in (False, True):
        plan = Plan(tp=8, sequence_parallel=sharded, fused_loss=True, global_batch=4)
        found = [StepTime(small, replace(H100, gpus=8), plan, c) for c in (CONSTANTS, replace(CONSTANTS, links=0.4))]
        one, both = (sum(t.exposed for t in step.transfers()) for step in found)
        assert found[1].seconds() - found[0].seconds() == pytest.approx(both - one, rel=0.05)
        ends = [end_traffic(small, H100, found[0].work, CONSTANTS, last=last) for last in (False, True)]
        layer = layer_traffic(small, H100, found[0].work, CONSTANTS, sparse=False)
        assert one == pytest.approx(4 * sum(part.exposed.total for part in (*ends, layer)))
        assert all(end.exposed.forward for end in ends) and ends[1].exposed.input_grad


def test_full_recomputation_repeats_the_forward_collectives():
    """PyTorch's ends before the sum behind a layer, of which the backward needs nothing."""
    for fsdp, again in ((False, 2), (True, 1)):
        plan = Plan(tp=8, fsdp=fsdp, recompute="full", global_batch=4)
        found = traffic(LLAMA, H100, plan, "tp")["all-reduce"]
        assert found.count == ((4 + again) * LLAMA.num_layers + 3) * 4


def test_a_rank_alone_embeds_in_the_dtype_of_its_parameters():
    """Which no FSDP2 casts."""
    alone, shared = (traffic(LLAMA, H100, Plan(tp=4, dp=dp, global_batch=4), "tp")["all-reduce"] for dp in (1, 2))
    embedded = 2 * 3 / 4 * 2 * LLAMA.seq_length * LLAMA.hidden_size
    assert alone.bytes == pytest.approx(2 * shared.bytes + 4 * embedded)


def test_small_sums_are_gathered_where_they_keep_an_order():
    plan, cluster = Plan(dp=2, tp=4, sequence_parallel=True, global_batch=2), replace(H100, gpus=8)
    ring, gathered = (
        sum(t.bytes for t in communication(LLAMA, cluster, plan, software=software) if t.collective == "all-reduce")
        for software in ("torchtitan-2025", "parallel_ops")
    )
    norms = (2 * LLAMA.num_layers + 1) * 2 * LLAMA.hidden_size
    assert norms < 2**16 * (2 * LLAMA.num_layers + 1)
    assert gathered - ring == pytest.approx((3 - 2 * 3 / 4) * norms)


def test_copies_of_experts_are_summed_over_the_tensor_parallel_ranks():
    """Copies exist with ep of 1; with more, and in systems that shard over these ranks too, there are none."""
    model = presets.model("mixtral-8x7b")
    given = {"tp": 2, "dp": 4, "expert_tp": 1, "sequence_parallel": True, "zero": 1, "global_batch": 8}
    copied, elsewhere, spread = (Plan(**given), Plan(**given, fsdp=False), Plan(**given, ep=2))
    held = model.num_layers * model.experts * model.expert_weights
    assert [plan.copied_experts for plan in (copied, elsewhere, spread)] == [True, False, False]
    sums = [traffic(model, H100, plan, "tp")["all-reduce"].bytes for plan in (copied, elsewhere)]
    assert sums[0] - sums[1] == pytest.approx(2 * 2 * held)  # of two micro-batches
    states = [memory(model, plan)[0].optimizer for plan in (copied, elsewhere)]
    assert states[0] - states[1] == pytest.approx(12 * held * (1 / 4 - 1 / 8))


def test_scatter_gather_divides_the_pipeline_message():
    plan = Plan(tp=8, pp=8, global_batch=16)
    whole, split = (
        traffic(LLAMA, H100, replace(plan, scatter_gather=on), "pp")["send-receive"] for on in (False, True)
    )
    assert whole.bytes == 8 * split.bytes == 2 * 16 * 2 * LLAMA.seq_length * LLAMA.hidden_size
    assert whole.link == split.link == "InfiniBand"


def test_context_parallelism_passes_keys_and_values_around():
    plan = Plan(cp=8, global_batch=1)
    ring = traffic(LLAMA, H100, plan, "cp")["send-receive"]
    block = 2 * LLAMA.seq_length / 8 * LLAMA.key_value_width
    assert ring.bytes == pytest.approx(LLAMA.num_layers * 3 / 4 * 4 * 7 * block)  # forward, again, gradients in fp32
    swap = traffic(LLAMA, H100, replace(plan, cp_kind="all_to_all"), "cp")["all-to-all"]
    width = LLAMA.query_width + LLAMA.key_value_width + LLAMA.value_width
    # There and back, forward and backward; two numbers a head forward, three backward.
    token = 2 * 2 * width + 5 * 4 * LLAMA.num_heads
    assert swap.bytes == pytest.approx(LLAMA.num_layers * 7 / 8 * LLAMA.seq_length / 8 * token)


def test_experts_cost_four_all_to_alls_a_layer_and_one_copy_a_node():
    model = presets.model("deepseek-v3")
    cluster = presets.cluster("h800x64")
    inside = traffic(model, cluster, Plan(dp=8, ep=8, global_batch=8), "ep")["all-to-all"]
    across = traffic(model, cluster, Plan(dp=64, ep=64, dispatcher="deepep", global_batch=64), "ep")["all-to-all"]
    plain = traffic(model, cluster, Plan(dp=64, ep=64, global_batch=64), "ep")["all-to-all"]
    token = 2 * model.hidden_size * model.seq_length
    assert plain.bytes == pytest.approx(plain.count * token * 8 * 63 / 64)
    assert inside.count == across.count == 4 * model.sparse_layers
    assert inside.bytes == pytest.approx(inside.count * token * 8 * 7 / 8)
    assert across.bytes == pytest.approx(across.count * token * 4 * 63 / 64)  # eight experts on four nodes at most
    assert (inside.link, across.link) == ("NVLink", "InfiniBand")


@pytest.mark.parametrize(
    ("plan", "outside"),
    [
        (Plan(tp=8), set()),
        (Plan(tp=4, cp=2, dp=8, global_batch=8), {"dp"}),
        (Plan(tp=4, cp=4, dp=4, global_batch=4), {"cp", "dp"}),
        (Plan(tp=8, pp=8, global_batch=8), {"pp"}),
        (Plan(tp=16, dp=4, global_batch=4), {"tp", "dp"}),
    ],
)
def test_a_group_leaves_the_node_when_its_ranks_do(plan, outside):
    cluster = replace(H100, gpus=plan.gpus) if plan.gpus < 64 else H100
    groups = [group for group in ("tp", "cp", "dp", "pp") if leaves_node(cluster, plan, group)]
    assert {group for group in groups if group != "pp" or plan.pp > 1} == outside


def test_a_ring_over_nodes_uses_the_adapters_of_all_its_members():
    def bandwidth(plan, cluster=H100):
        return group_link(cluster, plan, "dp").bandwidth

    adapter = H100.inter.bandwidth
    assert bandwidth(Plan(dp=64, global_batch=64)) == min(8 * adapter, H100.intra.bandwidth)
    assert bandwidth(Plan(dp=16, tp=4, global_batch=16)) == 2 * adapter
    assert bandwidth(Plan(dp=8, tp=8, global_batch=8)) == adapter
    assert bandwidth(Plan(dp=64, global_batch=64), replace(H100, rails=1)) == adapter


def test_oversubscription_narrows_what_leaves_a_pod():
    narrow = replace(H100, oversubscription=7.0)
    plan = Plan(dp=8, tp=8, global_batch=8)
    # Without pods, every node's traffic shares what is left; a ring with tensor parallelism has an adapter's.
    assert group_link(narrow, plan, "dp").bandwidth == pytest.approx(H100.inter.bandwidth / 7)
    inside = replace(H100, oversubscription=7.0, pod=64)
    assert group_link(inside, plan, "dp").bandwidth == H100.inter.bandwidth
    # Sixteen stages of 64 GPUs: one stage in two of a pod of 128 sends into the next pod, over a seventh of its links.
    wide = replace(H100, gpus=1024, oversubscription=7.0, pod=128)
    stages = Plan(pp=16, tp=8, dp=8, global_batch=128)
    assert group_link(wide, stages, "pp", ring=False).bandwidth == pytest.approx(H100.inter.bandwidth / 3.5)
    # The ring of all GPUs leaves a pod over the eight adapters of one node.
    ring = Plan(dp=1024, global_batch=1024)
    assert group_link(wide, ring, "dp") == group_link(replace(wide, oversubscription=1.0), ring, "dp")


@given(ranks=st.integers(2, 4096), size=st.floats(1, 1e12))
def test_all_reduce_takes_the_faster_algorithm(ranks, size):
    ring = 2 * (ranks - 1) * (LINK.latency + size / ranks / LINK.bandwidth)
    tree = 2 * (math.ceil(math.log2(ranks)) * LINK.latency + size / LINK.bandwidth)
    algorithm, seconds = all_reduce_seconds(ranks, size, LINK)
    assert seconds == pytest.approx(min(ring, tree))
    assert algorithm == ("tree" if tree < ring else "ring")


def test_small_messages_take_the_tree_and_large_ones_the_ring():
    assert all_reduce_seconds(1024, 1e4, LINK)[0] == "tree"
    assert all_reduce_seconds(64, 1e10, LINK)[0] == "ring"


def test_all_to_all_takes_detours_on_a_large_torus():
    near, far = (all_to_all_seconds(n, 1e9, LINK, torus=True) for n in (64, 4096))
    assert near == pytest.approx(all_to_all_seconds(64, 1e9, LINK))
    assert far == pytest.approx(4 * all_to_all_seconds(4096, 1e9, LINK), rel=1e-3)


def test_messages_that_shorten_the_bubble_expose_no_time():
    """ZB-2p orders its passes by the times of messages, too, and may be luckier with them than without."""
    plan = Plan.parse(
        "tp=2,pp=4,cp=2,expert_tp=1,sequence_parallel=true,schedule=zb-2p,micro_batch=4,global_batch=64,"
        "fused_loss=true,ep_overlap=true,cuda_graph=attention,dispatcher=deepep"
    )
    messages = traffic(presets.model("qwen3-next-80b-a3b"), presets.cluster("b200x16"), plan, "pp")["send-receive"]
    assert messages.seconds > 0 and messages.exposed == 0
