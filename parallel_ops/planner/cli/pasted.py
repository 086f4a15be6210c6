"""Names and numbers as people paste them: ``meta-llama/Llama-3.1-8B``, ``8xH100``, ``1e6``, ``15T``."""

import math
import re

_BINARY = {"k": 2**10, "m": 2**20}
_DECIMAL = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
# Endings of repositories whose models have the shape of the preset.
_VARIANT = re.compile(r"-(instruct|base|chat|hf|it|thinking|preview|bf16|fp8|\d{4}|v0\.\d)$")
# Rewrites of a repository's name to that of a preset.
_NAMES = (
    (r"^meta-llama-", "llama-"),
    (r"^llama-?2-", "llama2-"),
    (r"^llama-?3(\.\d)?-", "llama3-"),
    (r"^qwen2(\.5)?-(coder-)?", "qwen2-"),
    (r"^deepseek-(v3\.\d|r1)(-terminus)?$", "deepseek-v3"),
    (r"^(kimi-k2)\.\d$", r"\1"),
    (r"^glm-4\.6$", "glm-4.5"),
    (r"^nvidia-nemotron-3-", "nemotron3-"),
)
# A board's name with its memory or form factor, where the preset has none.
_BOARDS = (
    (r"^nvidia[-_ ]", ""),
    (r"^(dgx|hgx)[-_ ]", ""),
    (r"[-_ ](sxm\d?|nvl72|hgx|dgx|hbm\d?e?)(?=$|[-_ ])", ""),
    (r"^(h100|h800)[-_ ]?80(gb?)?$", r"\1"),
    (r"^(h200)[-_ ]?141(gb?)?$", r"\1"),
    (r"^(a100|v100)[-_ ]?(16|40|80)(gb?)?$", r"\1-\2"),
    (r"^(rtx)[-_ ]?(\d{4})$", r"\1\2"),
    (r"^(3090|4090)$", r"rtx\1"),
)


def model_name(text: str) -> str:
    """The preset's name for a repository's: ``meta-llama/Llama-3.1-8B-Instruct`` is ``llama3-8b``."""
    name = text.strip().lower().rpartition("/")[2].replace(" ", "-")
    while (short := _VARIANT.sub("", name)) != name:
        name = short
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def cluster_name(text: str) -> str:
    """The preset's name for ``8xH100``, ``2x8xH100``, ``64 x a100-80gb`` or ``NVIDIA H100 80GB HBM3``: ``h100x8``,
    ``h100x16``, ``a100-80x64``, ``h100``."""
    return "+".join(_one(part.strip()) for part in text.lower().split("+"))


def _one(name: str) -> str:
    if nodes := re.fullmatch(r"(\d+)\s*[x*]\s*(\d+)\s*[x*]\s*(\D.*)", name):
        return f"{_board(nodes[3])}x{int(nodes[1]) * int(nodes[2])}"
    if counted := re.fullmatch(r"(\d+)(?:\s*[x*]\s*|\s+)(.+)", name):
        return f"{_board(counted[2])}x{counted[1]}"
    if counted := re.fullmatch(r"(.+?)\s*[x*]\s*(\d+)", name):
        return f"{_board(counted[1])}x{counted[2]}"
    return _board(name)


def _board(name: str) -> str:
    for pattern, replacement in _BOARDS:
        name = re.sub(pattern, replacement, name)
    return name


def whole(text: str, *, binary: bool) -> tuple[int, str]:
    """A number with its unit in lower case, "" for none: ``1e6``, ``4M``, ``4,194,304``, ``15T``.

    Args:
        text: what was typed.
        binary: k and m are powers of 1,024; else units are powers of 1,000.

    Raises:
        ValueError: it is no positive whole number.
    """
    plain = text.strip().lower().replace(",", "").replace("_", "")
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)([a-z]?)", plain)
    units = _BINARY if binary else _DECIMAL
    if not found or found[2] not in ("", *units):
        raise ValueError(f"{text!r} is no number such as 2048, 1e6 or 4{'M' if binary else 'T'}")
    value = float(found[1]) * units.get(found[2], 1)
    if not 1 <= value < math.inf or value != int(value):
        raise ValueError(f"{text!r} is no positive whole number")
    return int(value), found[2]
