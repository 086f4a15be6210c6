"""Describes a checkpoint, a folder of checkpoints or a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from parallel_ops.models import Transformer, config_from_pretrained
from parallel_ops.models.huggingface.tensor_files import CONFIG
from parallel_ops.train.checkpoint import checkpoints
from parallel_ops.train.checkpoint.checkpoints import CheckpointError
from parallel_ops.train.checkpoint.description import best_in, problem_of, read_description, steps_in
from parallel_ops.train.checkpoint.export import config_of
from parallel_ops.train.report.description import parameters_of


def inspect(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """Describes ``path`` in plain values.

    Args:
        verify: Read all files of a checkpoint and compare their checksums; otherwise their sizes.

    Raises:
        CheckpointError: A file of the checkpoint is missing or damaged, or there is no checkpoint.
        FileNotFoundError: ``path`` does not exist. ValueError: A config.json is not supported.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if (path / CONFIG).exists():
        return _of_folder(path)
    source = checkpoints.newest(path)
    description, sums = read_description(source)
    for name, (size, wanted) in sums.items():
        if problem := problem_of(source / name, size, wanted if verify else None):
            raise CheckpointError(problem)
    rest = description.rest
    found: dict[str, Any] = {
        "kind": "checkpoint",
        "path": str(source),
        "step": description.step,
        "samples_seen": description.samples_seen,
        "files": len(sums),
        "bytes": sum(size for size, _ in sums.values()),
        "verified": verify,
        "plan": rest.get("plan") or "one rank",
        "dtype": rest.get("dtype"),
        "evaluation_loss": rest.get("evaluation_loss"),
        "origin": rest.get("origin"),
        "model": description.model,
        "data": description.data,
        "settings": rest.get("settings"),
    }
    if "class" not in description.model:
        found["parameters"] = parameters_of(config_of(source, description))
    if source != path:
        best = best_in(path)
        found["checkpoints"] = {str(step): str(own) for step, own in sorted(steps_in(path).items())}
        found["best"] = None if best is None else str(best[1])
    return found


def described(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels and contents of what ``inspect`` returns."""
    size = f"{found['bytes'] / 1e9:,.3f} GB in {found['files']} files"
    model = {name: value for name, value in found["model"].items() if value is not None}
    parameters = f"{found['parameters']:,} parameters: " if "parameters" in found else ""
    shape = ", ".join(f"{name} {_plain(value)}" for name, value in model.items())
    if found["kind"] == "model":
        return [
            ("path", f"{found['path']}, a Hugging Face folder of {found['model_type']}"), ("size", size),
            ("model", parameters + shape),
        ]  # fmt: skip
    data = dict(found["data"])
    if isinstance(parts := data.pop("growing", None), list):
        data["growing"] = f"{sum(len(part) for part in parts)} files in {len(parts)} parts"
    lines = [
        ("path", f"{found['path']}, a checkpoint of the trainer"),
        ("step", f"{found['step']:,}, {found['samples_seen']:,} samples seen"),
        ("size", f"{size}{', checksums right' if found['verified'] else ''}"),
        ("model", parameters + shape),
        ("plan", f"{found['plan']}, any other resumes from it"),
        ("data", ", ".join(f"{name} {_plain(value)}" for name, value in data.items())),
    ]
    if found["evaluation_loss"] is not None:
        lines += [("evaluation", f"loss {found['evaluation_loss']:.4f}")]
    if found["origin"]:
        lines += [("origin", str(found["origin"]))]
    for name, section in (found["settings"] or {}).items():
        if name != "model" and isinstance(section, dict):
            lines += [(f"[{name}]", ", ".join(f"{key} = {_plain(value)}" for key, value in section.items()))]
    if "checkpoints" in found:
        best = f"; the best is {found['best']}" if found["best"] else ""
        lines += [("others", f"steps {', '.join(found['checkpoints'])}{best}")]
    return lines


def _of_folder(path: Path) -> dict[str, Any]:
    config = config_from_pretrained(path)
    Transformer.check_pretrained(path, config)
    files = sorted(path.glob("*.safetensors"))
    options = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    return {
        "kind": "model",
        "path": str(path),
        "model_type": options.get("model_type"),
        "dtype": options.get("torch_dtype") or options.get("dtype"),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "parameters": parameters_of(config),
        "model": {name: value for name, value in vars(config).items() if value is not None},
    }


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
