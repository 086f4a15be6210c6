#!/usr/bin/env bash
# Builds, tests and benchmarks this tree on a machine with an NVIDIA GPU, without a package registry.
#
#   [STEPS="tests overlap"] benchmarks/gpu_session.sh OUTPUT_FOLDER [--quick | other arguments of python -m benchmarks]
#
# Needs python3 (3.11 or later) with torch, triton, setuptools, pytest, hypothesis, rich, typer and matplotlib, and a
# C++ compiler.
# The package is installed into a temporary folder; the tree and the Python installation stay as they are.
# OUTPUT_FOLDER gets summary.txt, one log a step, the CSV file and the charts. A step that fails or exceeds its time
# limit does not keep the next from running; the exit status is then 1. Where the tree is not a git checkout, set
# PARALLEL_OPS_COMMIT to the commit that the results should carry. PYTHON can be set too, STEPS to some of "tests overlap
# benchmarks" (all by default; the first two, or the last alone, stay under ten minutes), and in seconds BUILD_LIMIT,
# TEST_LIMIT, OVERLAP_LIMIT and BENCHMARK_LIMIT.
set -uo pipefail

if [[ $# -lt 1 ]]; then
  echo "usage: $0 OUTPUT_FOLDER [arguments of python -m benchmarks]" >&2
  exit 2
fi
mkdir -p "$1" || exit 2
output=$(cd "$1" && pwd)
shift
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
cd "$tree" || exit 2
failed=0
: >"$output/summary.txt"

# wanted NAME: is the step among those asked for?
wanted() { [[ " ${STEPS-tests overlap benchmarks} " == *" $1 "* ]]; }

# step NAME LIMIT_SECONDS COMMAND...
step() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  echo "== $name" | tee -a "$output/summary.txt"
  timeout --kill-after=10 "$limit" "$@" >"$output/$name.log" 2>&1 || status=$?
  [[ $status -eq 0 ]] || failed=1
  tail -n "${TAIL_LINES:-25}" "$output/$name.log" | tee -a "$output/summary.txt"
  echo "== $name: exit $status after $((SECONDS - start)) s" | tee -a "$output/summary.txt"
}

install_package() {
  # A copy, so that no build files are left in the tree; without the bytecode and binaries of another machine.
  mkdir "$scratch/source" &&
    tar -c --exclude=.git --exclude=build --exclude='*.so' --exclude=__pycache__ --exclude='*.egg-info' . |
    tar -x -C "$scratch/source" &&
    cd "$scratch/source" &&
    "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --no-compile \
      --target "$scratch/site" .
}
export -f install_package
export python scratch

TAIL_LINES=20 step machine 20 bash -c 'nvidia-smi; "$python" -c "
import sys, torch, triton
print(\"python\", sys.version.split()[0], \"torch\", torch.__version__, \"triton\", triton.__version__)
print(torch.cuda.get_device_name(), \"driver sees\", torch.cuda.device_count(), \"GPU\")"'
step build "${BUILD_LIMIT:-90}" bash -c install_package

# The installed package comes first: the source tree has no compiled extension, and must not hide the one that has.
export PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
export PYTHONPATH="$scratch/site:$tree${PYTHONPATH:+:$PYTHONPATH}"
# Of the tests over process groups those that a single GPU can run.
device_tests=(tests/tensor_parallel/test_linear_cross_entropy.py tests/tensor_parallel/test_parallel_linears.py
  tests/comm/test_capture.py tests/benchmarks/test_simulated_link.py tests/comm/transport/test_stream_signal.py tests/kernels/test_launch.py)
if wanted tests; then
  step tests "${TEST_LIMIT:-170}" "$python" -m pytest -q -p no:cacheprovider tests/ops
  step device_tests "${TEST_LIMIT:-170}" "$python" -m pytest -q -p no:cacheprovider -k "cuda or gpu" "${device_tests[@]}"
fi
if wanted overlap; then
  TAIL_LINES=60 step overlap "${OVERLAP_LIMIT:-120}" "$python" -m benchmarks.bench_overlap --device cuda --output "$output"
fi
if wanted benchmarks; then
  TAIL_LINES=250 step benchmarks "${BENCHMARK_LIMIT:-460}" "$python" -m benchmarks --device cuda --output "$output" "$@"
fi

exit "$failed"
