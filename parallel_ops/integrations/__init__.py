"""The package's ops in models of other libraries: ``huggingface`` for Transformers, ``megatron`` for Megatron-core.

Each is imported at first use, since it needs that library.
"""

import importlib

_INTEGRATIONS = {"huggingface", "megatron"}


def __getattr__(name: str) -> object:
    if name in _INTEGRATIONS:
        return importlib.import_module(f"parallel_ops.integrations.{name}")
    raise AttributeError(f"module 'parallel_ops.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_INTEGRATIONS})
