"""``parallel-ops``, also ``python -m parallel_ops``."""

from parallel_ops._internal.command_line import start


def main() -> None:
    """Runs the command line."""
    start("parallel_ops._commands", extra="plan")


if __name__ == "__main__":
    main()
