"""Tokenizes files in parallel processes, each a part at a time. A call that was killed goes on where it was."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops.tokenization import parts as stored
from parallel_ops.tokenization.documents import PIECE, Document, Part, documents, files_of, parts_of
from parallel_ops.tokenization.options import Options, Summary
from parallel_ops.tokenization.parts import Store, Tokens
from parallel_ops.tokenization.tokenizer import Encoder

# Documents that are encoded at once.
_BATCH = 1000
# What a part has.
Shares = tuple[Part, ...]


def tokenize(
    inputs: Sequence[Path], output: Path, options: Options, *, processes: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:  # fmt: skip
    """Tokenizes files to ``output``, a pair of Megatron-LM's ``.bin`` and ``.idx``.

    With tokens that do not count in the loss, a file ``.mask`` beside it has 1 or 0 for each token. The bytes are the
    same for any number of processes, and after any number of calls that were killed.

    Args:
        inputs: Files and folders; see ``documents``.
        output: ``name.bin``. processes: ``None`` for as many as there are CPUs.
        report: Called with the bytes that are done, and all.

    Raises:
        FileNotFoundError, FileExistsError, ValueError: An input is missing or damaged, or the output is there.
        ImportError: A package is missing. RuntimeError: A process was killed.
    """
    start = time.perf_counter()
    if output.suffix != ".bin":
        raise ValueError(f"the output must end in .bin, got {output}")
    given = files_of(inputs, options)
    encoder = Encoder(options)
    parts = parts_of(given.files, options)
    store = Store(output, parts, options, encoder.checksum)
    try:
        finished = store.finished()
        sizes = [sum(share.size for share in part) for part in parts]
        total = sum(sizes)
        done = sum(sizes[number] for number in finished)
        report(done, total)
        todo = [number for number in range(len(parts)) if number not in finished]
        for number in _finish(parts, todo, store, options, encoder, processes or _processors()):
            done += sizes[number]
            report(done, total)
        found, tokens, loss, empty = store.join(encoder.dtype, masked=options.chat)
    finally:
        store.close()
    return Summary(
        output=str(output), dtype=encoder.dtype.name, files=len(given.files), documents=found, tokens=tokens,
        loss_tokens=loss, empty=empty, bytes=total, vocab_size=encoder.vocab_size, eod=encoder.eod, parts=len(parts),
        kept=len(finished), seconds=time.perf_counter() - start,
        unread=[(str(path), reason) for path, reason in given.unread],
    )  # fmt: skip


def _finish(
    parts: Sequence[Shares], todo: Sequence[int], store: Store, options: Options, encoder: Encoder, processes: int
) -> Iterator[int]:
    """Tokenizes the parts ``todo``; yields each when it is stored."""
    count = min(processes, len(todo))
    if count <= 1:
        for number in todo:
            stored.write(store.path(number), tokens_of(parts[number], options, encoder))
            yield number
        return
    with _Pool(count, options) as pool:
        futures = {pool.submit(parts[number], store.path(number)): number for number in todo}
        for future in as_completed(futures):
            future.result()
            yield futures[future]


def tokens_of(part: Shares, options: Options, encoder: Encoder) -> Tokens:
    """The tokens of a part: of a share of a file, or of several small files."""
    found: list[NDArray[Any]] = []
    losses: list[NDArray[Any]] = []
    lengths: list[int] = []
    empty, length = 0, 0
    batch: list[Document] = []

    def add(tokens: NDArray[Any], loss: NDArray[np.uint8]) -> None:
        nonlocal length
        found.append(tokens)
        losses.append(loss)
        length += len(tokens)

    def flush() -> None:
        nonlocal empty, length
        for document, (tokens, loss) in zip(batch, encoder.encode(batch), strict=True):
            around = not options.chat  # the encoder has messages whole
            if around and begins and not length and len(tokens) and encoder.bos not in (None, tokens[0]):
                add(np.array([encoder.bos], encoder.dtype), np.ones(1, np.uint8))
            add(tokens, loss)
            if not document.ends:
                continue
            if begins and not length:
                empty += 1
                continue
            if around and encoder.eod is not None:
                add(np.array([encoder.eod], encoder.dtype), np.ones(1, np.uint8))
            lengths.append(length)
            length = 0
        batch.clear()

    # Otherwise the first document began in an earlier part.
    begins = part[0].kind != "text" or options.separator is not None or part[0].start == 0
    size = 0
    for document in itertools.chain.from_iterable(documents(share, options) for share in part):
        batch.append(document)
        size += len(document.value) if isinstance(document.value, str) else len(document.value.messages)
        if len(batch) == _BATCH or size >= PIECE:
            flush()
            size = 0
    flush()
    goes_on = length > 0
    if goes_on:
        lengths.append(length)
    empty_array = np.empty(0, np.uint8)
    return Tokens(
        tokens=np.concatenate(found) if found else np.empty(0, encoder.dtype),
        lengths=np.array(lengths, np.int64),
        loss=(np.concatenate(losses) if losses else empty_array) if options.chat else empty_array,
        empty=empty,
        goes_on=goes_on,
    )


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_encoder: Encoder | None = None


def _begin(options: Options) -> None:
    """In a process of the pool: the tokenizer is read once, and the process ends with its parent."""
    global _encoder  # noqa: PLW0603
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(options)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _do(part: Shares, path: Path, options: Options) -> None:
    assert _encoder is not None
    stored.write(path, tokens_of(part, options, _encoder))


class _Pool:
    """Processes that start anew rather than fork, since tokenizers has threads."""

    def __init__(self, count: int, options: Options) -> None:
        self._options = options
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, context, _begin, (options,))

    def submit(self, part: Shares, path: Path) -> "Future[None]":
        return self._pool.submit(_do, part, path, self._options)

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise RuntimeError(
                "a process was killed, which may have had too little memory; finished parts are kept, so the same "
                "command goes on, with fewer --processes if need be"
            ) from None
