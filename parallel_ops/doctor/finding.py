"""What a check has found."""

from typing import Literal, NamedTuple

Status = Literal["ok", "warning", "failed"]


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        check: What was looked at, such as ``"torch"`` or ``"send 0 to 1"``. found: What is there.
        cure: What to do about it; empty where nothing is wrong.
    """

    status: Status
    check: str
    found: str
    cure: str = ""
