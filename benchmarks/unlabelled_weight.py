"""Train with a site without outlines at several weights in the average, and score every site by the truth.

    python benchmarks/unlabelled_weight.py --out docs/results/partial_labels/weight.json

Three phantom sites with the usual distance of scanners: two of five training patients with two structures
outlined, and one of eight without any outline, which has 44% of the samples.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean

from medfedaug.data.phantom import make_phantom
from medfedaug.research.datasets.partial_phantom import annotate_apart
from medfedaug.simulate import simulate
from medfedaug.utils.files import write_json

NETWORK = {"channels": [8, 16, 32], "strides": [2, 2], "num_res_units": 0, "norm": "instance"}
_TRAINING = 5


def make_sites(folder: Path, seed: int) -> None:
    """Write the sites of a seed."""
    make_phantom(folder, sites=3, patients=14, seed=seed, classes=3)
    annotate_apart(folder, apart=False, unlabelled=("site_C",), measured=True)
    for site in ("site_A", "site_B"):
        listing = folder / site / "dataset.json"
        content = json.loads(listing.read_text())
        write_json(listing, {**content, "training": content["training"][:_TRAINING]})


def dice(data: Path, methods: str, weight: float, seed: int, rounds: int) -> dict[str, float]:
    """Train once, and return the test Dice of each site."""
    with tempfile.TemporaryDirectory() as out:
        result = simulate(
            data,
            Path(out) / "run",
            methods=methods,
            engine="inprocess",
            device="cpu",
            report=False,
            rounds=rounds,
            local_epochs=1,
            batch_size=8,
            learning_rate=0.005,
            optimizer="adam",
            seed=seed,
            network="unet",
            network_args=NETWORK,
            unlabelled_weight=weight,
        )
    test = result["test"]
    return {
        site: entry["dice"] for site, entry in sorted({**test["sites"], **test.get("unseen", {})}.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=["condist,fedrdn", "condist", "teacher,fedrdn"])
    parser.add_argument("--weights", type=float, nargs="+", default=[0, 0.25, 1])
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            make_sites(Path(folder) / "data", seed)
            for methods in options.methods:
                for weight in options.weights:
                    begun = time.perf_counter()
                    sites = dice(Path(folder) / "data", methods, weight, seed, options.rounds)
                    row = {"methods": methods, "weight": weight, "seed": seed, "dice": sites}
                    rows.append({**row, "seconds": round(time.perf_counter() - begun, 1)})
                    print(methods, weight, seed, round(fmean(sites.values()), 3), flush=True)
                    write_json(options.out, {"rounds": options.rounds, "runs": rows})


if __name__ == "__main__":
    main()
