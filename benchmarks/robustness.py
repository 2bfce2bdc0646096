"""Hostile sites against robust methods: the final test Dice of five phantom sites, with and without them.

    python benchmarks/robustness.py --work DIR --out docs/results/robustness

Every method is run without hostile sites, and with one and two of five for each attack: those from the first
site on, or from another (`--first`). The Dice is that of the selected model, the mean over those sites that
are honest in both runs that are compared. Runs that are already in the output's JSON are not repeated.

The attacks, on what a site sends of its parameters (running statistics stay as trained, so that the update
passes the server's checks):

- `sign flip`: the step of the site's own training, backwards;
- `scaling`: that step, twenty times as long;
- `label flip`: the classes of the site's label maps in reverse order (foreground for background, with two),
  in training as in validation;
- `hijack`: the step backwards, of a site that says it has 2^31 - 1 samples.

With two hostile sites both do the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from measure import hardware

from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.errors import RunFailed
from medfedaug.federation import Reply, Request, run_in_process
from medfedaug.federation.in_process import InProcessCarrier
from medfedaug.federation.messages import PREPARE, TRAIN
from medfedaug.federation.protocol import Accept
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure
from medfedaug.utils.files import write_json

SITES = 5
CLAIM = 2**31 - 1
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fedavg": ("fedavg", {}, {"max_share": 1.0}),
    "fedavg, max_share 0.25": ("fedavg", {}, {"max_share": 0.25}),
    "norm_clip, max_share 0.25": ("norm_clip", {}, {"max_share": 0.25}),
    "median": ("median", {}, {}),
    "trimmed_mean, f = 1": ("trimmed_mean", {"hostile": 1}, {}),
    "krum, f = 1": ("krum", {"hostile": 1}, {}),
    "multi_krum, f = 1": ("multi_krum", {"hostile": 1}, {}),
    "norm": ("norm", {}, {"max_share": 1.0}),
    "norm, median": ("norm,median", {}, {}),
    "norm, trimmed_mean, f = 1": ("norm,trimmed_mean", {"hostile": 1}, {}),
}
"""Methods, arguments of the last, settings of the run. With f = 2 of five, the trimmed mean is the median."""


def along(request: Request, reply: Reply, factor: float) -> None:
    """The step of the site's training, so many times as long."""
    for key, start in request.weights.items():
        if "running_" not in key:
            reply.weights[key] = start + factor * (reply.weights[key] - start)


def sign_flip(request: Request, reply: Reply) -> None:
    """The step backwards."""
    if request.task == TRAIN:
        along(request, reply, -1.0)


def scaling(request: Request, reply: Reply) -> None:
    """The step, twenty times as long."""
    if request.task == TRAIN:
        along(request, reply, 20.0)


def label_flip(request: Request, reply: Reply) -> None:
    """Nothing: the label maps of the site are others."""


def hijack(request: Request, reply: Reply) -> None:
    """The step backwards, of more samples than all others have."""
    sign_flip(request, reply)
    if request.task in (PREPARE, TRAIN):
        reply.num_samples = CLAIM


Attack = Callable[[Request, Reply], None]
ATTACKS: dict[str, Attack] = {
    "sign flip": sign_flip,
    "scaling": scaling,
    "label flip": label_flip,
    "hijack": hijack,
}


def hostile(attack: Attack, sites: Collection[str]) -> type[InProcessCarrier]:
    """A carrier under which some sites answer as the attack has it."""

    class Hostile(InProcessCarrier):
        """Changes what these sites answer."""

        def ask(
            self, request: Request, names: Sequence[str], needed: int, accept: Accept
        ) -> Mapping[str, str]:
            """Ask, and spoil the answers."""

            def spoiled(name: str, reply: Reply) -> bool:
                if name in sites and not reply.error:
                    attack(request, reply)
                return accept(name, reply)

            return super().ask(request, names, needed, spoiled)

    return Hostile


def flipped(data: Path, out: Path, classes: int) -> Path:
    """The sites with the classes of every label map in reverse order."""
    shutil.copytree(data, out, dirs_exist_ok=True)
    for file in out.glob("*/labels/*"):
        volume = nibabel.load(file)
        labels = classes - 1 - np.asarray(volume.dataobj)
        nibabel.save(nibabel.Nifti1Image(labels.astype(np.uint8), volume.affine, volume.header), file)
    return out


