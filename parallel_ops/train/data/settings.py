"""The sections ``[data]`` and ``[evaluation]``."""

from typing import Annotated, Literal

from pydantic import Field

from parallel_ops.train.settings.section import Count, Pattern, Positive, Section


class SourceSettings(Section):
    """A source of a mixture; see ``train.data.mixture``.

    Attributes:
        paths: Paths, as in ``data.paths``.
        weight: Share of the samples, relative to the weights of the other sources.
    """

    paths: Annotated[tuple[Pattern, ...], Field(strict=False, min_length=1)]
    weight: Annotated[float, Field(gt=0)]


class DataSettings(Section):
    """The training data; see ``train.data.tokens`` and ``train.data.packing``.

    Attributes:
        paths: Token files, folders of them, patterns such as ``"data/*.bin"``, or folders of Hugging Face datasets; or
        sources: several of them by weight, each a table with ``paths`` and ``weight``.
        column: Column of a dataset with the tokens of a document.
        ignore: Columns of datasets that are left out, of those that would otherwise be refused.
        dtype: NumPy dtype of raw tokens.
        eos_id: Last token of each document, for files without an index of documents.
        seq_length: Tokens in a sequence; the model's by default.
        document_mask: Restrict attention to tokens of the same document.
        shuffle: Shuffle the sequences by seed and epoch; otherwise they keep their order in the packed documents.
        packing: ``"concatenate"`` cuts the concatenated documents into sequences; ``"best_fit"`` cuts only documents
            that are longer than a sequence, and fills up sequences with padding.
        prompt_loss: Count all tokens in the loss, those too that a file's mask leaves out, as of prompts.
        growing: Files are added to the folders of ``paths`` while the run goes on; see ``train.data.growing``.
    """

    paths: Annotated[tuple[Pattern, ...], Field(strict=False, min_length=1)] = ()
    sources: Annotated[tuple[SourceSettings, ...], Field(strict=False, min_length=1)] = ()
    column: str = "input_ids"
    ignore: Annotated[tuple[str, ...], Field(strict=False)] = ()
    dtype: Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"] = "uint16"
    eos_id: Count | None = None
    seq_length: Positive | None = None
    document_mask: bool = False
    shuffle: bool = True
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    prompt_loss: bool = False
    growing: bool = False


class EvaluationSettings(Section):
    """Evaluation on data that is not trained on: the mean loss, without dropout; see ``train.step.evaluation``.

    Attributes:
        paths: Paths, as in ``data.paths``, of the same format; or
        share: the last share of the tokens of ``data.paths``, which is then not trained on.
        interval: Steps between two evaluations; 0 evaluates after the last step only.
        sequences: Sequences that are evaluated, the first of the data; ``"none"`` for all.
    """

    paths: Annotated[tuple[Pattern, ...], Field(strict=False)] = ()
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    interval: Count = 0
    sequences: Positive | None = None
