"""Tokenizes files in parallel processes, each a part at a time. A call that was killed goes on where it was."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops._internal.command_line import processors
from parallel_ops.tokenization.documents import PIECE, Document, Part, documents, files_of, parts_of
from parallel_ops.tokenization.options import Options, Summary
from parallel_ops.tokenization.parts import Store, Tokens, write
from parallel_ops.tokenization.tokenizer import Encoder

# Documents that are encoded at once.
_BATCH = 1000


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
    sizes = [sum(share.size for share in part) for part in parts]
    with Store(output, parts, options, encoder.checksum) as store:
        finished = store.finished()
        done = sum(sizes[number] for number in finished)
        report(done, sum(sizes))
        todo = {n: (part, store.path(n), options) for n, part in enumerate(parts) if n not in finished}
        for number in _finish(todo, encoder, processes or processors()):
            done += sizes[number]
            report(done, sum(sizes))
        found, tokens, loss, empty = store.join(encoder.dtype, masked=options.chat)
    return Summary(
        output=str(output), dtype=encoder.dtype.name, files=len(given.files), documents=found, tokens=tokens,
        loss_tokens=loss, empty=empty, bytes=sum(sizes), vocab_size=encoder.vocab_size, eod=encoder.eod,
        parts=len(parts), kept=len(finished), seconds=time.perf_counter() - start,
        unread=[(str(path), reason) for path, reason in given.unread],
    )  # fmt: skip


_Job = tuple[tuple[Part, ...], Path, Options]


def _finish(todo: dict[int, _Job], encoder: Encoder, processes: int) -> Iterator[int]:
    """Tokenizes parts; yields the number of each when it is stored."""
    count = min(processes, len(todo))
    if count <= 1:
        for number, (part, path, options) in todo.items():
            write(path, tokens_of(part, options, encoder))
            yield number
        return
    options = next(iter(todo.values()))[2]
    # Processes start anew rather than fork, since tokenizers has threads.
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin, (options,)) as pool:
        futures = {pool.submit(_do, *job): number for number, job in todo.items()}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool:
            raise RuntimeError(
                "a process was killed, which may have had too little memory; finished parts are kept, so the same "
                "command goes on, with fewer --processes if need be"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def tokens_of(part: Sequence[Part], options: Options, encoder: Encoder) -> Tokens:
    """The tokens of a part: of a share of a file, or of several small files."""
    found = [np.empty(0, encoder.dtype)]
    losses = [np.empty(0, np.uint8)]
    lengths = [0]  # of the documents, the last one not ended
    empty = 0

    def add(tokens: NDArray[Any], loss: NDArray[np.uint8]) -> None:
        found.append(tokens)
        losses.append(loss)
        lengths[-1] += len(tokens)

    def add_one(token: int | None) -> None:
        if token is not None:
            add(np.array([token], encoder.dtype), np.ones(1, np.uint8))

    # Otherwise the first document began in an earlier part.
    begins = part[0].kind != "text" or options.separator is not None or part[0].start == 0
    every = itertools.chain.from_iterable(documents(share, options) for share in part)
    for batch in _batches(every):
        for document, (tokens, loss) in zip(batch, encoder.encode(batch), strict=True):
            around = not options.chat  # the encoder has messages whole
            if around and begins and not lengths[-1] and len(tokens) and tokens[0] != encoder.bos:
                add_one(encoder.bos)
            add(tokens, loss)
            if not document.ends:
                continue
            if begins and not lengths[-1]:
                empty += 1
                continue
            if around:
                add_one(encoder.eod)
            lengths.append(0)
    goes_on = lengths[-1] > 0
    return Tokens(
        tokens=np.concatenate(found), lengths=np.array(lengths if goes_on else lengths[:-1], np.int64),
        loss=np.concatenate(losses) if options.chat else losses[0], empty=empty, goes_on=goes_on,
    )  # fmt: skip


def _batches(every: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in every:
        batch.append(document)
        size += len(document.value) if isinstance(document.value, str) else len(document.value.messages)
        if len(batch) == _BATCH or size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_encoder: Encoder | None = None


def _begin(options: Options) -> None:
    """Prepares a process of the pool: the tokenizer is read once, and the process ends with its parent."""
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


def _do(part: Sequence[Part], path: Path, options: Options) -> None:
    assert _encoder is not None
    write(path, tokens_of(part, options, _encoder))
