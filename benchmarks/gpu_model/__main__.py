"""``python -m benchmarks.gpu_model``."""

from parallel_ops._internal.command_line import CONSOLE, start

if __name__ == "__main__":
    start("benchmarks.gpu_model.cli", CONSOLE)
