"""Pipeline schedules as data, one file a family; ``parallel_ops.planner.schedule`` is the way in."""
