"""How far the planner is from published tables, and how its constants were fitted.

The tables are in the JSON and CSV files beside this one, each with its source. ``validate`` compares every row;
``validation.fit`` finds the constants of ``presets/efficiency.json`` again from the rows that are marked as fitted.
"""

from parallel_ops.planner.validation.report import Promise, Report, Row, Summary
from parallel_ops.planner.validation.validate import validate

__all__ = ["Promise", "Report", "Row", "Summary", "validate"]
