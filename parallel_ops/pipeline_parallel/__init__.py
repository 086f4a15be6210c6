"""Pipeline parallelism: the planner's schedules, run."""

from parallel_ops.pipeline_parallel.chain import ModuleChain
from parallel_ops.pipeline_parallel.cut import Stages, cut
from parallel_ops.pipeline_parallel.executor import Executor, Observer
from parallel_ops.pipeline_parallel.pipeline import Pipeline, schedule_of

__all__ = ["Executor", "ModuleChain", "Observer", "Pipeline", "Stages", "cut", "schedule_of"]
