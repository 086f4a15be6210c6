import sys

import pytest


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs ``parallel-ops``; returns exit code, stdout and stderr."""
    from parallel_ops.planner.cli import app

    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["parallel-ops", *map(str, arguments)])
        try:
            app.main()
        except SystemExit as stop:
            code = stop.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return call
