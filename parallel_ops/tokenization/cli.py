"""The command ``parallel-ops tokenize``."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from parallel_ops._internal.command_line import bytes_bar, fail
from parallel_ops._internal.files import described, expanded, one_path
from parallel_ops.tokenization.options import Options, Summary

TEMPLATES = ("auto", "tokenizer", "plain")


def tokenize_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT... OUTPUT",
            help="Text, JSON lines, Parquet, or folders of them; and the token file to write, which ends in .bin.",
            show_default=False,
        ),
    ],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json, or a Hugging Face folder that has one.")],
    key: Annotated[
        str | None,
        typer.Option(help="Key or column with the document.", show_default="text, with --chat messages"),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Documents are messages; what the assistant says counts in the loss.")
    ] = False,
    template: Annotated[
        str,
        typer.Option(help="Of messages: the tokenizer's chat template, plain marks of the roles, or auto: the first "
                          "if there is one."),
    ] = "auto",
    eod: Annotated[
        str | None,
        typer.Option(help="Token at the end of a document, or none.", show_default="the tokenizer's end of sequence"),
    ] = None,
    bos: Annotated[str | None, typer.Option(help="Token at the beginning of a document.", show_default="none")] = None,
    separator: Annotated[
        str | None,
        typer.Option(help='Line between documents of raw text; "" for empty lines.', show_default="a file a document"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Leave out this key of rows or messages, which would be refused; may be repeated."),
    ] = None,
    split_special_tokens: Annotated[
        bool,
        typer.Option("--split-special-tokens", help="With --chat: names of special tokens in messages are text, too."),
    ] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one a CPU")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:  # fmt: skip
    """Tokenizes text in parallel, for data.paths of `train`.

    Writes OUTPUT.bin and OUTPUT.idx, Megatron-LM's format. If it is stopped or killed, the same command goes on; the
    bytes are the same.

    Example: parallel-ops tokenize corpus/*.jsonl corpus.bin --tokenizer tokenizer.json
    """
    from parallel_ops.tokenization.run import tokenize

    *inputs, output = paths
    if not inputs:
        raise ValueError(f"tokenize needs an input and an output, got {output} alone")
    if template not in TEMPLATES:
        raise ValueError(f"--template must be {', '.join(TEMPLATES)}, got {template!r}")
    if chat and separator is not None:
        raise ValueError("--separator is of raw text, which --chat does not read; leave one of them out")
    if template != "auto" and not chat:
        raise ValueError("--template is of messages: give --chat too")
    if split_special_tokens and not chat:
        raise ValueError("--split-special-tokens is of messages: give --chat too; in a text all names are text")
    options = Options(
        tokenizer=one_path(tokenizer), ignore=tuple(ignore or ()), split_special_tokens=split_special_tokens,
        key=key or ("messages" if chat else "text"), chat=chat, template=template, eod=eod,
        bos=bos, separator=separator,
    )  # fmt: skip
    try:
        with bytes_bar() as report:
            found = tokenize(inputs, expanded(output), options, processes=processes, report=report)
    except KeyboardInterrupt:
        print("finished parts are kept: the same command goes on", file=sys.stderr)
        raise
    except ImportError as error:
        fail(error)
    if found.unread:
        print(f"warning: not read: {described([(Path(p), why) for p, why in found.unread])}", file=sys.stderr)
    print(json.dumps(dataclasses.asdict(found)) if as_json else _described(found))


def _described(found: Summary) -> str:
    end = "no token" if found.eod is None else f"token {found.eod}"
    part = f", {found.loss_tokens / found.tokens:.1%} of them in the loss" if found.loss_tokens < found.tokens else ""
    kept = f"; {found.kept} of {found.parts} parts were there" if found.kept else ""
    rate = f"{found.bytes / found.seconds / 1e6:.1f} MB/s" if not found.kept else f"{found.seconds:.0f} s"
    left_out = f"; {found.empty:,} empty ones left out" if found.empty else ""
    return (
        f"{found.output}: {found.tokens:,} tokens of {found.dtype}{part}, in {found.documents:,} documents{left_out}\n"
        f"{found.bytes / 1e6:,.1f} MB of {found.files:,} files, {rate}{kept}\n"
        f"documents end with {end}; model.vocab_size must be at least {found.vocab_size:,}"
    )
