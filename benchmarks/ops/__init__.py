"""The benchmarks of the ops: ``<family>.py`` declares ``BENCHMARKS``, one ``harness.spec.Benchmark`` an op."""

import importlib
import pkgutil

from benchmarks.harness.spec import Benchmark


def every() -> dict[str, Benchmark]:
    """All benchmarks, by the name of the op."""
    found: list[Benchmark] = []
    for module in pkgutil.iter_modules(__path__):
        found += importlib.import_module(f"{__name__}.{module.name}").BENCHMARKS
    return {benchmark.op: benchmark for benchmark in sorted(found, key=lambda benchmark: benchmark.op)}
