"""``parallel-ops``, also ``python -m parallel_ops``."""

import sys

from parallel_ops import __version__
from parallel_ops._internal.command_line import CONSOLE, TOKENS, TRAIN, missing, start

# Packages of commands that need more than CONSOLE.
_PACKAGES = {"tokenize": TOKENS, **dict.fromkeys(("train", "calibrate", "export", "inspect", "doctor"), TRAIN)}

# The commands, for a help that needs no packages. Their docstrings begin with the same words.
COMMANDS = {
    "plan": "Ranks all plans of a model on a cluster, with reasons against those that cannot run.",
    "estimate": "Time, memory and traffic of one plan.",
    "presets": "Lists the models, clusters and GPUs that have a name, and the eras of --software.",
    "schedule": "Simulates a pipeline schedule and draws it; that of a plan with the memory of a rank over the step.",
    "validate": "Compares the planner with published tables.",
    "tokenize": "Tokenizes text in parallel, for data.paths of `train`.",
    "train": "Trains a model as a TOML file says.",
    "calibrate": "Measures matmuls, attention, a layer, updates and collectives here.",
    "export": "Writes a checkpoint of any plan as a Hugging Face folder.",
    "inspect": "Says what a checkpoint is: step, sizes, model, plan, data, settings.",
    "doctor": "Checks this machine and its ranks, and says what is wrong.",
}


def main() -> None:
    """Runs the command line. ``--version`` and the list of commands need no package but this one."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    command = sys.argv[1]
    if command == "--version":
        print(f"parallel-ops {__version__}")
    elif command == "--help" and (absent := missing(CONSOLE)):
        print(_plain_help(absent))
    else:
        start("parallel_ops._commands", _PACKAGES.get(command, CONSOLE))


def _plain_help(absent: list[str]) -> str:
    """Returns the list of commands, and what they need beside it."""
    rows = "\n".join(f"  {name:10} {does}" for name, does in COMMANDS.items())
    needed = f"The commands need {' and '.join(absent)}: pip install {' '.join(absent)}"
    return f"Usage: parallel-ops [--version] [--help] COMMAND ...\n\n{rows}\n\n{needed}"


if __name__ == "__main__":
    main()
