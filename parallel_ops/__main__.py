"""``parallel-ops``, also ``python -m parallel_ops``."""

import sys

from parallel_ops._internal.command_line import start


def main() -> None:
    """Runs the command line."""
    start("parallel_ops._commands", extra="train" if sys.argv[1:2] == ["train"] else "plan")


if __name__ == "__main__":
    main()
