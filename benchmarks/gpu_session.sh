#!/usr/bin/env bash
# Builds, checks and measures this tree on a machine with an NVIDIA GPU, without a package registry.
#
#   [CALL=1 | STEPS="correct attention"] benchmarks/gpu_session.sh OUTPUT_FOLDER
#
# CALL=1, 2 or 3 are the steps in three calls, none of which takes more than nine minutes on 16 cores:
#
#   1  machine build correct attention memory   what is there; is every op right; attention in TFLOP/s; the others beside clone
#   2  machine build tests host_time capture counters    the test suite; the host's time; a step in a CUDA graph; ncu
#   3  machine build compile models overlap one_stream symmetric    beside torch.compile; a Llama; what overlaps, with
#      several hardware queues and with one; symmetric memory
#
# Any of these steps can be named in STEPS instead, and NAME_LIMIT sets the seconds of one (MACHINE_LIMIT, ...). A step that
# fails or exceeds its limit does not keep the next from running; the exit status is then 1.
#
# Needs python3 (3.10 or later) with torch, triton, setuptools, pytest, pytest-xdist, hypothesis, rich, typer, matplotlib
# and transformers, and a C++ compiler. The package is installed into BUILD_FOLDER (build/gpu_session), where a later call
# finds it as long as the sources are the same; the Python installation stays as it is.
#
# OUTPUT_FOLDER gets summary.txt, which ends with a table of how each step ended, and results.tar.gz, of at most 8 MB, with
# one log a step and the CSV files. `python -m benchmarks.gpu_model --measured FOLDER` shows those beside its predictions.
# Where the tree is not a git checkout, set PARALLEL_OPS_COMMIT to the commit that the results should carry. PYTHON, and
# PROCESSES (14) of the steps that run cases beside each other, can be set too.
set -uo pipefail

if [[ $# -ne 1 ]]; then
  echo "usage: $0 OUTPUT_FOLDER" >&2
  exit 2
fi
mkdir -p "$1" || exit 2
output=$(cd "$1" && pwd)
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
processes=${PROCESSES:-14}
cd "$tree" || exit 2
case ${CALL-} in
  "") steps=${STEPS-machine build correct attention memory tests host_time capture counters compile models overlap one_stream symmetric} ;;
  1) steps="machine build correct attention memory" ;;
  2) steps="machine build tests host_time capture counters" ;;
  3) steps="machine build compile models overlap one_stream symmetric" ;;
  *)
    echo "CALL must be 1, 2 or 3, got $CALL" >&2
    exit 2
    ;;
esac
# Seconds of a step. With ten more for one that has to be killed, those of a call add up to at most 540.
declare -A limits=(
  [machine]=30 [build]=110 [correct]=120 [attention]=110 [memory]=110
  [tests]=210 [host_time]=30 [capture]=30 [counters]=60
  [compile]=100 [models]=110 [overlap]=50 [one_stream]=30 [symmetric]=40
)
failed=0
verdicts=()
: >"$output/summary.txt"

# step NAME COMMAND...
step() {
  local name=$1 start=$SECONDS status=0 limit=${1^^}_LIMIT
  limit=${!limit:-${limits[$name]}}
  shift
  echo "== $name" | tee -a "$output/summary.txt"
  timeout --kill-after=10 "$limit" "$@" >"$output/$name.log" 2>&1 || status=$?
  [[ $status -eq 0 ]] || failed=1
  tail -n 40 "$output/$name.log" | tee -a "$output/summary.txt"
  local verdict="passed"
  [[ $status -eq 0 ]] || verdict="FAILED, exit $status"
  [[ $status -ne 124 && $status -ne 137 ]] || verdict="TIME LIMIT of $limit s"
  verdicts+=("$(printf '%-12s %4d s  %s' "$name" $((SECONDS - start)) "$verdict")")
  echo "== ${verdicts[-1]}" | tee -a "$output/summary.txt"
}

build=${BUILD_FOLDER:-$tree/build/gpu_session}
site="$build/site"
sources() {
  find csrc parallel_ops triton_kernels setup.py pyproject.toml -type f ! -name '*.so' ! -name '*.pyc' -print0 |
    sort -z | xargs -0 sha256sum
  "$python" --version
}

