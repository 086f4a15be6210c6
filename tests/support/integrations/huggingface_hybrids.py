"""The table of what ``huggingface.apply`` serves of families that it serves in part, for docs/huggingface.md."""

from parallel_ops.integrations import huggingface
from support.integrations.huggingface_families import HYBRIDS, model_of
from support.integrations.huggingface_models import OLD

# What another order of sums may change more than 3e-6 of a gradient: stock's own rounding is 1.2e-5 for Gemma 4, and
# 3.0e-6 for Granite MoE with Transformers 4.50, where ours is 2.4e-6.
SENSITIVE = {"gemma4": 1e-4, "qwen3_next": 1e-4, "qwen3_5_moe": 2e-5, "olmo_hybrid": 2e-5} | (
    {"granitemoe": 6e-6} if OLD else {}
)


def served(family: str) -> tuple[list[str], dict[str, str]]:
    """The ops that a model of the family calls after ``apply``, and what is kept of it, by the end of its name."""
    applied = huggingface.apply(model_of(family))
    ops = sorted({op for of_module in applied.replaced.values() for op in of_module})
    kept = {}
    for name, reason in applied.unreplaced.items():
        ops_of_reason = [part.partition(": ")[0] for part in reason.split("; ")]
        kept[name.rpartition(".")[2]] = ", ".join(op for op in ops_of_reason if op.isidentifier())
    return ops, kept


_OF_EXPERTS = {"sort_by_expert", "permute", "grouped_linear", "unpermute"}


def table() -> list[str]:
    """Rows of Markdown, one a family."""
    rows = ["| `model_type` | ops | stays stock's |", "|---|---|---|"]
    for family in HYBRIDS:
        ops, kept = served(family)
        words = [f"`{op}`" for op in ops if op not in _OF_EXPERTS and op != "vocab_parallel_linear_cross_entropy"]
        words += ["experts"] * ("grouped_linear" in ops) + ["loss without logits"] * (
            "vocab_parallel_linear_cross_entropy" in ops
        )
        left = ", ".join(f"{name}: `{op.replace(', ', '`, `')}`" for name, op in kept.items())
        rows.append(f"| `{family}` | {', '.join(words)} | {left} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
