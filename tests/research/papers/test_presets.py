"""Presets: what a planned run gets, compared with the words of the paper; and their documentation."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmark_files import picture, write_fedbn

from medfedaug.config.run import RunConfig
from medfedaug.methods import build_methods
from medfedaug.research.datasets.benchmarks import BENCHMARKS, open_benchmark
from medfedaug.research.papers.axes import parse_axis
from medfedaug.research.papers.presets import PRESETS
from medfedaug.research.sweeps import run_list
from medfedaug.research.sweeps.run_list import PlannedRun, plan


def planned(
    monkeypatch, name: str, methods: str = "fedavg", axes: tuple[str, ...] = (), root: Path = Path()
) -> PlannedRun:
    """The first run of a preset, over data that need not be there."""
    sites = [SimpleNamespace(name=site, trains=True) for site in "ABCD"]
    with monkeypatch.context() as patch:
        patch.setattr(run_list, "open_benchmark", lambda *args, **options: sites)
        patch.setattr(
            run_list, "federation_settings", lambda sites: {"in_channels": 3, "classes": tuple("abc")}
        )
        patch.setattr(run_list, "Composition", lambda config: build_methods(config.methods))
        return plan(PRESETS[name], root, [methods], seeds=1, axes=[parse_axis(text) for text in axes])[0]


def arguments(run: PlannedRun, method: str) -> dict:
    """The arguments that a method of the run really has."""
    (built,) = (m for m in build_methods(run.config.methods) if m.name == method)
    return vars(built)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_every_preset_is_a_run_over_a_data_set_that_is_there(preset):
    RunConfig.from_dict(dict(preset.config))
    assert set(preset.data) <= set(BENCHMARKS[preset.benchmark].options)
    assert preset.source
    assert preset.readings or preset.benchmark == "lgg_multisite"


def test_presets_are_those_of_the_papers():
    """FedFA+ Table 1: rounds, epochs, batch, rate."""
    table = {
        "office_caltech_10": (400, 1, "alexnet", "sgd", 32, 1e-2),
        "domainnet_10": (400, 1, "alexnet", "sgd", 32, 1e-2),
        "prostate_mri": (500, 1, "basicunet", "adam", 16, 1e-4),
    }
    names = (*("rounds", "local_epochs", "network", "optimizer", "batch_size"), "learning_rate")
    for name, row in table.items():
        config = RunConfig(**PRESETS[name].config)
        assert tuple(getattr(config, key) for key in names) == row


# --- What a run gets, and the paper's ---------------------------------------------------------------------


def test_fedrdn_has_the_momentum_and_the_weights_of_appendix_a_2(monkeypatch):
    """FedProx "0.001", FedProto "1", FedAvgM "0.9 for two image classification datasets and 0.01 for
    ProstateMRI", FedMix "The batch size is set to 5 and λ is set to 0.1"."""
    for data, momentum in (
        *(("office_caltech_10", 0.9), ("domainnet_10", 0.9)),
        *(("prostate_mri", 0.01), ("prostate_mri_slices", 0.01)),
    ):
        run = planned(monkeypatch, f"fedrdn_{data}", "fedavgm,fedrdn")
        assert arguments(run, "fedavgm")["momentum"] == momentum
        assert run.variant == ""
        assert arguments(planned(monkeypatch, f"fedrdn_{data}", "fedprox"), "fedprox")["mu"] == 0.001
    run = planned(monkeypatch, "fedrdn_office_caltech_10", "fedproto")
    assert arguments(run, "fedproto")["weight"] == 1
    run = planned(monkeypatch, "fedrdn_office_caltech_10", "fedmix")
    assert (arguments(run, "fedmix")["group"], arguments(run, "fedmix")["mixing"]) == (5, 0.1)


@pytest.mark.parametrize("data", ["pacs", "officehome", "domainnet_10"])
def test_fedprox_beside_fedfd_a_has_the_weight_of_section_4_2(monkeypatch, data):
    """It has "the FedProx method [31], which entails L2 regularization with μ set to 0.1"."""
    run = planned(monkeypatch, f"fedfd_a_{data}", "silobn,fedprox")
    assert arguments(run, "fedprox")["mu"] == 0.1
    assert (run.config.momentum, run.config.local_steps, run.config.batch_size) == (0.5, 200, 64)
    fedfd_a = arguments(planned(monkeypatch, f"fedfd_a_{data}", "silobn,fedfd_a"), "fedfd_a")
    assert (fedfd_a["lambda1"], fedfd_a["lambda2"]) == (0.1, 4.0)


