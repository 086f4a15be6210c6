"""A tokenizer of the ``tokenizers`` library, with the tokens around a document."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops.tokenization.chat import Chat
from parallel_ops.tokenization.documents import Document
from parallel_ops.tokenization.options import Options

# Names of the end of a document, of a tokenizer.json alone, which does not say which token that is.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
# The largest id that Megatron-LM, too, stores in 16 bits.
_SHORT = 65_500


class Encoder:
    """Documents to tokens.

    Attributes:
        vocab_size: With added tokens. eod, bos: Ids around a document; ``None`` for none.
        dtype: The smallest of those that Megatron-LM has, ``uint16`` or ``int32``.
        checksum: Of the files of the tokenizer that matter.

    Raises:
        FileNotFoundError, ValueError: The tokenizer is not there, cannot be read, or lacks a token that is named.
        ImportError: The package ``tokenizers`` is not installed.
    """

    def __init__(self, options: Options) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ImportError("tokenize needs tokenizers; run: pip install tokenizers") from None
        file, settings, template = _files(options.tokenizer)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ValueError(f"--tokenizer: {file} is no tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.dtype: np.dtype[np.integer] = np.dtype(np.uint16 if self.vocab_size <= _SHORT else np.int32)
        self.eod = self._end(options, file, settings)
        self.bos = None if options.bos is None else self._id("--bos", options.bos, file)
        self._chat: Chat | None = None
        if options.chat:
            self._chat = self._chat_of(options, template, settings)
        # The text of a document cannot name special tokens; a chat template does.
        self._tokenizer.encode_special_tokens = not options.chat
        content = [file.read_bytes(), (template or "").encode(), json.dumps(settings, sort_keys=True).encode()]
        self.checksum = hashlib.sha256(b"\0".join(content)).hexdigest()

    def encode(self, documents: list[Document]) -> list[tuple[NDArray[np.integer], NDArray[np.uint8]]]:
        """The tokens of each document, or piece of one, and 1 for each of them that counts in the loss."""
        if self._chat is not None:
            return [self._chat_tokens(document.value) for document in documents]
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)  # without offsets
        encodings = encode([document.value for document in documents], add_special_tokens=False)
        return [(np.array(found.ids, self.dtype), np.ones(len(found.ids), np.uint8)) for found in encodings]

    def _chat_tokens(self, messages: list[dict[str, Any]]) -> tuple[NDArray[np.integer], NDArray[np.uint8]]:
        assert self._chat is not None
        text, spans = self._chat.render(messages)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        counts = np.zeros(len(encoding.ids), np.uint8)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        for first, last in spans:
            counts[(begins < last) & (ends > first)] = 1
        return np.array(encoding.ids, self.dtype), counts

    def _chat_of(self, options: Options, template: str | None, settings: dict[str, Any]) -> Chat:
        if options.template == "tokenizer" and template is None:
            raise ValueError(f"--template: {options.tokenizer} has no chat template; plain marks the roles")
        end = "" if self.eod is None else str(self._tokenizer.id_to_token(self.eod))
        chosen = None if options.template == "plain" else template
        names = {name: _text(settings[name]) for name in ("bos_token", "eos_token", "pad_token") if settings.get(name)}
        return Chat(chosen, {"bos_token": "", "eos_token": end, **names}, end)

    def _end(self, options: Options, file: Path, settings: dict[str, Any]) -> int | None:
        if options.eod is not None:
            return None if options.eod == "none" else self._id("--eod", options.eod, file)
        if settings.get("eos_token"):
            return self._id("eos_token", _text(settings["eos_token"]), file)
        for name in _ENDS:
            if (found := self._tokenizer.token_to_id(name)) is not None:
                return int(found)
        raise ValueError(f"--eod: {file} does not say which token ends a document; name it, or none for no token")

    def _id(self, option: str, name: str, file: Path) -> int:
        if (found := self._tokenizer.token_to_id(name)) is None:
            raise ValueError(f"{option}: {file} has no token {name!r}")
        return int(found)


def _files(source: Path) -> tuple[Path, dict[str, Any], str | None]:
    """``tokenizer.json``, the content of ``tokenizer_config.json``, and the chat template."""
    if not source.exists():
        raise FileNotFoundError(f"--tokenizer: {source} does not exist")
    if not source.is_dir():
        return source, {}, None
    if not (source / "tokenizer.json").exists():
        raise FileNotFoundError(
            f"--tokenizer: {source} has no tokenizer.json; to make it, with transformers: "
            f"AutoTokenizer.from_pretrained({str(source)!r}).save_pretrained(folder)"
        )
    settings: dict[str, Any] = {}
    if (config := source / "tokenizer_config.json").exists():
        try:
            settings = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--tokenizer: {config} is not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise ValueError(f"--tokenizer: {config} must hold an object")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if (own := source / "chat_template.jinja").exists():
        template = own.read_text(encoding="utf-8")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"--tokenizer: the chat_template in {config} must be text")
    return source / "tokenizer.json", settings, template


def _text(token: Any) -> str:
    """A token of tokenizer_config.json: text, or an object with it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
