"""Plans that a search finds for a system."""

from dataclasses import replace

from parallel_ops.planner import SearchOptions, presets, search

CASES = {
    "llama3-8b": ("h100x16", 128),
    "gpt3-175b": ("a100-80x128", 1536),
    "mixtral-8x7b": ("h100x64", 512),
    "llama3-405b": ("h100x512", 2048),  # 126 layers, which few pipelines divide
}


def best_plans(target, cases=tuple(CASES), **changes):
    """The fastest plans that the system can run, of each case: what ``plan --for`` gives."""
    for name in cases:
        machine, batch = CASES[name]
        model, cluster = presets.model(name), presets.cluster(machine)
        if name == "mixtral-8x7b":
            model = replace(model, seq_length=4096)
        options = SearchOptions(target=target, micro_batches=(1,), context_tokens=model.seq_length, **changes)
        found = search(model, cluster, batch=batch, options=options, keep=2)
        for plan in found.plans:
            yield model, cluster, plan.plan
