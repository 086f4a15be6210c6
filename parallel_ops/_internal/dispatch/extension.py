"""Loads the compiled extension, which registers the ``torch.ops.parallel_ops`` schemas and CPU kernels."""

import importlib
from pathlib import Path

import torch  # noqa: F401  (the extension links against the libraries that this loads)

try:
    importlib.import_module("parallel_ops._C")
except ImportError as error:
    source_tree = (Path(__file__).parents[3] / "setup.py").exists()
    hint = (
        "it was imported from its source tree, where the extension is not built: run "
        "`pip install -e .` there, or start Python in another folder"
        if source_tree
        else "build it again for the torch that is here, in its source: pip install --force-reinstall --no-deps ."
    )
    raise ImportError(f"parallel_ops: the compiled extension could not be loaded ({error}); {hint}") from error
