"""Arguments of the commands: models and clusters by name or file, batches, plans, search options."""

import math
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from parallel_ops._internal.files import read_json, read_toml
from parallel_ops.planner import presets
from parallel_ops.planner.checks import unknown
from parallel_ops.planner.cli.huggingface_config import is_config, model_of
from parallel_ops.planner.cli.pasted import cluster_name, model_name, whole
from parallel_ops.planner.cluster import GPU, Cluster, Interconnect, Part
from parallel_ops.planner.compute.documents import lengths_of, with_lengths
from parallel_ops.planner.export import ExportTarget, find_target
from parallel_ops.planner.field_text import parse_field, parse_fields
from parallel_ops.planner.model import TABLES, Model
from parallel_ops.planner.plan import PLAN_FIELDS, V_SHAPED, Plan
from parallel_ops.planner.precision import FROZEN_BYTES
from parallel_ops.planner.search.options import PLURALS, STATES, SearchOptions, default_options
from parallel_ops.planner.training_run import Phase, TrainingRun


def documents(found: Model, text: str | None) -> Model:
    """``found`` with packed documents of the lengths of ``text``: see ``lengths_of``."""
    if text is None:
        return found
    return with_lengths(found, lengths_of(text, found.seq_length))


def adapters(found: Model, text: str | None) -> Model:
    """``found`` with low-rank adapters that are trained alone: their rank, ``16``, and the format of the frozen weights
    if that is not 16 bits, ``16:nf4``.

    Raises:
        ValueError: no such rank or format.
    """
    if text is None:
        return found
    rank, _, frozen = text.strip().lower().partition(":")
    if not rank.isdecimal() or not int(rank) or frozen not in ("", *FROZEN_BYTES):
        raise ValueError(f"--lora takes the rank of adapters, 16, or 16:nf4 for frozen weights of 4 bits, got {text!r}")
    name = f"{found.name}, adapters of rank {rank}{', frozen ' + frozen if frozen else ''}"
    return replace(found, name=name, lora_rank=int(rank), frozen=frozen or found.frozen)


def model(name: str, sequence: int | None = None) -> Model:
    """The model of a preset's name, of a file with the fields of ``Model``, or of a Hugging Face ``config.json``.

    Args:
        name: preset, as repositories spell it too; a path that ends in ``.json`` or ``.toml``, or a folder with a
            ``config.json``. What had to be assumed about the latter is a warning.
        sequence: tokens of a sequence in place of the model's own.

    Raises:
        ValueError, TypeError: the name is unknown (with the nearest ones), the file has no such model, or the length is
            not positive.
    """
    if Path(name, "config.json").is_file():
        name = str(Path(name, "config.json"))
    if name.endswith((".json", ".toml")):
        data = _read(name)
        if is_config(data):
            title = Path(name).resolve().parent.name if Path(name).name == "config.json" else Path(name).stem
            made, assumed = model_of(data, title, sequence)
            if assumed:
                warnings.warn(f"{name}: assumed {'; '.join(assumed)}", stacklevel=2)
            return made
        for field, kind in TABLES.items():
            if data.get(field) is not None:
                data[field] = _build(kind, data[field], name)
        found = _build(Model, {"name": Path(name).stem, **data}, name)
    else:
        short = name if name.lower() in presets.models() else model_name(name)
        try:
            found = presets.model(short)
        except ValueError as error:
            given = str(error).replace(repr(short), repr(name), 1)
            raise ValueError(f"{given}; of others --model takes a config.json, or the folder with it") from None
    return found if sequence is None else replace(found, seq_length=sequence)


def cluster(name: str, price: float | None = None) -> Cluster:
    """The cluster of a preset's name (``h100x64`` or ``64xH100``), or of a file with the fields of ``Cluster``.

    In the file ``gpu`` is the name of a GPU or the fields of one, ``intra`` and ``inter`` the fields of a link,
    ``constants`` measured efficiencies by name. ``parallel-ops calibrate`` writes such a file.

    Raises:
        ValueError, TypeError: the name is unknown (with the nearest ones), or the file has no such cluster.
    """
    if name.endswith((".json", ".toml")):
        data = _read(name)
        if "parts" in data:
            if not isinstance(parts := data["parts"], list) or not all(isinstance(part, dict) for part in parts):
                raise ValueError(f"{name}: parts must be a list of objects with gpu and gpus, got {parts!r}")
            data["parts"] = tuple(_build(Part, _with_gpu(part, name), name) for part in parts)
        data = _with_gpu(data, name)
        for side in ("intra", "inter"):
            if side in data:
                data[side] = _build(Interconnect, data[side], name)
        if "constants" in data:
            if not isinstance(data["constants"], dict):
                raise ValueError(f"{name}: constants must be a JSON object or a TOML table, got {data['constants']!r}")
            data["constants"] = tuple(sorted(data["constants"].items()))
        data.pop("measured", None)  # what calibrate measured, for people
        found = _build(Cluster, {"name": Path(name).stem, **data}, name)
    else:
        found = presets.cluster(name if name.lower() in presets.clusters() else cluster_name(name))
    return found if price is None else replace(found, price=price)


