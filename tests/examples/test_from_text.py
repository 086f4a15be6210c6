"""docs/from_text.md: its commands run as they are written, one after the other."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("tokenizers", "transformers", "pydantic", "matplotlib", "safetensors", "jinja2")


@pytest.mark.runs
def test_the_commands_of_the_page(tmp_path):
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "parallel-ops"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m parallel_ops "$@"\n')
    command.chmod(0o755)
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/from_text.md").read_text(), flags=re.DOTALL)
    script = "".join(block for block in blocks if not block.startswith("pip install"))
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "40 of 40 steps" in done.stdout and "30 of 30 steps" in done.stdout and "% of them in the loss" in done.stdout
    )
    assert "What is 12 plus 1?\n<|assistant|>\n" in done.stdout
    assert (tmp_path / "runs/text/profile/trace.json").exists()
