"""Pipeline schedules as data, one file a family; ``parallel_ops.planner.schedules.schedule`` is the way in."""
