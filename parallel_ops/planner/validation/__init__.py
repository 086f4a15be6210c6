"""How far the planner is from published tables, and how its constants were fitted.

The tables are in the JSON files beside this one, each with its source. ``validate`` compares every row; ``fit`` finds
the three constants of ``presets/efficiency.json`` again from the rows that are marked as fitted. All other rows are
held out.
"""

from parallel_ops.planner.validation.fit import fit
from parallel_ops.planner.validation.report import Report, Row, Target
from parallel_ops.planner.validation.validate import validate

__all__ = ["Report", "Row", "Target", "fit", "validate"]
