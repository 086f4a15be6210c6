"""What cannot be captured in CUDA graphs."""

import pytest
import torch

from parallel_ops.comm import consistency


@pytest.mark.parametrize(("device", "capturing", "refused"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)])
def test_a_captured_stream_is_refused(monkeypatch, device, capturing, refused):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    if refused:
        with pytest.raises(RuntimeError, match="step: not in a graph"):
            consistency.refuse_capture("step", device, "not in a graph")
    else:
        consistency.refuse_capture("step", device, "not in a graph")