install_package() {
  # A copy, so that no build files are left in the tree; without the bytecode and binaries of another machine.
  local digest source="$build/source"
  digest=$(sources 2>&1 | sha256sum)
  if [[ -d $site && "$(cat "$site.digest" 2>/dev/null)" == "$digest" ]]; then
    echo "as built before"
    return
  fi
  rm -rf "$site" "$site.digest" "$source" && mkdir -p "$source" &&
    tar -c --exclude=.git --exclude=.venv --exclude=./build --exclude='*.so' --exclude=__pycache__ \
      --exclude='*.egg-info' . | tar -x -C "$source" &&
    (cd "$source" && "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --no-compile \
      --target "$site" .) &&
    echo "$digest" >"$site.digest"
}
export -f install_package sources
export python tree build site MAX_JOBS="${MAX_JOBS:-$(nproc)}"

# The installed package comes first: the source tree has no compiled extension, and must not hide the one that has.
export PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
export PYTHONPATH="$site:$tree${PYTHONPATH:+:$PYTHONPATH}"

# Ops bound by memory; of those that torch.compile is measured on, the ones that models spend most time in come first.
memory_ops=(rms_norm layer_norm bias_gelu bias_swiglu silu_mul bias_dropout_add rotary_embedding vocab_parallel_cross_entropy
  scaled_causal_softmax scaled_masked_softmax route permute)
compiled_ops=(rms_norm bias_swiglu vocab_parallel_cross_entropy bias_dropout_add layer_norm scaled_causal_softmax)
# Of the tests over process groups those that a single GPU can run.
device_tests=(tests/ops tests/tensor_parallel/test_linear_cross_entropy.py tests/tensor_parallel/test_parallel_linears.py
  tests/comm/nccl/test_gpu.py tests/benchmarks/test_simulated_link.py
  tests/kernels/test_launch.py tests/kernels/test_finish.py)

for name in $steps; do
  case $name in
    machine) step machine bash -c 'nvidia-smi; PYTHONPATH=$tree "$python" -m benchmarks.gpu_session.machine' ;;
    build) step build bash -c install_package ;;
    correct) step correct "$python" -m benchmarks.gpu_session.correct --processes "$processes" --sanitizer-limit 40 ;;
    attention)
      step attention bash -c '"$python" -m benchmarks.attention_choice; status=$?
        "$python" -m benchmarks.gpu_session.attention "$0" && exit $status' "$output"
      ;;
    memory)
      step memory "$python" -m benchmarks "${memory_ops[@]}" --device cuda --dtype bfloat16 --shapes 2 --no-composites \
        --replay --output "$output"
      ;;
    tests)
      # Processes beside each other: most of the time goes into compiling kernels.
      step tests "$python" -m pytest -q -p no:cacheprovider -n "$processes" --tb=short -k "cuda or gpu or bounds or named" \
        "${device_tests[@]}"
      ;;
    host_time) step host_time "$python" -m benchmarks host_time --device cuda --rounds 50 --output "$output" ;;
    capture) step capture "$python" -m benchmarks.gpu_session.capture ;;
    counters) step counters "$python" -m benchmarks.gpu_session.counters "$output" ;;
    compile)
      step compile "$python" -m benchmarks "${compiled_ops[@]}" --device cuda --dtype bfloat16 --shapes 2 \
        --output "$output"
      ;;
    models)
      step models "$python" -m benchmarks huggingface --large --dtype bfloat16 --batch 2 --compiled --liger
      ;;
    overlap) step overlap "$python" -m benchmarks overlap --device cuda --model llama-70b --output "$output" ;;
    one_stream)  # its table is in the log; two streams need several hardware queues
      CUDA_DEVICE_MAX_CONNECTIONS=1 step one_stream "$python" -m benchmarks overlap --device cuda --model llama-70b \
        --link 370 --quick --output "$(mktemp -d)"
      ;;
    symmetric) step symmetric "$python" -m benchmarks.gpu_session.pulls ;;  # two processes on one GPU
    *)
      echo "unknown step $name" >&2
      failed=1
      ;;
  esac
done

# pack LOG_BYTES: everything but the summary in one file, of each log the end.
pack() {
  local log folder
  folder=$(mktemp -d) || return
  find "$output" -maxdepth 1 -type f ! -name summary.txt ! -name results.tar.gz ! -name '*.log' \
    -exec cp -t "$folder" {} +
  for log in "$output"/*.log; do
    [[ -e $log ]] && tail -c "$1" "$log" >"$folder/$(basename "$log")"
  done
  [[ $1 -gt 100000 ]] || rm -f "$folder"/*.png
  tar -C "$folder" -czf "$output/results.tar.gz" .
  rm -rf "$folder"
}
pack 1000000
[[ $(stat -c %s "$output/results.tar.gz") -le 8000000 ]] || pack 50000
find "$output" -maxdepth 1 -type f ! -name summary.txt ! -name results.tar.gz -delete
printf '%s\n' "" "${verdicts[@]}" | tee -a "$output/summary.txt"
exit "$failed"
