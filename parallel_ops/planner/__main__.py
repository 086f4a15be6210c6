"""``parallel-ops``, also ``python -m parallel_ops.planner``."""

import importlib.util
import sys


def main() -> None:
    """Runs the command line."""
    missing = [name for name in ("typer", "rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: needs {', '.join(missing)}; run: pip install 'parallel_ops[plan]'", file=sys.stderr)
        sys.exit(2)
    from parallel_ops.planner.cli.app import run

    run()


if __name__ == "__main__":
    main()
