"""``python -m parallel_ops.train``."""

from parallel_ops._command_line import start

if __name__ == "__main__":
    start("parallel_ops.train.cli", extra="train")
