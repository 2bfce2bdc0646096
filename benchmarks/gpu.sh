#!/bin/sh
# Measure on a GPU, in eight minutes, what the page Performance says of one.
#
#   sh benchmarks/gpu.sh OUT.md           on a CUDA GPU
#   sh benchmarks/gpu.sh OUT.md cpu       at sizes that measure nothing: does everything run?
#
# It runs in a checkout, and needs PyTorch, Triton, MONAI, NiBabel, pydantic, pydicom, cryptography and a C
# compiler, but neither NVFlare nor Typer. LGG=FOLDER names the sites of TCGA-LGG; phantoms of their size stand
# in. PYTHON names the interpreter.
out=${1:?name a file to write}
device=${2:-cuda}
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="$scratch/inductor"
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
  few="--repeats 20" some="--repeats 10" tiny= layouts= patients=15 shape=128,128,36 rounds=4 features=32,32,64,128,256,32
else
  few="--repeats 1" some="--repeats 1" tiny="--batch 2 --size 32" layouts="--only alexnet --dimensions 2"
  patients=3 shape=32,32,16 rounds=1 features=4,4,4,4,4,4
fi

cat >"$scratch/rounds.py" <<'PYTHON'
"""Seconds of a round in process, by methods, precision and --compile: medians without the first round."""
import os
import statistics
import sys
from pathlib import Path

from medfedaug.config.machine import Machine
from medfedaug.data.phantom import make_phantom
from medfedaug.simulate import simulate

folder, device, rounds, patients, shape, features = sys.argv[1:]
data = Path(os.environ.get("LGG") or Path(folder) / "data")
if not data.exists():
    make_phantom(data, sites=4, patients=int(patients), shape=tuple(map(int, shape.split(","))))
for methods, precision, compiled in (
    ("fedavg", "float32", "off"),
    ("fedavg", "float32", "on"),
    ("fedavg", "bfloat16", "off"),
    ("fedavg", "auto", "on"),
    ("fedrdn,fedfa", "float32", "off"),
    ("fedrdn,fedfa", "float32", "on"),
    ("fedfa,fedfa_h", "float32", "on"),
):
    run = simulate(
        data,
        Path(folder) / f"{methods}-{precision}-{compiled}",
        methods=methods,
        engine="inprocess",
        device=device,
        rounds=int(rounds),
        precision=precision,
        network_args={"features": list(map(int, features.split(",")))},
        machine=Machine(compile=compiled),
        report=False,
    )
    seconds = [entry["seconds"] for entry in run["rounds"]]
    print(
        f"{methods}, {precision}, compile {compiled}: {statistics.median(seconds[1:] or seconds):.2f} s a round, "
        f"the first {seconds[0]:.2f} s"
    )
PYTHON

printf '# Measured on %s\n' "$device" >"$out"
part 15 "Hardware and versions" "$python" -c "import os, platform, torch
print(platform.processor() or platform.machine(), os.cpu_count(), 'cores, Python', platform.python_version())
for k in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(k), torch.cuda.get_device_properties(k))
print('torch', torch.__version__, 'CUDA', torch.version.cuda)
from importlib.metadata import version
print('monai', version('monai'), 'numpy', version('numpy'))"
# shellcheck disable=SC2086  the options are words
{
  part 90 "FFA, U-Net, FedFD, FedFD-A, FRAug: steps and inference" \
    "$python" benchmarks/method_costs.py --device "$device" $few $tiny
  part 150 "The same, compiled" "$python" benchmarks/method_costs.py --device "$device" --compile $few $tiny
  part 60 "Layouts in memory" "$python" benchmarks/layouts.py --device "$device" $some $layouts
  part 165 "Rounds of ${LGG:-phantoms of the size of LGG}" \
    "$python" "$scratch/rounds.py" "$scratch" "$device" "$rounds" "$patients" "$shape" "$features"
}
[ -z "$failed" ] || {
  printf '\n# Parts that failed\n%s\n' "$failed" >>"$out"
  exit 1
}
