"""The twenty commonest mistakes in the settings of a run: what is said, and what to do. ``page`` writes
docs/configuration_errors.md from them."""

from typing import Any, NamedTuple

from parallel_ops.train.config_file import settings_of

MODEL = {"vocab_size": 256, "seq_length": 64, "num_layers": 4, "hidden_size": 64, "num_heads": 4}
EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32}
BASE: dict[str, Any] = {
    "run": {"steps": 100, "device": "cpu"}, "model": MODEL, "data": {"paths": ["tokens.npy"]},
    "parallel": {"global_batch": 8, "micro_batch": 1},
}  # fmt: skip


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
        title: What somebody wanted. changes: Sections of the TOML file, over a file that is right. cure: What to write.
    """

    title: str
    changes: dict[str, dict[str, Any]]
    cure: str


MISTAKES = [
    Mistake("A batch that does not divide over the ranks", {"parallel": {"dp": 3}},
            "Make `global_batch` a multiple of `dp * micro_batch`; gradients are accumulated over the rest."),
    Mistake("Micro-batches larger than the share of a rank", {"parallel": {"dp": 4, "micro_batch": 4}},
            "`global_batch` must be a multiple of `dp * micro_batch`: lower `micro_batch`, or raise `global_batch`."),
    Mistake("More tensor ranks than heads", {"parallel": {"tp": 8}},
            "`tp` must divide the heads (and `ffn_hidden_size`): use data or pipeline parallelism for the rest."),
    Mistake("Replicas that do not divide the data-parallel ranks", {"parallel": {"dp": 4, "dp_replicate": 3}},
            "`dp` counts all data-parallel ranks; a replica has `dp / dp_replicate` of them."),
    Mistake("More pipeline stages than layers", {"parallel": {"pp": 8}},
            "Lower `pp`, or `virtual_stages`."),
    Mistake("The interleaved schedule with one stage a rank",
            {"parallel": {"pp": 4, "schedule": "interleaved", "virtual_stages": 1}},
            "`interleaved` needs `virtual_stages` of 2 or more; with one stage a rank it is `1f1b`."),
    Mistake("A pipeline with too few micro-batches",
            {"parallel": {"pp": 2, "global_batch": 2, "schedule": "dualpipe-v"}},
            "Raise `global_batch`, or lower `dp` or `micro_batch`: a pipeline is filled by micro-batches."),
    Mistake("Experts that do not divide over their ranks",
            {"model": {"experts": EXPERTS}, "parallel": {"dp": 8, "ep": 16}},
            "`ep` must divide `dp * cp * tp` and the number of experts."),
    Mistake("Expert parallelism for a dense model", {"parallel": {"dp": 2, "ep": 2}},
            "Leave `ep` out; it shares the experts of `model.experts`."),
    Mistake("ZeRO on one rank with offload", {"parallel": {"zero": 3, "offload": "optimizer"}},
            "Offload is FSDP2's: it needs `zero` of 1 or more and several data-parallel ranks."),
    Mistake("float8 without bfloat16", {"precision": {"dtype": "fp32", "linears": "fp8_rowwise"}},
            "Set `precision.dtype = \"bf16\"`: float8 is for the GEMMs, the rest is computed in bfloat16."),
    Mistake("A key that had another name", {"precision": {"dtype": "bf16", "fp8": "current"}},
            "Write the name and the value of the message."),
    Mistake("A key with a typing error", {"parallel": {"tensor_parallel": 2}},
            "The names are those of `parallel-ops train --schema`."),
    Mistake("A value of another type", {"run": {"steps": "many"}},
            "Write numbers without quotes, as TOML has them."),
    Mistake("A section that does not exist", {"modle": {"num_layers": 2}},
            "The sections are those of `examples/train.toml`."),
    Mistake("Hidden size and heads that do not fit", {"model": {"num_heads": 6}},
            "Give `head_dim`, or heads that divide `hidden_size`."),
    Mistake("Key heads that do not divide the heads", {"model": {"num_kv_heads": 3}},
            "`num_kv_heads` must divide `num_heads`."),
    Mistake("Sequences of the data longer than the model's", {"data": {"seq_length": 128}},
            "Raise `model.seq_length` (with rotary positions no weight depends on it), or shorten the samples."),
    Mistake("Recomputing experts of a dense model", {"recompute": {"kind": "experts"}},
            "`selective` recomputes attention cores, `full` whole blocks."),
    Mistake("Two sources of data at once", {"data": {"sources": [{"paths": ["a.npy"], "weight": 1.0}]}},
            "Give `data.paths`, or `data.sources` with weights."),
]  # fmt: skip


def said(mistake: Mistake) -> str:
    """The error of the command line.

    Raises:
        AssertionError: There is none.
    """
    data = {name: {**section} for name, section in BASE.items()}
    for name, section in mistake.changes.items():
        data[name] = {**data.get(name, {}), **section}
    try:
        settings_of(data, "run.toml")
    except ValueError as error:
        return " ".join(str(error).split())
    raise AssertionError(f"{mistake.title}: no error")


def page() -> str:
    """The text of docs/configuration_errors.md."""
    parts = [
        "# Configuration errors",
        "The twenty commonest mistakes in the settings of a run, what `parallel-ops train` says, before any process "
        "starts and with exit code 2, and the cure. The messages are those of the code: a test compares this page.",
    ]
    for mistake in MISTAKES:
        parts += [f"## {mistake.title}", f"    error: {said(mistake)}", mistake.cure]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
