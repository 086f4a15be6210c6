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

import numpy as np

from parallel_ops._internal.command_line import processors
from parallel_ops.tokenization.documents import PIECE, Document, Part, documents, files_of, parts_of
from parallel_ops.tokenization.options import Options, Summary
from parallel_ops.tokenization.parts import Store, Tokens
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
    store = Store(output, parts, options, encoder.checksum)
    finished = store.finished()
    done = sum(sizes[number] for number in finished)
    report(done, sum(sizes))
    todo = {number: part for number, part in enumerate(parts) if number not in finished}
    for number in _finish(store, options, encoder, todo, processes or processors()):
        done += sizes[number]
        report(done, sum(sizes))
    found, tokens, loss, empty = store.join(parts, encoder.dtype, masked=options.chat)
    return Summary(
        output=str(output), dtype=encoder.dtype.name, files=len(given.files), documents=found, tokens=tokens,
        loss_tokens=loss, empty=empty, bytes=sum(sizes), vocab_size=encoder.vocab_size, eod=encoder.eod,
        parts=len(parts), kept=len(finished), seconds=time.perf_counter() - start,
        unread=[(str(path), reason) for path, reason in given.unread],
    )  # fmt: skip


def _finish(
    store: Store, options: Options, encoder: Encoder, todo: dict[int, tuple[Part, ...]], processes: int
) -> Iterator[int]:  # fmt: skip
    """Tokenizes parts; yields the number of each when it is stored."""
    count = min(processes, len(todo))
    if count <= 1:
        for number, part in todo.items():
            store.write(number, tokens_of(part, options, encoder))
            yield number
        return
    # Processes start anew rather than fork, since tokenizers has threads.
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin, (store, options)) as pool:
        futures = {pool.submit(_do, number, part): number for number, part in todo.items()}
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
    found, losses = [np.empty(0, encoder.dtype)], [np.empty(0, np.uint8)]
    lengths: list[int] = []
    empty = 0
    for batch in _batches(itertools.chain.from_iterable(documents(share, options) for share in part)):
        for document, (tokens, loss) in zip(batch, encoder.encode(batch), strict=True):
            if document.begins and document.ends and not len(tokens):
                empty += 1
                continue
            if document.begins or not lengths:
                lengths.append(0)
            lengths[-1] += len(tokens)
            found.append(tokens)
            if options.chat:
                losses.append(loss)
    return Tokens(np.concatenate(found), np.array(lengths, np.int64), np.concatenate(losses), empty)


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


# Of a process of the pool.
_work: tuple[Store, Options, Encoder]


def _begin(store: Store, options: Options) -> None:
    """Prepares a process of the pool: the tokenizer is read once, and the process ends with its parent."""
    global _work  # noqa: PLW0603
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = store, options, Encoder(options)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _do(number: int, part: Sequence[Part]) -> None:
    store, options, encoder = _work
    store.write(number, tokens_of(part, options, encoder))
