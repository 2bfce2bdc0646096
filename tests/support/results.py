"""Finished runs as `results.json` has them, and a page as a reader has it."""

import json
from html.parser import HTMLParser
from statistics import fmean

import pytest

from medfedaug.runs.load_results import load_run


def content(
    methods=("fedavg",), seed=0, scores=None, metric="dice", rounds=3, unseen=None, args=None, **config
):
    """A `results.json` with the given test scores and a validation score of round / 10 at the first site."""
    scores = {"DU": 0.5, "HT": 0.7} if scores is None else scores
    known = [value for value in scores.values() if value is not None]
    entries = []
    for r in range(1, rounds + 1):
        entry = {
            "round": r,
            "sites": {
                site: {"train_loss": 1 / r, f"val_{metric}": r / 10 + 0.1 * k, "samples": 5, "seconds": 1.0}
                for k, site in enumerate(scores)
            },
            "bytes_up": 1_000_000,
            "bytes_down": 1_000_000,
            "bytes": {"model": {"up": 1_000_000, "down": 1_000_000}},
            "methods": {},
            "refused": [],
        }
        if "fedfa" in methods:
            entry["methods"]["fedfa"] = {
                "enc1": {"gamma_mean": [0.3, 0.5 + 0.01 * r], "gamma_std": [0.2, 0.6]}
            }
            entry["bytes"]["fedfa"] = {"up": 16_000, "down": 16_000}
        entries.append(entry)
    return {
        "config": {
            "methods": [{"name": name, "args": (args or {}).get(name, {})} for name in methods],
            "seed": seed,
            "rounds": rounds,
            "local_epochs": 1,
            "task": "segmentation",
            **config,
        },
        "input": {"scaling": "each volume", "normalised_by": "fedrdn" if "fedrdn" in methods else None},
        "rounds": entries,
        "selected_round": min(2, rounds),
        "scored": {"validation": "global", "test": "global", "unseen": "unseen"},
        "test": {
            "sites": {site: {metric: value, "cases": {"p1": value}} for site, value in scores.items()},
            "unseen": {
                site: {metric: value, "cases": {"p1": value}} for site, value in (unseen or {}).items()
            },
            "mean": {metric: sum(known) / len(known) if known else None},
        },
        "engine": "inprocess",
        "data": "phantom",
        "seconds": 90.0,
    }


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def patients(site_scores, whose=None):
    """`test.sites` or `test.unseen` with the given score of each case, their mean, and whose each case is."""
    known = {s: [v for v in cases.values() if v is not None] for s, cases in site_scores.items()}
    entries = {s: {"dice": sum(known[s]) / len(known[s]), "cases": cases} for s, cases in site_scores.items()}
    for site, cases in site_scores.items() if whose else ():
        numbers = {}  # as a site counts them: anew in each run
        entries[site]["patients"] = {case: numbers.setdefault(whose(case), len(numbers)) for case in cases}
    return entries


@pytest.fixture
def write(tmp_path):
    def write(data=None, **arguments):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(content(**arguments) if data is None else data))
        return folder

    return write


@pytest.fixture
def seeds(write):
    """FedAvg and FedRDN with three seeds; the differences of the means are 0.01, 0.03, 0.02."""
    runs = []
    for seed, (base, gain) in enumerate([(0.50, 0.01), (0.54, 0.03), (0.52, 0.02)]):
        plain = {"DU": base - 0.1, "HT": base + 0.1}
        better = {"DU": base - 0.1 + gain, "HT": base + 0.1 + gain}
        runs.append(load_run(write(methods=("fedrdn",), seed=seed, scores=better, unseen={"EZ": 0.9})))
        runs.append(load_run(write(methods=("fedavg",), seed=seed, scores=plain, unseen={"EZ": 0.9})))
    return runs


@pytest.fixture
def fold(write):
    """Write a run of one fold: scores of its patients by site."""

    def make(site_scores, number, unseen=None, whose=None, **arguments):
        data = content(**arguments)
        data["test"]["sites"] = patients(site_scores, whose)
        data["test"]["unseen"] = patients(unseen or {}, whose)
        data["test"]["mean"] = {"dice": fmean(v["dice"] for v in data["test"]["sites"].values())}
        data["data_options"] = {"folds": True, "fold": number, "fold_seed": data["config"]["seed"]}
        return load_run(write(data))

    return make


@pytest.fixture
def without(write):
    """Write a run without a site: scores of the patients where it trained and where it did not."""

    def make(left_out, seen, unseen, number=0, **arguments):
        data = content(holdout=[left_out], **arguments)
        data["test"]["sites"], data["test"]["unseen"] = patients(seen), patients(unseen)
        data["test"]["mean"] = {"dice": fmean(v["dice"] for v in data["test"]["sites"].values())}
        if number:
            seed = data["config"]["seed"]
            data["data_options"] = {"folds": 2, "fold": number, "fold_seed": seed, "unseen": ""}
        return load_run(write(data))

    return make
