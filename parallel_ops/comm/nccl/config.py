"""Settings of an NCCL communicator."""

import dataclasses
import enum

from parallel_ops import _nccl
from parallel_ops.comm.nccl.library import Library


class CtaPolicy(enum.IntFlag):
    """What NCCL favours when it chooses how many CTAs (thread blocks) an operation takes."""

    DEFAULT = 0
    EFFICIENCY = 1  # fewer CTAs, more left for computation; from 2.27
    ZERO = 2  # none where copy engines can do the work; from 2.28, with windows on symmetric memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one communicator, as ``ncclConfig_t`` has them; ``None`` leaves the choice to NCCL.

    Args:
        cga_cluster_size: thread blocks a cluster, 0 to 8. From NCCL 2.17.
        min_ctas: least number of CTAs for one operation. From 2.17.
        max_ctas: greatest number of CTAs for one operation. From 2.17.
        net_name: the network module to use, ``"IB"`` or ``"Socket"``. From 2.17.
        traffic_class: of the network traffic. From 2.25.
        collnet_enable: reductions in the network. From 2.27.
        cta_policy: see :class:`CtaPolicy`. From 2.27.
        nvls_ctas: CTAs of NVLink SHARP operations. From 2.27.
        comm_name: a name in NCCL's logs. From 2.27.
        channels_per_net_peer: network channels to each peer. From 2.28.
        nvlink_centric_sched: schedules with NVLink in the middle. From 2.28.
    """

    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    traffic_class: int | None = None
    collnet_enable: bool | None = None
    cta_policy: CtaPolicy | None = None
    nvls_ctas: int | None = None
    comm_name: str | None = None
    channels_per_net_peer: int | None = None
    nvlink_centric_sched: bool | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name.endswith("_name"):
                if not isinstance(value, str):
                    raise TypeError(f"Config: {field.name} must be a string, got {type(value).__name__}")
            elif not isinstance(value, int):
                raise TypeError(f"Config: {field.name} must be an integer, got {type(value).__name__}")
            elif value < (least := int(field.name.endswith("_ctas"))):
                raise ValueError(f"Config: {field.name} must be at least {least}, got {value}")
        if self.cga_cluster_size is not None and self.cga_cluster_size > 8:
            raise ValueError(f"Config: cga_cluster_size must be 0 to 8, got {self.cga_cluster_size}")
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ValueError(f"Config: min_ctas must be at most max_ctas, got {self.min_ctas} and {self.max_ctas}")

    def to_native(self, library: Library) -> _nccl.Config:
        """As the binding takes it. Raises NotSupported for a setting that ``library`` does not have."""
        native = _nccl.Config()
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                native.set(field.name, value if isinstance(value, str) else int(value))
        native.check(library)
        return native
