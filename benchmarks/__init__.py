"""Benchmarks of the fused ops: ``python -m benchmarks --help``. One ``bench_<op>.py`` an op over one harness."""
