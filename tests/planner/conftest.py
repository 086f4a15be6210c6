import sys

import pytest

from parallel_ops.planner import search


@pytest.fixture(scope="module")
def searched():
    """``search``, which answers a call with the same arguments from memory.

    For one file: a search has a hundred thousand rejected plans, which slow down every garbage collection.
    """
    found = {}

    def remembered(model, cluster, **given):
        key = model, cluster, repr(given)
        if key not in found:
            found[key] = search(model, cluster, **given)
        return found[key]

    return remembered


@pytest.fixture
def run(monkeypatch, capsys, searched):
    """Runs ``parallel-ops``; returns exit code, stdout and stderr. Equal searches of several commands are done once."""
    from parallel_ops.planner.cli import app

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(app, "search", searched)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["parallel-ops", *map(str, arguments)])
        try:
            app.main()
        except SystemExit as stop:
            code = stop.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return call
