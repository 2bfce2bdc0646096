#!/bin/sh
# Check and measure on a GPU, in at most ten minutes, what docs/benchmarks.md says of one.
#
#   sh benchmarks/gpu.sh OUT.md          on a CUDA GPU, with medfedaug and pytest installed
#   sh benchmarks/gpu.sh OUT.md cpu      the same without one, at sizes that measure nothing: does everything run?
#
# OUT.md has one section for each script, from which the tables of the page are made. A machine whose torch brings
# no Triton needs `pip install --no-deps triton`.
out=${1:?name a file to write}
device=${2:-cuda}
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python}
failed=0

part() { # SECONDS TITLE COMMAND...
  seconds=$1 title=$2
  shift 2
  printf '\n## %s\n\n```\n' "$title" >>"$out"
  [ "$device" = cuda ] || seconds=1800
  timeout "$seconds" "$@" >>"$out" 2>&1
  code=$?
  printf '```\n\nexit code %s\n' "$code" >>"$out"
  [ "$code" -eq 0 ] || failed=1
}

if [ "$device" = cuda ]; then
  kernels= few= layer= unet= step= types=
else
  kernels=1 few="--repeats 1" layer=--tiny types=--tiny
  unet="--network default --batch 2 --size 32" step="--batch 2 --size 32"
fi
printf '# Measured on %s\n' "$device" >"$out"
part 20 "Versions" "$python" -c "import torch; print(torch.__version__, torch.version.cuda)
from importlib.metadata import version; print('triton', version('triton'))"
TRITON_INTERPRET=$kernels part 120 "Kernels against float64" "$python" -m pytest -q --noconftest tests/functional/kernel_cases.py
# shellcheck disable=SC2086  the options are words
{
  part 80 "FFA layer" "$python" benchmarks/ffa_layer.py --device "$device" ${few:---repeats 20} $layer
  part 80 "Steps of FedFD, FedFD-A and FRAug" "$python" benchmarks/fedfd_step.py --device "$device" ${few:---repeats 20} $step
  part 80 "Steps of a U-Net" "$python" benchmarks/unet_step.py --device "$device" ${few:---repeats 20} $unet
  part 40 "Precision" "$python" benchmarks/precision.py --device "$device" ${few:---repeats 20} $types
}
if [ "$device" = cuda ]; then
  part 50 "Waits" "$python" benchmarks/pretended_gpu.py --device cuda --methods fedavg fedfa fedfd fedfd_a fraug
  part 120 "Graphs" "$python" benchmarks/step_graphs.py --device cuda --methods fedavg fedfa+ fedfd fedfd_a fraug scaffold
else
  part 60 "Waits" "$python" benchmarks/pretended_gpu.py --methods fedfd_a
  part 120 "Graphs" "$python" benchmarks/step_graphs.py --methods fedfa+
fi
exit "$failed"
