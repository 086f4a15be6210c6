"""The section ``[run]``."""

from typing import Annotated, Literal

from pydantic import Field

from parallel_ops.train.settings.section import Positive, Section


class RunSettings(Section):
    """Length, device and failure handling of a run.

    Attributes:
        steps: Optimizer steps in total, including those before a resume.
        seed: Seed of weights, data order and dropout.
        device: ``"auto"`` selects CUDA where there is a GPU.
        compile: Compile each block with ``torch.compile``.
        cuda_graph: ``"step"`` captures a step in one CUDA graph and replays it, ``"layers"`` each layer's forward and
            backward; see ``train.step.graph`` and ``layer_graphs``. Where that cannot be, as without a GPU, a warning
            at the start has the reason, and steps are eager.
        cuda_graph_capacity: Rows of an expert from each rank, relative to equal loads, in steps of one graph with
            dropless experts that ranks share. With more in any micro-batch the step is taken again without the graph;
            unused rows are sent and computed all the same. 2.0 is assumed, for routers that balance.
        on_nan: Stop the run, or skip the update, when the loss or the gradient norm is not finite.
        timeout: Seconds after which a stalled rank ends the run with an error that names it. The start, the first step,
            reading data and saving may take six times as long. ``"none"`` disables the limit, as for a debugger that
            suspends a process.
    """

    steps: Positive = 1000
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    cuda_graph: Literal["step", "layers", False] = False
    cuda_graph_capacity: Annotated[float, Field(gt=0)] = 2.0
    on_nan: Literal["stop", "skip"] = "stop"
    timeout: Annotated[float, Field(ge=1, le=86400)] | None = 300.0
