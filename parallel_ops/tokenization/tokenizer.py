"""A tokenizer of the ``tokenizers`` library, with the tokens around a document."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops._internal.files import read_json
from parallel_ops.tokenization.chat import Chat
from parallel_ops.tokenization.documents import Document
from parallel_ops.tokenization.messages import Conversation, replaced
from parallel_ops.tokenization.options import Options

# Names of the end of a document, of a tokenizer.json alone, which does not say which token that is.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
Span = tuple[int, int]
# Tokens, and 1 for each of them that counts in the loss, uint8.
Encoded = tuple[NDArray[np.integer], NDArray[np.uint8]]
# The largest id that Megatron-LM, too, stores in 16 bits.
_SHORT = 65_500


class Encoder:
    """Documents to tokens.

    Attributes:
        vocab_size: With added tokens. eod, bos: Ids around a document; ``None`` for none.
        dtype: The smallest of those that Megatron-LM has, ``uint16`` or ``int32``.
        checksum: Digest of the tokenizer's files that matter.

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
            self._tokenizer = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8-sig"))
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"--tokenizer: {file} is no tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.dtype: np.dtype[np.integer] = np.dtype(np.uint16 if self.vocab_size <= _SHORT else np.int32)
        self.eod = self._end(options, file, settings)
        self.bos = None if options.bos is None else self._id("--bos", options.bos, file)
        self._end_text = "" if self.eod is None else str(self._tokenizer.id_to_token(self.eod))
        self._split = options.split_special_tokens
        self._special = {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        self._chat = self._chat_of(options, template, settings) if options.chat else None
        # One character of private use for each, longer names first.
        longest = sorted(self._special, key=len, reverse=True)
        self._stand_ins = {name: chr(0xF0000 + number) for number, name in enumerate(longest)}
        # Names of special tokens in a text are text; those of a chat template are tokens.
        self._tokenizer.encode_special_tokens = not options.chat
        content = [file.read_bytes(), (template or "").encode(), json.dumps(settings, sort_keys=True).encode()]
        self.checksum = hashlib.sha256(b"\0".join(content)).hexdigest()

    def encode(self, documents: list[Document]) -> list[Encoded]:
        """The tokens of each document, or piece of one; none for an empty document."""
        if self._chat is not None:
            return [self._chat_tokens(self._chat, document.value) for document in documents]
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)  # without offsets
        encodings = encode([document.value for document in documents], add_special_tokens=False)
        return [
            self._framed(
                found.ids, np.ones(len(found.ids)), begins=document.begins,
                ends=document.ends and bool(found.ids or not document.begins), counted=True,
            )
            for document, found in zip(documents, encodings, strict=True)
        ]  # fmt: skip

    def _framed(self, ids: list[int], loss: NDArray[Any], *, begins: bool, ends: bool, counted: bool) -> Encoded:
        """Ids with the tokens around a document, of which the last one may be ``counted`` in the loss."""
        front = [self.bos] if begins and self.bos is not None and ids and ids[0] != self.bos else []
        back = [self.eod] if ends and self.eod is not None else []
        loss = np.concatenate([np.zeros(len(front)), loss, np.full(len(back), counted)])
        return np.array([*front, *ids, *back], self.dtype), loss.astype(np.uint8)

    def _chat_tokens(self, chat: Chat, given: str | Conversation) -> Encoded:
        if isinstance(given, str):  # null
            return np.empty(0, self.dtype), np.empty(0, np.uint8)
        try:
            named = replaced(given, self._stand_ins) if self._split and self._stand_ins else given
            if named is not given:
                ids, offsets, text, spans = self._split_tokens(chat, named)
            else:
                text, spans = chat.render(given)
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
                ids, offsets = encoding.ids, encoding.offsets
        except ValueError as error:
            raise ValueError(f"{given.place()}: {error}") from None
        loss = np.zeros(len(ids))
        begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        for first, last in spans:
            loss[(begins < last) & (ends > first)] = 1
        # A template's last turn may end with this token and a line end.
        ended = not ids or text.rstrip().endswith(self._end_text)
        counted = given.messages[-1]["role"] == "assistant" and given.weights[-1] == 1
        return self._framed(ids, loss, begins=True, ends=not ended, counted=counted)

    def _split_tokens(self, chat: Chat, given: Conversation) -> tuple[list[int], list[Span], str, list[Span]]:
        """Ids, offsets, rendered text and spans of messages in which names of special tokens are text.

        ``given`` has one character in the place of each such name. The text between the special tokens of the rendered
        text is then encoded by itself, with the names.

        Raises:
            ValueError: The tokenizer encodes what is between special tokens otherwise by itself.
        """
        rendered, spans = chat.render(given)
        names = {character: name for name, character in self._stand_ins.items()}
        plain = "".join(character for character in rendered if character not in names)
        if self._between(plain, {})[0] != self._tokenizer.encode(plain, add_special_tokens=False).ids:
            raise ValueError("--split-special-tokens: this tokenizer needs a text whole, and names of tokens are in it")
        places = np.cumsum([0, *(len(names.get(character, character)) for character in rendered)])
        spans = [(int(places[first]), int(places[last])) for first, last in spans]
        return *self._between(rendered, names), rendered, spans

    def _between(self, rendered: str, names: dict[str, str]) -> tuple[list[int], list[Span]]:
        """Ids and offsets of a text with names in the place of characters, encoded part by part."""
        ids: list[int] = []
        offsets: list[Span] = []
        start = 0
        self._tokenizer.encode_special_tokens = True
        for part in re.split(f"({'|'.join(map(re.escape, self._stand_ins))})", rendered):
            text = _named(part, names)
            if part in self._special:
                ids.append(self._special[part])
                offsets.append((start, start + len(part)))
            else:
                found = self._tokenizer.encode(text, add_special_tokens=False)
                ids += found.ids
                offsets += [(start + first, start + last) for first, last in found.offsets]
            start += len(text)
        self._tokenizer.encode_special_tokens = False
        return ids, offsets

    def _chat_of(self, options: Options, template: str | None, settings: dict[str, Any]) -> Chat:
        if options.template == "tokenizer" and template is None:
            raise ValueError(f"--template: {options.tokenizer} has no chat template; plain marks the roles")
        chosen = None if options.template == "plain" else template
        names = {name: _text(settings[name]) for name in ("bos_token", "eos_token", "pad_token") if settings.get(name)}
        return Chat(chosen, {"bos_token": "", "eos_token": self._end_text, **names}, self._end_text, self._special)

    def _end(self, options: Options, file: Path, settings: dict[str, Any]) -> int | None:
        if options.eod is not None:
            return None if options.eod == "none" else self._id("--eod", options.eod, file)
        if settings.get("eos_token"):
            return self._id("eos_token", _text(settings["eos_token"]), file)
        for name in ENDS:
            if (found := self._tokenizer.token_to_id(name)) is not None:
                return int(found)
        has = ", ".join(
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        )  # fmt: skip
        raise ValueError(
            f"--eod: {file} does not say which token ends a document; name it, or none for no token"
            + (f"; its special tokens are {has}" if has else "; it has no special tokens")
        )

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
            settings = read_json(config)
        except ValueError as error:
            raise ValueError(f"--tokenizer: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if (own := source / "chat_template.jinja").exists():
        template = own.read_text(encoding="utf-8-sig")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"--tokenizer: the chat_template in {config} must be text")
    return source / "tokenizer.json", settings, template


def _named(text: str, names: dict[str, str]) -> str:
    return "".join(names.get(character, character) for character in text)


def _text(token: Any) -> str:
    """A token of tokenizer_config.json: text, or an object with it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
