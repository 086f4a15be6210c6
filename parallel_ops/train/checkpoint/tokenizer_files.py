"""The files of a tokenizer in an exported folder, and the ids of its special tokens for config.json and generation.

What a bare ``tokenizer.json`` does not say is what ``parallel-ops tokenize`` takes for it: which token ends a document,
and the chat template with marked roles. So text that the model generates ends where its documents did.
"""

import json
from pathlib import Path
from typing import Any

from parallel_ops._internal.files import read_json
from parallel_ops.tokenization.chat import PLAIN
from parallel_ops.tokenization.tokenizer import ENDS

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
GENERATION = "generation_config.json"
# Files of a tokenizer in a Hugging Face folder, and the settings of generation.
FILES = (
    TOKENIZER, SETTINGS, "special_tokens_map.json", TEMPLATE, "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", GENERATION,
)  # fmt: skip
_SPECIAL = ("bos", "eos", "pad")


def tokenizer_files(source: Path, vocab_size: int, ids: dict[str, Any]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Contents of the files of a tokenizer by name, and the ids of its special tokens by key of config.json.

    Args:
        source: A ``tokenizer.json``, which the settings beside it belong to, or a Hugging Face folder.
        vocab_size: Size of the model's vocabulary. ids: Ids that its config.json had before, which stay.

    Raises:
        FileNotFoundError: It is not there. ValueError: It is no tokenizer, or has more tokens than the model.
    """
    if not source.exists():
        raise FileNotFoundError(f"--tokenizer: {source} does not exist")
    if not source.is_dir() and source.name != TOKENIZER:
        raise ValueError(f"--tokenizer: the file must be named tokenizer.json, as models' folders have it: {source}")
    folder = source if source.is_dir() else source.parent
    found = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if not found.keys() - {GENERATION}:
        raise FileNotFoundError(f"--tokenizer: {source} has no tokenizer")
    tokens = _tokens(folder, found)
    if tokens and (size := max(tokens.values()) + 1) > vocab_size:
        raise ValueError(
            f"--tokenizer: {source} has {size} tokens, and the model has a vocabulary of {vocab_size}; give the "
            "tokenizer of the run's data"
        )
    settings = _read(folder, found, SETTINGS)
    special = {key: settings.get(f"{key}_token") for key in _SPECIAL}
    names = {key: token.get("content") if isinstance(token, dict) else token for key, token in special.items()}
    if names["eos"] is None:
        names["eos"] = next((end for end in ENDS if end in tokens), None)
    ids = {f"{key}_token_id": tokens[name] for key, name in names.items() if name in tokens} | ids
    if TOKENIZER in found:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
        if names["eos"] is not None:
            settings.setdefault("eos_token", names["eos"])
            if TEMPLATE not in found and not settings.get("chat_template"):
                settings["chat_template"] = PLAIN.replace("(end if", "(eos_token if")
        found[SETTINGS] = _json(settings)
    if ids and GENERATION not in found:
        found[GENERATION] = _json(ids)
    return found, ids


def _tokens(folder: Path, found: dict[str, bytes]) -> dict[str, int]:
    """Ids by token; empty for a tokenizer of other files, such as sentencepiece's."""
    whole = _read(folder, found, TOKENIZER)
    vocabulary = whole.get("model", {}).get("vocab", {}) if TOKENIZER in found else _read(folder, found, "vocab.json")
    if isinstance(vocabulary, list):  # of a unigram model: pairs of a token and its score
        vocabulary = {token: number for number, (token, *_) in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in whole.get("added_tokens", ())}
    return {**vocabulary, **added, **_read(folder, found, "added_tokens.json")}


def _read(folder: Path, found: dict[str, bytes], name: str) -> dict[str, Any]:
    if name not in found:
        return {}
    try:
        return read_json(folder / name)
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from None


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
