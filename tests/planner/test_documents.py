"""Lengths of packed documents: how they are given, and what sharing them among ranks costs."""

from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, communication, estimate, presets
from parallel_ops.planner.cli import inputs
from parallel_ops.planner.compute.documents import describe, grouped, lengths_of, packed, shares

LLAMA = replace(presets.model("llama3-8b"), seq_length=32768)


def test_a_distribution_has_its_median_and_mean():
    lengths = [length for length, count in lengths_of("lognormal:512:1.0", 10**6)]
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(512, rel=0.01)
    assert sum(lengths) / len(lengths) == pytest.approx(512 * 2.71828**0.5, rel=0.01)
    assert max(length for length, _ in lengths_of("lognormal:512:2.0", 4096)) == 4096
    assert {length for length, _ in lengths_of("lognormal:512:0", 4096)} == {512}


def test_a_file_has_one_length_a_line(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("512\n 8192 \n512\n")
    assert inputs.documents(LLAMA, str(file)).documents == inputs.documents(LLAMA, "512x2:8192").documents
    file.write_text("7\n" * 9000 + "9\n" * 1000)  # more than are kept
    kept = [length for length, _ in lengths_of(str(file), 8)]
    assert len(kept) < 9000 and set(kept) == {7, 8} and kept.count(8) / len(kept) == pytest.approx(0.1, abs=0.001)
    for text, error in (("", "has no lengths"), ("5\n\n", "line 2 of .* got ''"), ("5\nx\n", "line 2 of .* got 'x'")):
        file.write_text(text)
        with pytest.raises(ValueError, match=error):
            inputs.documents(LLAMA, str(file))
    for text in ("lognormal", "lognormal:512", "lognormal:a:1", "lognormal:-1:1", "lognormal:512:nan"):
        with pytest.raises(ValueError, match="--documents takes lognormal:MEDIAN:SIGMA"):
            inputs.documents(LLAMA, text)
    with pytest.raises(ValueError, match="or a file with one length a line, got '/nowhere'"):
        inputs.documents(LLAMA, "/nowhere")


def test_drawn_sequences_are_full_and_always_the_same():
    lengths = lengths_of("lognormal:512:1.5", 32768)
    sequences = packed(lengths, 32768)
    assert all(sum(each) == 32768 for each in sequences) and len(set(sequences)) == len(sequences)
    packed.cache_clear()
    assert packed(lengths, 32768) == sequences


def test_the_most_loaded_rank_is_waited_for():
    """Ranks share long documents among short ones evenly in chosen layouts, and less so in zigzag order."""
    model = inputs.documents(LLAMA, "lognormal:512:2.0")
    found = shares(model, 8)
    assert 1 <= found.uneven < 1.05 and found.zigzag[0] > 1.3 and found.layout == "balanced"
    assert 0 < found.sent < 1 and 0 < found.zigzag[1] < 1
    one = shares(inputs.documents(LLAMA, "99999"), 8)  # whole sequences: causal zigzag sends three quarters
    assert one.layout == "zigzag" and one.uneven == pytest.approx(1, abs=1e-3) and one.sent == pytest.approx(0.75)
    assert shares(LLAMA, 8) is shares(model, 1) is None
    text = describe(model, 8)
    assert f"has {found.uneven:.2f} of the mean area" in text and f"zigzag {found.zigzag[0]:.2f}" in text
    assert describe(LLAMA, 8) == "" and "ranks" not in describe(model, 1)


def test_groups_by_length_save_what_the_most_loaded_rank_waits():
    model = inputs.documents(LLAMA, "lognormal:512:1.5")
    fixed, groups = grouped(model, 2, 8)
    assert sum(group.size for group in groups.groups) == 16 and 1 <= groups.load < 1.1 < fixed
    assert f"has {groups.load:.2f} of the mean work instead of {fixed:.2f}" in describe(model, 2, 8)
    assert grouped(LLAMA, 2, 8) is grouped(model, 1, 1) is None


def test_the_planner_counts_the_keys_of_documents():
    node, plan = presets.cluster("h100x8"), Plan(cp=8, global_batch=1, recompute="full")
    model = inputs.documents(LLAMA, "512x50:8192")
    whole, packed_bytes = (
        sum(t.bytes for t in communication(each, node, plan) if t.group == "cp") for each in (LLAMA, model)
    )
    assert packed_bytes / whole == pytest.approx(shares(model, 8).sent / 0.75)
    assert estimate(model, node, plan).step < estimate(LLAMA, node, plan).step
