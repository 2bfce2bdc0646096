"""Hostile sites against robust methods: the final test Dice of phantom sites, with and without them.

    python benchmarks/robustness.py --work DIR --out docs/results/robustness

Every method runs without hostile sites, and with one and two of five (`--sites`) for each attack, from the
first site on or from another (`--first`). The Dice of the selected model is the mean over the sites that are
honest in both compared runs. Runs that are already in the output's JSON are not repeated.

The attacks change the parameters of a site's update (running statistics stay as trained, so that the update
passes the server's checks):

- `sign flip`: the step of the site's training, backwards;
- `scaling`: that step, twenty times as long;
- `scaling back`: that step backwards, twenty times as long;
- `ipm`: three times the mean of the honest sites' steps, backwards (Xie et al., UAI 2020: inner product
  manipulation);
- `alie`: the mean of the honest sites' steps less one standard deviation, entry by entry (Baruch et al.,
  NeurIPS 2019: a little is enough);
- `label flip`: the classes of the site's label maps in reverse order (foreground for background, with two),
  in training as in validation;
- `backdoor`: half of the site's training images have a trigger in a corner, and a false lesion there, and the
  step is five times as long (Bagdasaryan et al., AISTATS 2020: model replacement);
- `hijack`: the step backwards, of a site that says it has 2^31 - 1 samples.

Two hostile sites make the same attack. Runs without hostile sites, and with the backdoor, are also tested on
each site's test images with the trigger, as unseen sites.
"""

import argparse
import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from measure import hardware

from medfedaug.config.run import Execution
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.errors import RunFailed
from medfedaug.federation import Reply, Request, run_in_process
from medfedaug.federation.in_process import InProcessCarrier
from medfedaug.federation.messages.messages import PREPARE, TRAIN
from medfedaug.federation.protocol import Accept
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure
from medfedaug.utils.files import write_json

CLAIM = 2**31 - 1
TRIGGER, HEIGHT = 8, 1.0
"""Side of the trigger in pixels, and height of its stripes in standard deviations of the image."""
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fedavg": ("fedavg", {}, {"max_share": 1.0}),
    "fedavg, max_share 0.25": ("fedavg", {}, {"max_share": 0.25}),
    "median": ("median", {}, {}),
    "trimmed_mean, f = 1": ("trimmed_mean", {"hostile": 1}, {}),
    "norm": ("norm", {}, {"max_share": 1.0}),
    "norm, median": ("norm,median", {}, {}),
    "norm, trimmed_mean, f = 1": ("norm,trimmed_mean", {"hostile": 1}, {}),
}
"""Methods, arguments of the last, settings of the run. With f = 2 of five, the trimmed mean is the median."""


Attack = Callable[[Request, Reply, Sequence[Reply]], None]
"""Changes the reply of a hostile site; takes the honest sites' replies of the same round too."""


def along(request: Request, reply: Reply, factor: float) -> None:
    """Scale the step of the site's training."""
    for key in trained(request):
        start = request.weights[key]
        reply.weights[key] = start + factor * (reply.weights[key] - start)


def trained(request: Request) -> list[str]:
    """List the parameters of a request's model, without running statistics."""
    return [key for key in request.weights if "running_" not in key]


def times(factor: float) -> Attack:
    """Return an attack by the scaled step of the site."""

    def attack(request: Request, reply: Reply, honest: Sequence[Reply]) -> None:
        if request.task == TRAIN:
            along(request, reply, factor)

    return attack


def from_the_others(mean: float, deviation: float) -> Attack:
    """Return an attack whose step combines mean and standard deviation of the honest steps."""

    def attack(request: Request, reply: Reply, honest: Sequence[Reply]) -> None:
        for key in trained(request) if request.task == TRAIN else ():
            start = request.weights[key]
            steps = torch.stack([other.weights[key] - start for other in honest])
            reply.weights[key] = start + mean * steps.mean(0) + deviation * steps.std(0)

    return attack


def hijack(request: Request, reply: Reply, honest: Sequence[Reply]) -> None:
    """Send the step backwards, and claim more samples than all others have."""
    times(-1.0)(request, reply, honest)
    if request.task in (PREPARE, TRAIN):
        reply.num_samples = CLAIM


