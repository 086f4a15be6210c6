"""The options of ``tokenize`` and its result."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """How documents become tokens.

    Attributes:
        tokenizer: A ``tokenizer.json``, or a Hugging Face folder that has one.
        key: Key of a JSON object, or column of Parquet, with the document.
        chat: A document is a list of messages, each with ``role`` and ``content``; see ``messages`` and ``chat``.
        template: ``"tokenizer"`` renders messages by the tokenizer's chat template, ``"plain"`` marks the roles,
            ``"auto"`` is the first where there is one.
        eod: Token at the end of each document; ``None`` for the tokenizer's end of sequence, ``"none"`` for no token.
        bos: Token at the beginning of each document; ``None`` for no token.
        ignore: Keys of rows and messages that are left out, of those that would otherwise be refused; see ``messages``.
        split_special_tokens: In messages, too, names of special tokens are text; only the template has control tokens.
        separator: A line of raw text that separates documents, without its end; ``""`` for empty lines, ``None`` for
            one document a file.
    """

    tokenizer: Path
    key: str = "text"
    chat: bool = False
    ignore: tuple[str, ...] = ()
    split_special_tokens: bool = False
    template: str = "auto"
    eod: str | None = None
    bos: str | None = None
    separator: str | None = None


@dataclass(frozen=True)
class Summary:
    """The result.

    Attributes:
        output: The token file. dtype: The type of its tokens. files: Input files.
        documents, tokens: In the output. loss_tokens: Tokens that count in the loss.
        empty: Documents without text, which are left out. bytes: Read, of compressed files as they are on the disk.
        vocab_size: Entries of the tokenizer with its added tokens. eod: Id of the end of documents; ``None`` for none.
        parts: Parts in all. kept: Parts that an earlier call had finished. seconds: This call took.
        unread: Files in the input's folders that are not read, with the reason.
    """

    output: str
    dtype: str
    files: int
    documents: int
    tokens: int
    loss_tokens: int
    empty: int
    bytes: int
    vocab_size: int
    eod: int | None
    parts: int
    kept: int
    seconds: float
    unread: list[tuple[str, str]]
