"""One rank of several whose settings differ: runs one case after another, and prints how each ended.

python disagreement.py FILE RANK      FILE has [[port, [arguments of rank 0, of rank 1, ...]], ...]
"""

import io
import json
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from parallel_ops.__main__ import main
from support.ranks.processes import as_rank


def case(rank: int, port: int, arguments: list[list[str]]) -> dict[str, Any]:
    """The exit code of this rank's command, what it said, and the seconds that it took."""
    said, code, begin = io.StringIO(), None, time.monotonic()
    argv = ["parallel-ops", "train", *arguments[rank]]
    with mock.patch.object(sys, "argv", argv), mock.patch.dict(os.environ, as_rank(rank, len(arguments), port)):
        try:
            with redirect_stderr(said), redirect_stdout(said):
                main()
        except SystemExit as end:
            code = end.code
        except Exception as error:
            said.write(f"{type(error).__name__}: {error}")
    return {
        "code": code, "said": said.getvalue(), "seconds": time.monotonic() - begin, "group": dist.is_initialized(),
    }  # fmt: skip


if __name__ == "__main__":
    cases, own = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    print(json.dumps([case(own, *one) for one in cases]))
