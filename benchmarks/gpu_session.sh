#!/usr/bin/env bash
# Builds, checks and measures this tree on a machine with an NVIDIA GPU, without a package registry.
#
#   [CALL=1 | STEPS="kernels memory"] [EXTENSION=FILE] [NCCL_LIBRARY=FILE] benchmarks/gpu_session.sh OUTPUT_FOLDER
#
# CALL=1, 2 or 3 are the steps in three calls, none of which takes more than nine minutes on 16 cores:
#
#   1  machine build nccl pipelines     every schedule over two and four ranks, groups formed lazily and eagerly
#   2  machine build nccl parallel beside kernels     tensor, context, expert and data parallelism over torch's
#      communicators and the package's; FSDP2 beside them for 30 steps; attention, float8, grouped products, graphs
#   3  machine build tests sanitizer attention memory host_time     every op on this GPU; speed
#
# Other steps: training (checkpoints, Muon and offload over two ranks), compile, models, overlap, graphs (steps eager,
# replayed, with replayed layers). Any can be named in STEPS instead, and NAME_LIMIT sets the seconds of one
# (MACHINE_LIMIT, ...). A step that fails or exceeds its limit does not keep the next from running; the exit status is
# then 1.
#
# Ranks of the first two calls are processes on one GPU, which NCCL allows from 2.30 on. Where torch has an older one,
# NCCL_SOURCE names an archive of its sources (github.com/NVIDIA/nccl, 1.4 MB), which the step nccl builds for this GPU
# alone, or NCCL_LIBRARY a libnccl.so.2: on two cores without a GPU that build takes 13 minutes. Without either these
# proofs fail and say so. EXTENSION names a parallel_ops/_C.abi3.so of these sources, which runs with every Python and
# torch that the package does; compiling it took more than two minutes on 16 cores, where BUILD_LIMIT must be raised.
#
# Needs python3 (3.10 or later) with torch, triton, setuptools, pytest, pytest-xdist, hypothesis, pydantic, rich, typer,
# and transformers, and a C++ compiler. The package is installed into BUILD_FOLDER (build/gpu_session), where a
# later call finds it as long as the sources are the same; the Python installation stays as it is. With DEVICE=cpu all
# steps but those of the GPU alone run over gloo.
#
# OUTPUT_FOLDER gets summary.txt, which ends with a table of how each step ended, and results.tar.gz, of at most 8 MB, with
# one log a step and the CSV files. `python -m benchmarks.gpu_session.status proofs.csv` enters what was proven into
# docs/gpu/status.md. Where the tree is not a git checkout, set PARALLEL_OPS_COMMIT to the commit that the results should
# carry. PYTHON, and PROCESSES (14) of the tests, can be set too.
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
device=${DEVICE:-cuda}
case ${CALL-} in
  "") steps=${STEPS-machine build nccl pipelines parallel beside kernels tests sanitizer attention memory host_time} ;;
  1) steps="machine build nccl pipelines" ;;
  2) steps="machine build nccl parallel beside kernels" ;;
  3) steps="machine build tests sanitizer attention memory host_time" ;;
  *)
    echo "CALL must be 1, 2 or 3, got $CALL" >&2
    exit 2
    ;;
