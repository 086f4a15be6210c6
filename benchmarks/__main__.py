"""``python -m benchmarks [OP ...]``."""

from parallel_ops._internal.command_line import CONSOLE, start

if __name__ == "__main__":
    start("benchmarks.cli", CONSOLE)
