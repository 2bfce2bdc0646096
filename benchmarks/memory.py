r"""Peak memory of a site that trains on patches of volumes, by the number of its volumes.

A few phantom volumes are linked under many names, so that the disk holds them once; the site prepares and
keeps each name as a separate case. A separate process measures each number of volumes: it prepares all cases,
trains for some steps and scores its validation cases.

    python benchmarks/memory.py --volumes 20 200 2000 --limit 0.25
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import hardware

from medfedaug.config.machine import Machine
from medfedaug.config.plan import Plan
from medfedaug.config.run import RunConfig
from medfedaug.data.phantom import make_phantom

_FILES = 10
COLUMNS = {"peak_gib": 2, "kept_gib": 2, "prepare_s": 0, "train_s": 0}  # with digits


def write_site(root: Path, volumes: int, shape: tuple[int, int, int]) -> Path:
    """Write a site with a number of training volumes, and two each for validation and test."""
    (source,) = make_phantom(root / "source", sites=1, patients=_FILES + 4, shape=shape, seed=0)
    site = root / "site"
    for kind in ("images", "labels"):
        (site / kind).mkdir(parents=True)
    files = {kind: sorted((source / kind).iterdir()) for kind in ("images", "labels")}
    used = {
        "training": [i % _FILES for i in range(volumes)],
        "validation": [_FILES, _FILES + 1],
        "test": [_FILES + 2, _FILES + 3],
    }
    listing: dict[str, object] = {"labels": {"0": "background", "1": "lesion"}}
    number = 0
    for split, chosen in used.items():
        rows = []
        for index in chosen:
            row = {}
            for kind, key in (("images", "image"), ("labels", "label")):
                link = site / kind / f"case_{number:05d}.nii.gz"
                os.link(files[kind][index], link)
                row[key] = f"{kind}/{link.name}"
            rows.append(row)
            number += 1
        listing[split] = rows
    (site / "dataset.json").write_text(json.dumps(listing))
    return site


def measure(site: Path, limit: float, steps: int) -> dict[str, float]:
    """Train at the site; return the peak resident memory of this process in GiB, and seconds."""
    import torch

    from medfedaug.federation import SiteTrainer
    from medfedaug.methods import parse_methods

    torch.set_num_threads(1)
    config = RunConfig(
        methods=tuple(parse_methods("fedrdn,fedfa")),
        network_args={"features": [8, 16, 32, 64, 128, 8], "norm": "instance"},
        plan=Plan(spatial_dims=3, patch_size=(64, 64, 32)),
        classes=("background", "lesion"),
        batch_size=2,
        local_steps=steps,
    )
    trainer = SiteTrainer(config, site, "cpu", machine=Machine(limit))
    started = time.perf_counter()
    trainer.open("site")
    trainer.enter_run("0" * 32)
    once = trainer.prepare().payload
    prepared = time.perf_counter()
    shared = {f"{key}/site": value for key, value in once.items()}
    trainer.start_round(1, {}, once=shared)
    trainer.train(1)
    trainer.evaluate_round("validation", 1)
    return {
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "prepare_s": prepared - started,
        "train_s": time.perf_counter() - prepared,
        "kept_gib": trainer.samples.cache.num_bytes / 2**30 if trainer.samples else 0.0,
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--volumes", type=int, nargs="+", default=[20, 200, 2000])
    parser.add_argument("--shape", type=int, nargs=3, default=[128, 128, 64])
    parser.add_argument("--limit", type=float, default=0.25, help="GiB of memory for prepared images")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--site", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.site is not None:
        print(json.dumps(measure(options.site, options.limit, options.steps)))
        return
    print(hardware())
    print("| volumes | peak resident GiB | kept in memory GiB | preparation s | training and validation s |")
    print("|---|---|---|---|---|")
    for volumes in options.volumes:
        with tempfile.TemporaryDirectory(prefix="medfedaug-memory-") as folder:
            site = write_site(Path(folder), volumes, tuple(options.shape))
            command = ["--site", site, "--limit", options.limit, "--steps", options.steps]
            arguments = [sys.executable, __file__, *map(str, command)]
            done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True)
        numbers = json.loads(done.stdout.strip().splitlines()[-1])
        cells = (f"{numbers[name]:.{digits}f}" for name, digits in COLUMNS.items())
        print(f"| {volumes} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
