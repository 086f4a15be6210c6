"""``python -m benchmarks.demo``."""

from parallel_ops._internal.command_line import PICTURES, TRAIN, start

if __name__ == "__main__":
    start("benchmarks.demo.cli", dict.fromkeys((*PICTURES, *TRAIN)))
