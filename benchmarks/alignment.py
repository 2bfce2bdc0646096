"""Effect of FedFA+'s alignment: its gradient against the task's, and the score, by batch size and weight.

    python benchmarks/alignment.py phantom --work DIR --out docs/results/alignment --seeds 0 1 2
    python benchmarks/alignment.py office --data DIR --work DIR --out docs/results/alignment

FedFA with and without the term of FedFA-h (FedFA+ Eq. 15), in every combination of batch size, weight λ,
temperature τ, aligned stage, range of Eq. 12 and kind of sample (`images`: one sample per image; `pixels`:
one per pixel of the stage), with the same number of steps in a round. Each run has the validation and test
score of the selected round and, over every tenth step from the second round on,

- *ratio*: the norm of the weighted term's gradient over that of the task's loss, over all weights of the
  network: the median and the 0.9 quantile;
- *cosine*: the median cosine between the two;
- *term*: the term's median value, without λ;
- *outside*: the mean share of the batch's samples outside the range of the bins;
- *moved*: the movement of the ends of a range over the training images between two measurements, as the
  median share of its extent.

Runs that are in the output's JSON already are not repeated.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import torch
from measure import hardware, parser
from torch import Tensor

from medfedaug.config.run import RunConfig
from medfedaug.data.federation import federation_settings
from medfedaug.data.phantom import make_phantom
from medfedaug.data.preparation.decoded_cache import keep_decoded
from medfedaug.data.sites import find_sites
from medfedaug.federation import run_in_process
from medfedaug.methods import parse_methods
from medfedaug.methods.base import Step
from medfedaug.methods.fedfa_h import FedFAhSite
from medfedaug.research.datasets.benchmarks import find_root, open_benchmark, write_federation
from medfedaug.research.papers.axes import parse_axis
from medfedaug.research.papers.presets import PRESETS
from medfedaug.research.sweeps.run_list import plan
from medfedaug.simulate import configure
from medfedaug.utils.files import write_json

EVERY = 10  # steps


@contextmanager
def gradients(records: list[dict[str, float]], moved: list[float]) -> Iterator[None]:
    """Add every tenth step to a list of gradients, and every new range to a list of movements."""
    loss, take, steps = FedFAhSite.loss, FedFAhSite._take_range, iter(range(10**9))

    def ranged(self: FedFAhSite, batches: Iterable[Tensor]) -> None:
        low, high = self.low, self.high
        take(self, batches)
        if low is not None and high is not None and self.low is not None and self.high is not None:
            extent = (high - low).clamp_min(1e-12)
            ways = torch.cat([(self.low - low).abs() / extent, (self.high - high).abs() / extent])
            moved.append(float(ways.median()))

    def measured(self: FedFAhSite, step: Step) -> Tensor | None:
        samples = self._features
        term = loss(self, step)
        if term is not None and next(steps) % EVERY == 0:
            assert samples is not None
            outside = 0.0
            if self.method.range != "batch":
                assert self.low is not None
                assert self.high is not None
                outside = float(((samples < self.low) | (samples > self.high)).double().mean())
            weights = [p for p in step.network.parameters() if p.requires_grad]
            options = {"retain_graph": True, "allow_unused": True}
            parts = [torch.autograd.grad(of, weights, **options) for of in (term, step.task_loss)]
            pairs = [
                [torch.zeros_like(w) if g is None else g for g, w in zip(part, weights, strict=True)]
                for part in parts
            ]
            own, task = (torch.cat([g.flatten() for g in pair]).double() for pair in pairs)
            sizes = float(own.norm()), float(task.norm())
            both = sizes[0] * sizes[1] or 1.0
            records.append(
                {
                    "ratio": sizes[0] / (sizes[1] or 1.0),
                    "cosine": float(own @ task) / both,
                    "term": float(term.detach()) / self.method.weight,
                    "outside": outside,
                }
            )
        return term

    with patch.object(FedFAhSite, "loss", measured), patch.object(FedFAhSite, "_take_range", ranged):
        yield


def summary(records: Sequence[Mapping[str, float]], moved: Sequence[float]) -> dict[str, float]:
    """Summarise the measures of a run."""
    if not records:
        return {}
    columns = {name: sorted(step[name] for step in records) for name in records[0]}
    measures = {name: median(columns[name]) for name in ("ratio", "cosine", "term")}
    measures["ratio_90"] = columns["ratio"][int(0.9 * (len(records) - 1))]
    return {**measures, "outside": fmean(columns["outside"]), "moved": median(moved or [0.0])}


def phantom(options: argparse.Namespace, seed: int) -> tuple[RunConfig, Path, list[str]]:
    """Make four phantom sites of 15 patients."""
    data = options.work / f"phantom_{seed}"
    if not data.exists():
        make_phantom(data, 4, options.patients, options.shape, seed)
    folders = find_sites(data)
    config = configure(
        folders,
        methods=tuple(parse_methods("fedfa")),
        network_args={"features": options.features},
        learning_rate=0.003,
        schedule="cosine",
        seed=seed,
    )
    return config, data, [folder.name for folder in folders]


def office(options: argparse.Namespace, seed: int) -> tuple[RunConfig, Path, list[str]]:
    """Take Office-Caltech 10 in the protocol of FedFA+, with smaller images."""
    preset, axes = PRESETS["office_caltech_10"], [parse_axis(f"image_size={options.image_size}")]
    run = plan(preset, options.data, ["fedfa"], seeds=1, axes=axes, holdout=["none"], limit=options.limit)[0]
    root = find_root(options.data, preset.benchmark)
    sites = open_benchmark(preset.benchmark, root, limit=options.limit, **run.data)
    data = options.work / "office"
    write_federation(data, preset.benchmark, root, **run.data)
    config = replace(run.config, **federation_settings(sites), seed=seed)
    return config, data, [site.name for site in sites]


DATA = {"phantom": phantom, "office": office}


KEYS = ("data", "samples", "batch", "weight", "tau", "stage", "range")


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Tabulate each combination, with means over its seeds."""
    measures = ("ratio", "ratio_90", "cosine", "term", "outside", "moved")
    head = [
        "data",
        "samples",
        "batch",
        "λ",
        "τ",
        "stage",
        "range",
        "seeds",
        "validation",
        "test",
        "against FedFA",
    ]
    head += ["gradient ratio", "its 0.9 quantile", "cosine", "divergence", "outside", "moved"]
    lines = ["| " + " | ".join(head) + " |", "|---|---" + "|---:" * (len(head) - 2) + "|"]
    plain = {(r["data"], r["batch"], r["seed"]): r["test"] for r in runs if not r["weight"]}
    for key in sorted({tuple(r[name] for name in KEYS) for r in runs}):
        group = [r for r in runs if tuple(r[name] for name in KEYS) == key]
        data, samples, batch, weight, tau, stage, ranged = key
        gains = [
            r["test"] - plain[data, batch, r["seed"]] for r in group if (data, batch, r["seed"]) in plain
        ]
        means = [f"{fmean(r[name] for r in group):.3f}" for name in ("validation", "test")]
        cells = [data, samples, str(batch), f"{weight:g}", f"{tau:g}", str(stage), ranged]
        cells += [str(len(group)), *means]
        if not weight:  # FedFA
            cells[1] = cells[4] = cells[5] = cells[6] = ""
            cells += [""] * (1 + len(measures))
        else:
            cells.append(f"{fmean(gains):+.3f}" if gains else "")
            cells += [f"{fmean(r[name] for r in group):.3g}" if name in group[0] else "" for name in measures]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Make the missing runs, and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("of", choices=DATA)
    arguments.add_argument("--out", type=Path, required=True, help="folder for numbers.json and table.md")
    arguments.add_argument("--work", type=Path, required=True, help="folder for the data")
    arguments.add_argument("--data", type=Path, help="of office: its files")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--batches", type=int, nargs="+", default=[4, 16, 64])
    arguments.add_argument("--weights", type=float, nargs="+", default=[0.0, 0.001, 0.01, 0.1, 1.0])
    arguments.add_argument("--taus", type=float, nargs="+", default=[0.01])
    arguments.add_argument("--stages", type=int, nargs="+", default=[-1], help="-1: the last of the encoder")
    arguments.add_argument("--ranges", nargs="+", default=["stored"], choices=["batch", "stored"])
    arguments.add_argument("--samples", nargs="+", default=["images", "pixels"], choices=["images", "pixels"])
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--steps", type=int, default=10, help="a round")
    arguments.add_argument("--patients", type=int, default=15)
    arguments.add_argument("--shape", type=int, nargs=3, default=[64, 64, 12])
    arguments.add_argument("--features", type=int, nargs=6, default=[8, 8, 16, 32, 64, 8])
    arguments.add_argument("--image-size", type=int, default=96)
    arguments.add_argument("--limit", type=int, default=None, help="cases a split, for a quick test")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(hardware(), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    numbers = options.out / "numbers.json"
    record: dict[str, Any] = {"hardware": hardware(), "runs": []}
    if numbers.exists():
        record = json.loads(numbers.read_text())
    settings = {"rounds": options.rounds, "steps": options.steps}
    for seed in options.seeds:
        config, data, names = DATA[options.of](options, seed)
        of_terms = (options.samples, options.taus, options.stages, options.ranges)
        cells = product(options.batches, options.weights, *of_terms)
        first = tuple(values[0] for values in of_terms)
        for batch, weight, *of_term in cells:
            if not weight and tuple(of_term) != first:
                continue  # FedFA has no samples, no τ, no aligned stage and no range
            samples, tau, stage, ranged = of_term
            wanted = {"data": options.of, "seed": seed, "batch": batch, "weight": weight}
            wanted |= {"samples": samples, "tau": tau, "stage": stage, "range": ranged}
            if any({**wanted, **settings}.items() <= run.items() for run in record["runs"]):
                continue
            methods = parse_methods("fedfa")
            if weight:
                term = {name: wanted[name] for name in ("weight", "samples", "tau", "stage", "range")}
                methods = parse_methods("fedfa,fedfa_h", {"fedfa_h": term})
            run_config = replace(
                config,
                methods=tuple(methods),
                batch_size=batch,
                rounds=options.rounds,
                local_steps=options.steps,
            )
            records: list[dict[str, float]] = []
            moved: list[float] = []
            started = time.perf_counter()
            with keep_decoded(4 * 2**30), gradients(records, moved):
                results = run_in_process(run_config, data, names, "cpu").results()
            metric = next(iter(results["test"]["mean"]))
            chosen = results["rounds"][results["selected_round"] - 1]["sites"]
            run = {
                **wanted,
                **settings,
                "validation": fmean(site[f"val_{metric}"] for site in chosen.values()),
                "test": results["test"]["mean"][metric],
                **summary(records, moved),
            }
            record["runs"].append(run)
            write_json(numbers, record)
            print(f"{wanted}: {run['test']:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    (options.out / "table.md").write_text(table(record["runs"]) + "\n")
    print(table(record["runs"]))


if __name__ == "__main__":
    main()
