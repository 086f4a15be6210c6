"""``python -m parallel_ops.train``."""

import importlib.util
import sys


def _main() -> None:
    missing = [name for name in ("typer", "rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: needs {', '.join(missing)}; run: pip install 'parallel_ops[train]'", file=sys.stderr)
        sys.exit(2)
    from parallel_ops.train.cli import main

    main()


if __name__ == "__main__":
    _main()