def _with_gpu(data: dict[str, Any], name: str) -> dict[str, Any]:
    if "gpu" not in data:
        return data
    gpu = data["gpu"]
    return {**data, "gpu": presets.gpu(gpu) if isinstance(gpu, str) else _build(GPU, gpu, name)}


def batch(text: str, sequence: int) -> int:
    """Sequences of one step. A plain number is in sequences, with k or m (2^10 or 2^20) in tokens.

    Raises:
        ValueError: not such a number, or not a whole number of sequences.
    """
    try:
        tokens, unit = whole(text, binary=True)
    except ValueError:
        raise ValueError(f"--batch must be sequences (2048) or tokens (16M), got {text!r}") from None
    if not unit:
        return tokens
    if tokens % sequence:
        raise ValueError(
            f"--batch {text} is {tokens:,} tokens, not a whole number of sequences of {sequence:,}; the nearest "
            f"is --batch {max(1, round(tokens / sequence))}, in sequences"
        )
    return tokens // sequence


def plan(text: str, gpus: int, sequences: int, system: ExportTarget | None = None) -> Plan:
    """A plan from its fields, ``tp=8,pp=16,schedule=interleaved,virtual_stages=2``, or from a file with them.

    Other fields have the defaults of ``Plan``, except: ``dp`` takes the remaining GPUs, ``sequence_parallel`` is on if
    ``tp`` is above 1, V-shaped schedules have two stages per rank, the loss is fused, and the defaults of ``system``.

    Raises:
        ValueError, TypeError: a field is unknown (with the nearest names), a value has the wrong type, sizes do not
            divide the number of GPUs, or the plan is invalid.
    """
    known = {name: default for name, default in PLAN_FIELDS.items() if name != "global_batch"}
    given = _read(text) if text.endswith((".json", ".toml")) else parse_fields(text, "--plan", known)
    for name in given:
        if name not in known:
            raise unknown("field of --plan", name, known)
    for name in ("dp", "tp", "pp", "cp", "ep"):
        if isinstance(size := given.get(name, 1), int) and size < 1:
            raise ValueError(f"--plan: {name} must be at least 1, got {size}")
    if "dp" not in given:
        sizes = [given.get(name, 1) for name in ("tp", "pp", "cp")]
        others = math.prod(size for size in sizes if isinstance(size, int))
        if gpus % others:
            raise ValueError(f"--plan: tp * pp * cp is {others}, which does not divide the {gpus} GPUs of the cluster")
        given["dp"] = gpus // others
    defaults: dict[str, Any] = {"fused_loss": True, "sequence_parallel": given.get("tp", 1) != 1}
    if given.get("schedule") in V_SHAPED:
        defaults["virtual_stages"] = 2
    made = Plan(**{**defaults, **given, "global_batch": sequences})
    return replace(made, **{**system.own(made), **given}) if system else made


