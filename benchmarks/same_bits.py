"""Twelve methods on the phantom, in process and through NVFlare: the hashes of their models and scores.

Record before a change that must keep all results, and compare after it, on one machine:

python benchmarks/same_bits.py --out before.json
python benchmarks/same_bits.py --out after.json --compare before.json
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

METHODS = [
    "fedavg",
    "fedprox",
    "fedbn",
    "silobn",
    "scaffold",
    "ditto",
    "fedrdn",
    "fedfa",
    "fedfa+",
    "fedfd",
    "fedfd_a",
    "feddg",
]
OPTIONS = ["--rounds", "2", "--batch-size", "4", "--seed", "3", "--device", "cpu", "--threads", "1"]
NETWORK = ["--network-args", '{"features": [4, 8, 8, 8, 8, 4]}']
NOT_RESULTS = ("seconds", "run", "job", "date", "versions", "sha256", "files", "data", "engine")


def tensors_hash(file: Path) -> str:
    """Return the SHA-256 of a state dict: names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name, value in sorted(torch.load(file, weights_only=True).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def without_times(value: Any) -> Any:
    """Return results without times, identities and paths."""
    if isinstance(value, dict):
        return {key: without_times(entry) for key, entry in value.items() if key not in NOT_RESULTS}
    return [without_times(entry) for entry in value] if isinstance(value, list) else value


def run(command: str, engine: str, method: str, data: Path, out: Path) -> dict[str, str]:
    """Train one method and return the hash of each model and of the results."""
    simulate = [command, "simulate", "--data", str(data), "--methods", method, "--out", str(out)]
    done = subprocess.run(
        [*simulate, "--engine", engine, *OPTIONS, *NETWORK],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{method} ({engine}): {done.stderr[-2000:]}")
    hashes = {file.name: tensors_hash(file) for file in sorted(out.glob("*.pt"))}
    results = without_times(json.loads((out / "results.json").read_text(encoding="utf-8")))
    text = json.dumps({key: results[key] for key in ("rounds", "test", "sites")}, sort_keys=True)
    return {**hashes, "results": hashlib.sha256(text.encode()).hexdigest()}


def main() -> None:
    """Run all methods with each engine, write the hashes, and compare them."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments.add_argument(
        "--compare", type=Path, help="JSON file of an earlier run; exit code 1 on a difference"
    )
    arguments.add_argument("--engines", nargs="+", default=["inprocess", "nvflare"])
    arguments.add_argument("--methods", nargs="+", default=METHODS)
    arguments.add_argument(
        "--command", default=str(Path(sys.executable).with_name("medfedaug")), help="the medfedaug to run"
    )
    options = arguments.parse_args()
    hashes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "phantom"
        phantom = [options.command, "phantom", "--out", str(data), "--sites", "3", "--patients", "4"]
        subprocess.run(phantom, check=True, capture_output=True)
        for engine in options.engines:
            for method in options.methods:
                hashes[f"{engine}/{method}"] = run(
                    options.command, engine, method, data, Path(folder) / engine / method
                )
                print(
                    f"{engine}/{method}: {hashes[f'{engine}/{method}'].get('final_model.pt', '')[:16]}",
                    flush=True,
                )
    options.out.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    if options.compare is not None:
        before = json.loads(options.compare.read_text(encoding="utf-8"))
        different = [name for name in hashes if hashes[name] != before.get(name)]
        for name in different:
            old = before.get(name, {})
            files = sorted(key for key in {*old, *hashes[name]} if old.get(key) != hashes[name].get(key))
            print(f"differs: {name}: {', '.join(files)}")
        print(f"{len(hashes) - len(different)} of {len(hashes)} runs are the same to the last bit")
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