def final_dice(
    data: Path, false: Path, run: Mapping[str, Any], options: argparse.Namespace
) -> dict[str, float]:
    """The test Dice by site, of the sites that are honest."""
    name, attack, count = run["method"], run["attack"], run["hostile"]
    method, arguments, settings = METHODS[name]
    folders = find_sites(data)
    config = configure(
        folders,
        methods=tuple(parse_methods(method, {method.split(",")[-1]: arguments} if arguments else None)),
        network="unet",
        network_args={
            "channels": options.channels,
            "strides": [2] * (len(options.channels) - 1),
            "norm": options.norm,
        },
        rounds=options.rounds,
        local_epochs=options.local_epochs,
        batch_size=8,
        learning_rate=0.01,
        schedule="cosine",
        seed=run["seed"],
        **settings,
    )
    liars = [folders[(run["first"] + number) % SITES].name for number in range(count)]
    if attack == "label flip":
        others = {folder.name: folder for folder in find_sites(false)}
        folders = [others[f.name] if f.name in liars else f for f in folders]
    carrier = hostile(ATTACKS[attack], liars) if count else None
    try:
        results = run_in_process(config, data, folders, "cpu", carrier=carrier).results()
    except RunFailed as error:  # the model is nothing that a site can train
        print(f"{name}: {error}", flush=True)
        return {}
    found = results["test"]["sites"]
    return {site: entry["dice"] for site, entry in found.items() if site not in liars}


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The mean Dice without hostile sites, and how far it moves with them."""
    dice = {(r["method"], r["attack"], r["hostile"], r["seed"], r["first"]): r["dice"] for r in runs}
    cases = [(attack, count) for count in (1, 2) for attack in ATTACKS]
    head = ["method", "none", *(f"{attack}, {count}" for attack, count in cases)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in METHODS:
        clean = {seed: d for (method, _, count, seed, _), d in dice.items() if method == name and not count}
        if not clean:
            continue
        row = [f"{np.mean([np.mean(list(d.values())) for d in clean.values()]):.3f}"]
        for attack, count in cases:
            moved = [
                np.mean(list(found.values())) - np.mean([clean[seed][site] for site in found])
                for (method, kind, number, seed, _), found in dice.items()
                if (method, kind, number) == (name, attack, count) and seed in clean and found
            ]
            row.append(f"{np.mean(moved):+.3f}" if moved else "")
            if any((name, attack, count) == key[:3] and not found for key, found in dice.items()):
                row[-1] = "ends the run"
        lines.append(f"| `{name}` | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for numbers.json and table.md")
    parser.add_argument("--work", type=Path, required=True, help="folder for the phantom sites")
    parser.add_argument("--patients", type=int, default=15)
    parser.add_argument("--shape", type=int, nargs=3, default=[32, 32, 8])
    parser.add_argument("--classes", type=int, default=2, help="background, lesion, and further structures")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--local-epochs", type=int, default=4)
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--norm", choices=["batch", "instance"], default="batch")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2], help="how many sites are hostile")
    parser.add_argument("--first", type=int, nargs="+", default=[0], help="the first of the hostile sites")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(hardware(), flush=True)
    data, false = options.work / "data", options.work / "flipped"
    if not data.exists():
        size = {"patients": options.patients, "shape": tuple(options.shape), "classes": options.classes}
        make_phantom(data, sites=SITES, seed=0, **size)
    if not false.exists():
        flipped(data, false, options.classes)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "numbers.json"
    fixed = ("patients", "shape", "rounds", "local_epochs", "channels", "norm", "classes")
    settings = {key: getattr(options, key) for key in fixed}
    known = json.loads(file.read_text()) if file.exists() else {"settings": settings, "runs": []}
    if known["settings"] != settings:
        raise SystemExit(f"{file} is of other settings: {known['settings']}")
    for run in known["runs"]:
        run.setdefault("first", 0)
    plan = [(seed, 0, 0, "none") for seed in options.seeds]
    plan += itertools.product(options.seeds, options.first, options.counts, options.attacks)
    for (seed, first, count, attack), name in itertools.product(plan, options.methods):
        wanted = {"method": name, "attack": attack, "hostile": count, "first": first, "seed": seed}
        if any(wanted.items() <= run.items() for run in known["runs"]):
            continue
        started = time.perf_counter()
        dice = final_dice(data, false, wanted, options)
        known["runs"].append({**wanted, "dice": dice, "seconds": time.perf_counter() - started})
        write_json(file, {**known, "hardware": hardware()})
        told = f"{np.mean(list(dice.values())):.3f}" if dice else "none"
        print(f"{name}: {count} x {attack} from site {first}, seed {seed}: {told}", flush=True)
    print(table(known["runs"]))
    (options.out / "table.md").write_text(table(known["runs"]) + "\n")


if __name__ == "__main__":
    main()