def options(cluster: Cluster, system: str | None, only: str | None) -> SearchOptions:
    """Options of a search: plans that ``system`` can run, with the values of ``only``: ``tp=4:8,schedule=1f1b``.

    Raises:
        ValueError, TypeError: the system or a field is unknown (with the nearest names), or a value is invalid.
    """
    if system is not None:
        find_target(system)
    out = replace(default_options(cluster), target=system or "")
    given: dict[str, tuple[Any, ...]] = {}
    known = {name: PLAN_FIELDS[name] for name in PLAN_FIELDS if name not in ("global_batch", "layers_per_chunk")}
    for part in (only or "").split(","):
        if not part.strip():
            continue
        name, equals, values = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise unknown("field of --only", name, known)
        if name in given:
            raise ValueError(f"--only: {name} is given twice; {name}=value:value tries both")
        if not equals:
            raise ValueError(f"--only takes fields as name=value or name=value:value, got {part.strip()!r}")
        given[name] = tuple(parse_field(f"{name}={value}", "--only", known)[1] for value in values.split(":"))
    changes: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, found in given.items():
        for value in found:
            _check_value(name, value)
        option = PLURALS.get(name, name)
        if hasattr(out, option):
            changes[option] = found
        if len(found) == 1 and (name in STATES[1:] or not hasattr(out, option)):
            fixed[name] = found[0]  # also where a system has another default
        elif not hasattr(out, option):
            raise ValueError(f"--only: {name} takes one value, got {':'.join(map(str, found))}")
    dtype = given["dtype"][0] if "dtype" in given else out.base.dtype
    base = replace(out.base, dtype=dtype, tp=fixed.get("expert_tp") or 1)  # a search sets tp, which expert_tp divides
    for dtype in given.get("dtype", ()):
        replace(base, dtype=dtype, **fixed)  # raises for fields that do not go with a dtype
    return replace(out, **changes, base=replace(base, **fixed), fixed=fixed)


def _check_value(name: str, value: Any) -> None:
    """Raises ``ValueError`` for a value that the field cannot have in any plan."""
    if name in ("dp", "dp_replicate", "tp", "pp", "cp", "ep", "virtual_stages", "micro_batch"):
        if value < 1:
            raise ValueError(f"--only: {name} must be at least 1, got {value}")
    elif name == "expert_tp":
        Plan(expert_tp=value, tp=max(1, value))
    elif name == "grad_dtype":
        Plan(grad_dtype=value, dtype="fp16" if value == "fp16" else "bf16")
    elif name != "schedule":
        Plan(**{name: value})
    else:
        Plan(schedule=value, virtual_stages=2 if value in (*V_SHAPED, "interleaved") else 1)


def run(text: str, seq_length: int) -> TrainingRun:
    """A training run: its tokens, ``15T``, or fields, ``tokens=15T,mtbf=50000,checkpoint=30,restart=600``.
    ``phases=4M@4096:252M/8M:2.87T`` is a batch (see ``batch``), tokens of a sequence (``seq_length`` without) and the
    tokens of each phase that comes first.

    Raises:
        ValueError: a field is unknown (with the nearest names) or no such number.
    """
    given: dict[str, Any] = {}
    known = [field.name for field in fields(TrainingRun)]
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            name, value = "tokens", name
        if name not in known:
            raise unknown("field of --run", name, known)
        if name in given:
            raise ValueError(f"--run: {name} is given twice")
        if name == "phases":
            given[name] = tuple(_phase(each, seq_length) for each in value.split("/"))
            continue
        try:
            given[name] = whole(value, binary=False)[0] if name == "tokens" else float(value)
        except ValueError:
            raise ValueError(
                f"--run: {name} must be a number such as {'15T' if name == 'tokens' else 600}, got {value!r}"
            ) from None
    if "tokens" not in given:
        raise ValueError("--run needs the tokens of the run: 15T, or tokens=15T")
    return TrainingRun(**given)


def _phase(text: str, seq_length: int) -> Phase:
    size, _, tokens = text.partition(":")
    size, _, seq = size.partition("@")
    try:
        length, total = int(seq or seq_length), whole(tokens, binary=False)[0]
    except ValueError:
        raise ValueError(f"--run: a phase is BATCH:TOKENS or BATCH@SEQ:TOKENS, as 4M@4096:252M, got {text!r}") from None
    if length < 1:
        raise ValueError(f"--run: tokens of a sequence must be at least 1, got {length}")
    return Phase(tokens=total, batch=batch(size, length), seq_length=length)


def prices(name: str | None) -> dict[str, float]:
    """Prices of a JSON or TOML file: of an hour of each GPU by name, ``kwh``, ``pue``."""
    return _read(name) if name else {}


def _read(name: str) -> dict[str, Any]:
    return read_toml(name) if name.endswith(".toml") else read_json(Path(name))


def _build(kind: Any, data: Any, name: str) -> Any:
    """A dataclass of type ``kind`` from the fields in the file ``name``."""
    if not isinstance(data, dict):
        raise ValueError(f"{name}: {kind.__name__} must be a JSON object or a TOML table, got {data!r}")
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"{name}: {kind.__name__} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    try:
        return kind(**data)
    except TypeError as error:
        # "GPU.__init__() missing 1 required keyword-only argument: 'memory'"
        raise ValueError(f"{name}: {str(error).replace('.__init__()', '')}") from None
