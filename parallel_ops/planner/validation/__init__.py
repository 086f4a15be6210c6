"""Validation of the planner against published tables.

``tables`` and ``runs`` have the published tables, each with its source. ``validate`` compares every row;
``benchmarks/planner_fit.py`` fits the constants of ``presets/efficiency.json`` to the rows that are marked as fitted.
"""

from parallel_ops.planner.validation.report import Promise, Report, Row, Summary
from parallel_ops.planner.validation.validate import validate

__all__ = ["Promise", "Report", "Row", "Summary", "validate"]