def test_an_argument_of_a_preset_can_be_set_and_is_then_told(monkeypatch):
    name = "fedrdn_prostate_mri_slices"
    run = planned(monkeypatch, name, "fedavgm", ("fedavgm.momentum=0.9",))
    assert arguments(run, "fedavgm")["momentum"] == 0.9
    assert run.variant == "fedavgm.momentum=0.9"
    same = planned(monkeypatch, name, "fedavgm", ("fedavgm.momentum=0.01",))
    assert (same.variant, arguments(same, "fedavgm")["momentum"]) == ("", 0.01)
    other = planned(monkeypatch, name, "fedavgm", ("fedavgm.server_lr=0.5",))
    assert (arguments(other, "fedavgm")["momentum"], other.variant) == (0.01, "fedavgm.server_lr=0.5")


def test_sites_weigh_as_the_papers_have_it(monkeypatch):
    """FRAug Algorithm 1 prints 1/K, FedFA+ Eq. 1 1/M, FedRDN Eq. 1 n_k / Σ n_i; FedFD-A says "FedAvg"."""
    weightings = {name: planned(monkeypatch, name).config.weighting for name in PRESETS}
    samples = {name for name, weighting in weightings.items() if weighting == "samples"}
    assert samples == {
        name for name in PRESETS if name.startswith(("fedrdn_", "fedfd_a_", "lgg_", "retina_"))
    }
    assert all(weightings[f"fraug_{data}"] == "uniform" for data in ("pacs", "officehome"))


def write_domains(root: Path, names: tuple[str, ...], each: int = 30) -> None:
    for name in names:
        for label in ("dog", "house"):
            for i in range(each):
                picture(root / name / label / f"{i:03d}.jpg", i)


@pytest.mark.parametrize(
    ("data", "sites"),
    [
        ("pacs", ("art_painting", "cartoon", "photo", "sketch")),
        ("officehome", ("Art", "Clipart", "Product", "Real World")),
    ],
)
def test_as_much_trains_as_the_papers_say(monkeypatch, tmp_path, data, sites):
    """FedFD-A: "standard protocols specified in DomainBed for dataset splits", 80 %; FRAug: "only 10%"."""
    write_domains(tmp_path, sites)  # 60 images a site
    for name, training in ((f"fedfd_a_{data}", 48), (f"fraug_{data}", 6)):
        if name not in PRESETS:
            continue
        options = {**planned(monkeypatch, name).data}
        options.pop("unseen", "")
        for site in open_benchmark(data, tmp_path, **options):
            assert len(site.cases["training"]) == training
            assert {case.label for case in site.cases["training"]} == {"dog", "house"}
    whole = open_benchmark(data, tmp_path, **PRESETS[f"fedfd_a_{data}"].data)[0]
    assert [len(part) for part in whole.cases.values()] == [48, 6, 6]


def test_four_fifths_of_domainnet_train_as_in_domainbed(monkeypatch, tmp_path):
    sites = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    write_fedbn(tmp_path, "DomainNet", sites, train=16, test=4)
    options = {k: v for k, v in planned(monkeypatch, "fedfd_a_domainnet_10").data.items() if k != "unseen"}
    for site in open_benchmark("domainnet_10", tmp_path, **options):
        assert [len(part) for part in site.cases.values()] == [16, 2, 2]


# --- A change of a preset ---------------------------------------------------------------------------------


def test_fedbn_has_a_score_beside_the_papers_where_a_site_is_left_out(run, tmp_path, monkeypatch):
    """FedFD-A: "parameters are aggregated for the global model with the same process of FedAvg"."""
    write_domains(tmp_path / "pacs", ("art_painting", "cartoon", "photo", "sketch"), each=10)
    preset = PRESETS["fedfd_a_pacs"]
    small = {"network": "lenet5", "network_args": {}, "image_size": 32, "rounds": 1, "local_steps": 1}
    monkeypatch.setitem(PRESETS, preset.name, replace(preset, config={**preset.config, **small}))
    run.ok(
        *("benchmark", preset.name, "--data", tmp_path, "--out", tmp_path / "out", "--device", "cpu"),
        *("--methods", "fedbn", "--seeds", 1, "--limit", 2, "--threads", 1, "--no-pictures"),
    )
    rows = list(csv.DictReader((tmp_path / "out/published.csv").open()))
    assert {(row["method"], row["published_in"]) for row in rows} == {("fedbn", "FedFD-A Table 5")}
    assert all(0 <= float(row[site]) <= 1 for row in rows for site in ("photo", "sketch", "mean"))
    office = planned(monkeypatch, "office_caltech_10", "fedbn")
    assert arguments(office, "fedbn")["unseen"] == "none"
