#!/bin/sh
# Check and measure on a GPU, in at most ten minutes, what docs/benchmarks.md says of one.
#
#   sh benchmarks/gpu.sh OUT.md          on a CUDA GPU
#   sh benchmarks/gpu.sh OUT.md cpu      on the pretended device, at sizes that measure nothing: does everything run?
#
# OUT.md has the hardware and a section for each script, from which the tables of the page are made. It runs in a
# checkout, and needs PyTorch, Triton, MONAI, NiBabel, pydantic, pydicom, SimpleITK, SciPy, PyYAML, Pillow,
# Matplotlib, cryptography and pytest, but neither NVFlare nor Typer. LGG=FOLDER names the volumes of TCGA-LGG;
# without them phantoms of their size stand in. PYTHON names the interpreter.
out=${1:?name a file to write}
device=${2:-cuda}
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=

part() { # SECONDS TITLE COMMAND...
  seconds=$1 title=$2
  shift 2
  started=$(date +%s)
  printf '\n## %s\n\n```\n' "$title" >>"$out"
  [ "$device" = cuda ] || seconds=1800
  timeout "$seconds" "$@" >>"$out" 2>&1
  code=$?
  printf '```\n\nexit code %s after %s s\n' "$code" "$(($(date +%s) - started))" >>"$out"
  [ "$code" -eq 0 ] || failed="$failed
$title"
}

if [ "$device" = cuda ]; then
  on=cuda few="--repeats 20" kernels= layer= unet= step= types= rounds="--rounds 4 --threads 8"
  volumes="128 128 36" patients=15 memory=8 epochs="--repeats 5 --threads 8" some="--device cuda"
  waits="fedavg fedfa fedfd fedfd_a fraug" captured="fedavg fedfa+ fedfd fedfd_a fraug scaffold"
else
  on=pretended few="--repeats 1" kernels=1 layer=--tiny types=--tiny step="--batch 2 --size 32"
  unet="--network default --batch 2 --size 32" some=
  rounds="--rounds 3 --stand-in 3 32 4 --set batch_size=2 --set network_args={\"features\":[4,4,4,4,4,4]}"
  volumes="32 32 16" patients=5 memory=0.2 epochs="--repeats 1 --limit 2"
  waits=fedfd_a captured=fedfa+
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
printf '# Measured on %s\n' "$device" >"$out"
part 15 "Hardware and versions" "$python" -c "import os, platform, torch
print(platform.processor() or platform.machine(), os.cpu_count(), 'cores, Python', platform.python_version())
for k in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(k), torch.cuda.get_device_properties(k))
print('torch', torch.__version__, 'CUDA', torch.version.cuda)
from importlib.metadata import version
for name in ('triton', 'monai', 'numpy'): print(name, version(name))"
# shellcheck disable=SC2086  the options are words
{
  TRITON_INTERPRET=$kernels part 70 "Kernels against float64" \
    "$python" -m pytest -q --noconftest -p no:cacheprovider tests/functional/kernel_cases.py
  part 80 "Graphs: losses, weights and metrics with and without" \
    "$python" benchmarks/step_graphs.py $some --methods $captured
  part 50 "FFA layer / batch norm" "$python" benchmarks/ffa_layer.py --device $on $few $layer
  part 50 "Steps of a U-Net" "$python" benchmarks/unet_step.py --device $on $few $unet
  part 60 "Steps and inference of FedFD, FedFD-A and FRAug" \
    "$python" benchmarks/fedfd_step.py --device $on $few $step
  for method in fedavg fedfa+; do
    part 70 "A round of $method on LGG / its arithmetic" "$python" benchmarks/protocol.py lgg_multisite \
      ${LGG:+--data "$LGG"} --methods $method --device $on --graphs auto $rounds
  done
  part 20 "Volumes" "$python" -c "from medfedaug.data.datasets.phantom import make_phantom
make_phantom('$scratch/volumes', sites=2, patients=$patients, shape=[$(echo $volumes | tr ' ' ,)])"
  part 50 "A plain MONAI loop's epoch / ours" "$python" benchmarks/volume_epoch.py --device $on \
    --data "$scratch/volumes" --plan-memory $memory $epochs
  part 25 "Precision" "$python" benchmarks/precision.py --device "$device" $few $types
  part 25 "Waits" "$python" benchmarks/pretended_gpu.py $some --methods $waits
}
[ -z "$failed" ] || {
  printf '\n# Parts that failed\n%s\n' "$failed" >>"$out"
  exit 1
}
