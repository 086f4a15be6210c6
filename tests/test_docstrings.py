"""Examples in docstrings: every public name has one, and it runs as it is pasted into a new interpreter."""

import doctest
import importlib
import inspect

import pytest
import torch

PACKAGES = ("parallel_ops", "parallel_ops.layers", "parallel_ops.models")


def public():
    """The functions and classes of ``__all__``, by their full names."""
    modules = [importlib.import_module(package) for package in PACKAGES]
    found = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    return {name: each for name, each in found.items() if not inspect.ismodule(each)}


@pytest.mark.parametrize("name", public())
def test_the_example_runs(name):
    torch.manual_seed(0)
    found = public()[name]
    # Without the names of the module: an example has its own imports.
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(found) or "", {}, name, None, None)
    # A result, such as that of ``route``, comes from a call; everything else is called.
    is_result = inspect.isclass(found) and issubclass(found, tuple)
    called = [example for example in test.examples if f"{name.rpartition('.')[2]}(" in example.source]
    assert called or (is_result and test.examples)
    said = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)