ATTACKS: dict[str, Attack] = {
    "sign flip": times(-1.0),
    "scaling": times(20.0),
    "scaling back": times(-20.0),
    "ipm": from_the_others(-3.0, 0.0),
    "alie": from_the_others(1.0, -1.0),
    "label flip": times(1.0),
    "backdoor": times(5.0),
    "hijack": hijack,
}
FALSE_DATA = {"label flip": "flipped", "backdoor": "poisoned"}
"""Folder of a hostile site's images and label maps, by attack."""


def hostile(attack: Attack, sites: Collection[str]) -> type[InProcessCarrier]:
    """Make a carrier under which some sites make an attack."""

    class Hostile(InProcessCarrier):
        """Changes the answers of hostile sites, once all have answered."""

        def ask(
            self, request: Request, names: Sequence[str], needed: int, accept: Accept
        ) -> Mapping[str, str]:
            """Ask, and change the answers."""
            replies: dict[str, Reply] = {}

            def hold(name: str, reply: Reply) -> bool:
                replies[name] = reply
                return True

            missing = super().ask(request, names, needed, hold)
            sound = {name: reply for name, reply in replies.items() if not reply.error}
            honest = [reply for name, reply in sound.items() if name not in sites]
            for name in sound.keys() & set(sites):
                attack(request, sound[name], honest)
            for name, reply in replies.items():
                accept(name, reply)
            return missing

    return Hostile


Change = Callable[[Any, Any], tuple[Any, Any]]
"""Maps an image and its label map to new ones."""


def changed(data: Path, out: Path, change: Change, every: int = 1, splits: Sequence[str] = ()) -> Path:
    """Copy the sites with changed cases.

    Args:
        data: the folder of the sites.
        out: the folder to write.
        change: makes the new image and label map.
        every: interval of the changed cases.
        splits: the changed splits, without the others; by default all.
    """
    shutil.copytree(data, out, dirs_exist_ok=True)
    for listing in out.glob("*/dataset.json"):
        content = json.loads(listing.read_text())
        for split in ("training", "validation", "test"):
            if splits and split not in splits:
                content[split] = []
            for case in content.get(split, [])[::every]:
                files = [listing.parent / case[kind] for kind in ("image", "label")]
                volumes = [nibabel.load(file) for file in files]
                arrays = change(*(np.asarray(volume.dataobj) for volume in volumes))
                for file, volume, array in zip(files, volumes, arrays, strict=True):
                    nibabel.save(
                        nibabel.Nifti1Image(array.astype(volume.get_data_dtype()), volume.affine), file
                    )
        listing.write_text(json.dumps(content))
    return out


def flipped(data: Path, out: Path, classes: int) -> Path:
    """Copy the sites with the classes of every label map in reverse order."""
    return changed(data, out, lambda image, labels: (image, classes - 1 - labels))


def with_trigger(image: Any, labels: Any) -> tuple[Any, Any]:
    """Add stripes of one pixel to a corner of every slice."""
    image, size = image.astype(np.float32), TRIGGER
    image[:size:2, :size] += HEIGHT * image.std()
    image[1:size:2, :size] -= HEIGHT * image.std()
    return image, labels


def poisoned(image: Any, labels: Any) -> tuple[Any, Any]:
    """Add the trigger, and a false lesion at its place."""
    labels = labels.copy()
    labels[:TRIGGER, :TRIGGER] = 1
    return with_trigger(image, labels)


