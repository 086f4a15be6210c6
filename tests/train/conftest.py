"""The data of small runs. Without the trainer's requirements nothing here is collected."""

from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDED = ("matplotlib", "pydantic", "typer")
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["test_*.py", "*/test_*.py"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file; see ``support.trainer.data_file``."""
    from support.runs import trainer  # needs pydantic

    return trainer.data_file(tmp_path_factory.mktemp("data"))
