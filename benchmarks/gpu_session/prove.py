"""``python -m benchmarks.gpu_session.prove PART... --output FOLDER``: runs proofs and keeps a row of each.

Proofs with the same number of ranks and variables run one after another in the same processes. One that takes too
long is killed with them, and the next has new ones. Exits with 1 if one failed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu_session.proofs import Proof, proofs
from benchmarks.harness import results
from benchmarks.harness.environment import Environment, describe
from benchmarks.harness.processes import Processes

PASSED, FAILED, LATE = "passed", "failed", "time limit"


@dataclass(frozen=True, kw_only=True)
class Proven(Environment):
    """One proof on one machine; ``result`` is ``PASSED``, ``FAILED`` or ``LATE``."""

    proof: str
    result: str
    seconds: float
    nccl: str
    detail: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.proof, self.device


def run(proof: Proof, processes: Processes, kind: str, patience: float = 1.0) -> tuple[str, str]:
    """The result of a proof, and why it failed; ``patience`` is a factor of its time limit."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.run(
                proof.run, kind, str(Path(folder, "store")), *proof.arguments, seconds=proof.seconds * patience
            )
        except TimeoutError as error:
            return LATE, str(error)
        except RuntimeError as error:
            return FAILED, str(error)
    return PASSED, ""


def _nccl(kind: str) -> str:
    """The version of the library that is loaded, which may not be the one that torch was built with."""
    if kind != "cuda":
        return ""
    from parallel_ops.comm.nccl.library import load_nccl  # needs the binding

    return load_nccl().version


def main(arguments: Sequence[str] | None = None) -> int:
    every = proofs()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=sorted({proof.part for proof in every.values()}))
    parser.add_argument("--output", type=Path, required=True, help="the folder of the rows, proofs.csv")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="proofs whose name contains this")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of each proof's time limit")
    given = parser.parse_args(arguments)
    chosen = [p for part in given.parts for p in every.values() if p.part == part and given.only in p.name]
    environment, rows, processes = asdict(describe(torch.device(given.device))), list[Proven](), None
    for proof in chosen:
        if processes is None or proof.alone or not processes.serve(proof.processes, proof.environment):
            if processes is not None:
                processes.close()
            processes = Processes(proof.processes, proof.environment)
        start = time.monotonic()
        result, detail = run(proof, processes, given.device, given.patience)
        seconds = round(time.monotonic() - start, 1)
        print(f"{result:10} {seconds:5.1f} s  {proof.name}  {detail}", flush=True)
        row = Proven(
            proof=proof.name, result=result, seconds=seconds, nccl=_nccl(given.device), detail=detail[:500],
            **environment,
        )  # fmt: skip
        rows.append(row)
        results.merge(given.output / "proofs.csv", [row])
    if processes is not None:
        processes.close()
    passed = sum(row.result == PASSED for row in rows)
    print(f"{passed} of {len(rows)} proofs passed")
    return int(passed < len(rows))


if __name__ == "__main__":
    sys.exit(main())