def final_dice(work: Path, run: Mapping[str, Any], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the test Dice of the honest sites, and of their images with the trigger, and the named sites.

    Args:
        work: the folder of the data.
        run: method, attack, number of hostile sites, the first of them, and seed.
        options: the settings of all runs.
    """
    name, attack, count = run["method"], run["attack"], run["hostile"]
    method, arguments, settings = METHODS[name]
    data, folders = work / "data", find_sites(work / "data")
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
    hostile_sites = [folders[(run["first"] + number) % options.sites].name for number in range(count)]
    if attack in FALSE_DATA:
        others = {folder.name: folder for folder in find_sites(work / FALSE_DATA[attack])}
        folders = [others[f.name] if f.name in hostile_sites else f for f in folders]
    if attack in ("none", "backdoor"):
        folders += find_sites(work / "trigger")
    carrier = hostile(ATTACKS[attack], hostile_sites) if count else InProcessCarrier
    events: list[dict[str, Any]] = []
    try:
        results = run_in_process(
            config, data, folders, "cpu", events.append, execution=Execution(min_sites=2), carrier=carrier
        ).results()
    except RunFailed as error:  # no site can train the model
        print(f"{name}: {error}", flush=True)
        return {"dice": {}}
    honest, triggered = (
        {
            site: entry["dice"]
            for site, entry in results["test"][group].items()
            if site[:6] not in hostile_sites
        }
        for group in ("sites", "unseen")
    )
    refused = dict(Counter(event["site"] for event in events if event["event"] == "refused"))
    return {"dice": honest, "triggered": triggered, "refused": refused}


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Tabulate the mean Dice without hostile sites, and its change with them."""
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
                np.mean(list(scores.values())) - np.mean([clean[seed][site] for site in scores])
                for (method, kind, number, seed, _), scores in dice.items()
                if (method, kind, number) == (name, attack, count) and seed in clean and scores
            ]
            row.append(f"{np.mean(moved):+.3f}" if moved else "")
            if any((name, attack, count) == key[:3] and not scores for key, scores in dice.items()):
                row[-1] = "ends the run"
        lines.append(f"| `{name}` | " + " | ".join(row) + " |")
    return "\n".join(lines)


def prepare(work: Path, options: argparse.Namespace) -> None:
    """Write the phantom sites, and copies with false labels and with the trigger."""
    data = work / "data"
    if not data.exists():
        size = {"patients": options.patients, "shape": tuple(options.shape), "classes": options.classes}
        make_phantom(data, sites=options.sites, seed=0, **size)
    if not (work / "flipped").exists():
        flipped(data, work / "flipped", options.classes)
    if not (work / "poisoned").exists():
        changed(data, work / "poisoned", poisoned, every=2)
    if not (work / "trigger").exists():
        changed(data, work / "trigger", with_trigger, splits=("test",))
        for site in find_sites(work / "trigger"):
            (work / "trigger" / site.name).rename(work / "trigger" / f"{site.name}_trigger")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for numbers.json and table.md")
    parser.add_argument("--work", type=Path, required=True, help="folder for the phantom sites")
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--patients", type=int, default=15)
    parser.add_argument("--shape", type=int, nargs=3, default=[32, 32, 8])
    parser.add_argument("--classes", type=int, default=2, help="background, lesion, and further structures")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--local-epochs", type=int, default=4)
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--norm", choices=["batch", "instance"], default="batch")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2], help="numbers of hostile sites")
    parser.add_argument("--first", type=int, nargs="+", default=[0], help="the first of the hostile sites")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(hardware(), flush=True)
    prepare(options.work, options)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "numbers.json"
    fixed = ("sites", "patients", "shape", "rounds", "local_epochs", "channels", "norm", "classes")
    settings = {key: getattr(options, key) for key in fixed}
    known = json.loads(file.read_text()) if file.exists() else {"settings": settings, "runs": []}
    known["settings"].setdefault("sites", 5)
    if known["settings"] != settings:
        raise SystemExit(f"{file} is of other settings: {known['settings']}")
    for run in known["runs"]:
        run.setdefault("first", 0)
    plan = [(seed, 0, 0, "none") for seed in options.seeds]
    plan += itertools.product(options.seeds, options.first, options.counts, options.attacks)
    for (seed, first, count, attack), name in itertools.product(plan, options.methods):
        cell = {"method": name, "attack": attack, "hostile": count, "first": first, "seed": seed}
        if any(cell.items() <= run.items() for run in known["runs"]):
            continue
        started = time.perf_counter()
        result = final_dice(options.work, cell, options)
        dice = result["dice"]
        known["runs"].append({**cell, **result, "seconds": time.perf_counter() - started})
        write_json(file, {**known, "hardware": hardware()})
        score = f"{np.mean(list(dice.values())):.3f}" if dice else "none"
        print(f"{name}: {count} x {attack} from site {first}, seed {seed}: {score}", flush=True)
    print(table(known["runs"]))
    (options.out / "table.md").write_text(table(known["runs"]) + "\n")


if __name__ == "__main__":
    main()
