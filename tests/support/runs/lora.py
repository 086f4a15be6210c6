"""Settings of small runs with adapters."""

from support.runs import trainer as runs

LLAMA = runs.MODELS["llama"]


def settings_of(data, **sections):
    sections = {"model": LLAMA, **sections}
    return runs.settings_of(data, **{**sections, "lora": {"rank": 4, **sections.get("lora", {})}})
