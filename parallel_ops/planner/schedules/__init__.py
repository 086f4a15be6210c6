"""Pipeline schedules as data, one file per family. Entry point: ``parallel_ops.planner.schedules.schedule``."""