esac
# Seconds of a step. With ten more for one that has to be killed, those of a call add up to at most 540.
declare -A limits=(
  [machine]=20 [build]=90 [nccl]=150 [pipelines]=240
  [parallel]=90 [training]=60 [beside]=70 [kernels]=60
  [tests]=170 [sanitizer]=40 [attention]=80 [memory]=40 [host_time]=30
  [compile]=100 [models]=110 [overlap]=50 [graphs]=60
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

install_beside() {
  # A built extension, and the NCCL binding, which is for one version of Python.
  local names suffix
  names=$("$python" -c 'import sysconfig as s, pybind11; print("-I" + s.get_path("include"), "-I" + pybind11.get_include())')
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  mkdir -p "$site" && tar -c --exclude='*.so' --exclude=__pycache__ parallel_ops | tar -x -C "$site" &&
    tar -c --exclude=__pycache__ triton_kernels | tar -x -C "$site/parallel_ops" &&
    cp "$EXTENSION" "$site/parallel_ops/_C.abi3.so" &&
    # shellcheck disable=SC2086
    "${CXX:-c++}" -shared -fPIC -O1 -std=c++17 -fvisibility=hidden $names csrc/nccl/*.cpp -ldl \
      -o "$site/parallel_ops/_nccl$suffix"
}

install_package() {
  # A copy, so that no build files are left in the tree; without the bytecode and binaries of another machine.
  local digest source="$build/source"
  digest=$(sources 2>&1 | sha256sum)
  if [[ -d $site && "$(cat "$site.digest" 2>/dev/null)" == "$digest" ]]; then
    echo "as built before"
    return
  fi
  rm -rf "$site" "$site.digest" "$source"
  if [[ -n ${EXTENSION-} ]]; then
    install_beside && echo "$digest" >"$site.digest"
    return
  fi
  mkdir -p "$source" &&
    tar -c --exclude=.git --exclude=.venv --exclude=./build --exclude='*.so' --exclude=__pycache__ \
      --exclude='*.egg-info' . | tar -x -C "$source" &&
    (cd "$source" && "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --no-compile \
      --target "$site" .) &&
    echo "$digest" >"$site.digest"
}

nccl_library="$build/nccl/lib/libnccl.so.2"
build_nccl() {
  # Only what torch and this package call, by rings, for the GPU of this machine: a tenth of the whole.
  local source="$build/nccl/source" functions
  if [[ -e $nccl_library ]]; then
    echo "as built before"
    return
  fi
  mkdir -p "$source" "${nccl_library%/*}" || return
  if [[ -n ${NCCL_LIBRARY-} ]]; then
    cp "$NCCL_LIBRARY" "$nccl_library"
    return
  fi
  if [[ -z ${NCCL_SOURCE-} ]]; then
    "$python" -c 'import sys, torch; v = torch.cuda.nccl.version(); print(v); sys.exit(v < (2, 30))' ||
      { echo "this NCCL has no several ranks on a GPU: set NCCL_SOURCE or NCCL_LIBRARY" && return 1; }
    return
  fi
  functions="SendRecv|(AllGather|Broadcast) RING *|ReduceScatter (Sum|PreMulSum) (f32|bf16) RING *"
  functions+="|AllReduce (Sum|MinMax|PreMulSum) (f32|bf16|f64|i32|i64|u8) RING *"
  tar -xzf "$NCCL_SOURCE" -C "$source" &&
    make -C "$source" -j "$MAX_JOBS" src.build BUILDDIR="$build/nccl" ONLY_FUNCS="$functions" \
      NVCC_GENCODE="-gencode=arch=compute_${NCCL_ARCH:-90},code=sm_${NCCL_ARCH:-90}"
}
export -f install_package install_beside sources build_nccl
export python tree build site nccl_library MAX_JOBS="${MAX_JOBS:-$(nproc)}"

# The installed package comes first: the source tree has no compiled extension, and must not hide the one that has.
export PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
export PYTHONPATH="$site:$tree${PYTHONPATH:+:$PYTHONPATH}"

# Ops bound by memory; of those that torch.compile is measured on, the ones that models spend most time in come first.
memory_ops=(rms_norm layer_norm bias_gelu bias_swiglu silu_mul bias_dropout_add rotary_embedding vocab_parallel_cross_entropy
  scaled_causal_softmax scaled_masked_softmax route permute)
compiled_ops=(rms_norm bias_swiglu vocab_parallel_cross_entropy bias_dropout_add layer_norm scaled_causal_softmax)
# proofs PART: its proofs, over several ranks that share the GPU
proofs() {
  local preload=()
  [[ ! -e $nccl_library ]] || preload=(LD_PRELOAD="$nccl_library" NCCL_ALGO=RING)
  step "$1" env NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=8 "${preload[@]}" \
    "$python" -m benchmarks.gpu_session.prove "$1" --device "$device" --output "$output"
}

for name in $steps; do
  case $name in
    machine) step machine bash -c 'nvidia-smi; PYTHONPATH= "$python" -m torch.utils.collect_env' ;;
    build) step build bash -c install_package ;;
    nccl) step nccl bash -c build_nccl ;;
    pipelines | parallel | training | beside | kernels | tests) proofs "$name" ;;
    sanitizer)  # accesses out of bounds; races in shared memory
      step sanitizer bash -c '
        check="compute-sanitizer --error-exitcode 9 --tool" test="-m pytest -q -x -p no:cacheprovider -n 0"
        $check memcheck "$python" $test -k "cuda and large_tensor and bias_gelu" tests/ops/test_promises.py
        bounds=$?
        $check racecheck "$python" $test -k "cuda and any_order and softcap and adjacent" tests/ops/attention/test_block.py && exit $bounds'
      ;;
    attention)
      step attention bash -c '"$python" -m benchmarks.gpu_session.attention_choice; status=$?
        "$python" -m benchmarks flash_attention --device cuda --dtype bfloat16 --no-composites --output "$0" &&
          exit $status' "$output"
      ;;
    memory)
      step memory "$python" -m benchmarks "${memory_ops[@]}" --device cuda --dtype bfloat16 --shapes 2 --no-composites \
        --replay --output "$output"
      ;;
    host_time) step host_time "$python" -m benchmarks host_time --device cuda --rounds 50 --output "$output" ;;
    compile)
      step compile "$python" -m benchmarks "${compiled_ops[@]}" --device cuda --dtype bfloat16 --shapes 2 \
        --output "$output"
      ;;
    models)
      step models "$python" -m benchmarks huggingface --large --dtype bfloat16 --batch 2 --compiled --liger
      ;;
    graphs)
      step graphs "$python" -m benchmarks.gpu_session.prove kernels --only captured --device "$device" --output "$output"
      ;;
    overlap) step overlap "$python" -m benchmarks overlap --device cuda --model llama-70b --output "$output" ;;
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
  tar -C "$folder" -czf "$output/results.tar.gz" .
  rm -rf "$folder"
}
pack 1000000
[[ $(stat -c %s "$output/results.tar.gz") -le 8000000 ]] || pack 50000
find "$output" -maxdepth 1 -type f ! -name summary.txt ! -name results.tar.gz -delete
printf '%s\n' "" "${verdicts[@]}" | tee -a "$output/summary.txt"
exit "$failed"
