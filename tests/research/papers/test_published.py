"""The papers' numbers: means are those of their sites, and a sweep stands beside them."""

import csv
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from benchmark_files import OFFICE, write_fedbn

from medfedaug.models import build_network, ffa_layers, insert_ffa
from medfedaug.research.papers.axes import parse_axis, split_values
from medfedaug.research.papers.presets import PRESETS
from medfedaug.research.papers.published import parse_published, published_rows
from medfedaug.research.sweeps import run_list
from medfedaug.research.sweeps.run_list import plan

FILES = {
    path.name.removesuffix(".csv"): path.read_text(encoding="utf-8")
    for path in resources.files("medfedaug.research.papers.published").iterdir()
    if path.name.endswith(".csv")
}


def lines(benchmark: str) -> list[dict[str, str]]:
    return list(csv.DictReader(FILES[benchmark].splitlines()))


# Where a paper has the sites in another order than the file.
ORDER = {("FedFD-A", "pacs"): ("photo", "art_painting", "cartoon", "sketch")}


def numbers(line: dict[str, str], benchmark: str) -> list[str]:
    """The scores of a line in the order of the paper."""
    names = list(line)
    sites = names[names.index("held_out") + 1 : names.index("mean")]
    cells = [line[name] for name in (*ORDER.get((line["paper"], benchmark), sites), "mean")]
    return [cell for cell in cells if cell]


def test_means_are_the_means_of_their_sites():
    """A number in the wrong place shows; the papers' own rounding and errors are let pass."""
    odd = []
    for preset in PRESETS.values():
        for row in published_rows(preset):
            scores = [printed.score for printed in row.sites.values()]
            if scores and row.mean and abs(fmean(scores) - row.mean.score) > 0.0011:
                odd.append((preset.name, row.source, row.row))
                assert row.note
    assert odd == [  # printed so
        ("office_caltech_10", "FedFA+ Table 3", "FEDFA+"),
        ("domainnet_10", "FedFA+ Table 3", "FEDAVGM"),
        # A cell is empty in the text.
        ("fedfd_a_pacs", "FedFD-A Table 13", "SiloBN w/ long local iterations"),
        ("fedfd_a_pacs", "FedFD-A Table 13", "SiloBN w/ long total rounds"),
    ]


def test_the_stages_of_densenet_are_its_blocks_and_transitions():
    rows = [row for row in published_rows(PRESETS["domainnet_10"]) if "densenet100" in row.settings]
    stages = [axis.values[0] for row in rows for axis in map(parse_axis, split_values(row.settings))]
    whole = max((stage for stage in stages if isinstance(stage, list)), key=len)
    net = insert_ffa(build_network("densenet100", in_channels=3, out_channels=10), stages=whole, prob=1.0)
    net.train()
    net(torch.randn(2, 3, 64, 64))  # checks the widths
    layers = ffa_layers(net)
    assert [layer.num_channels for layer in layers.values()] == [24 + 16 * 12, 108, 108 + 16 * 12, 150, 342]
    assert len(rows) == 16
    assert {name for stage in stages if isinstance(stage, list) for name in stage} == set(whole)


def fake_data(monkeypatch, benchmark: str) -> None:
    """A sweep over a data set that is not there."""
    header = FILES[benchmark].splitlines()[0].split(",")
    names = header[header.index("held_out") + 1 : header.index("mean")] or ["a", "b"]
    sites = [SimpleNamespace(name=name, trains=True) for name in names]
    segments = benchmark.endswith("prostate_mri")
    known = ("segmentation", 3, ("background", "prostate")) if segments else None
    known = known or ("classification", 3, tuple("abcdefg"))
    monkeypatch.setattr(run_list, "open_benchmark", lambda *args, **options: sites)
    settings = dict(zip(("task", "in_channels", "classes"), known, strict=True))
    monkeypatch.setattr(run_list, "federation_settings", lambda sites: settings)


def plan_every_row(benchmark: str, root: Path) -> None:
    made = set()
    for line in lines(benchmark):
        wanted = (line["protocol"], line["methods"], line["settings"], line["held_out"])
        if wanted in made:
            continue
        made.add(wanted)
        axes = [parse_axis(text) for text in split_values(line["settings"]) if text]
        holdout = ["all"] if line["held_out"] else ["none"]
        preset = PRESETS[line["protocol"]]
        runs = plan(preset, root, [line["methods"]], seeds=1, axes=axes, holdout=holdout)
        variants = {row.variant for row in published_rows(preset) if row.settings == line["settings"]}
        assert {run.variant for run in runs} == variants
        assert {bool(run.held_out) for run in runs} == {bool(line["held_out"])}


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", FILES)
def test_the_networks_of_every_row_can_be_built_with_its_methods(benchmark, monkeypatch, tmp_path):
    fake_data(monkeypatch, benchmark)
    plan_every_row(benchmark, tmp_path)


HEADER = "protocol,paper,table,row,methods,settings,held_out,amazon,caltech,dslr,webcam,mean,note"
LINE = "office_caltech_10,FedFA+,3,FEDAVG,fedavg,,,84.4,66.7,75.0,88.1,78.5,"


def test_a_line_is_read_with_spread_and_gaps():
    text = f"{HEADER}\n{LINE}\n" + LINE.replace("84.4,66.7", "84.4 ± 0.9,").replace("78.5", "")
    whole, part = parse_published(text)
    assert (whole.source, whole.mean.score, whole.mean.spread) == ("FedFA+ Table 3", 0.785, None)
    assert list(part.sites) == ["amazon", "dslr", "webcam"]
    assert part.sites["amazon"].score == pytest.approx(0.844)
    assert part.sites["amazon"].spread == pytest.approx(0.009)
    assert part.mean is None


def test_a_sweep_stands_beside_the_numbers_of_the_paper(run, tmp_path, monkeypatch):
    preset = PRESETS["fedrdn_office_caltech_10"]
    small = {"network": "lenet5", "image_size": 32, "local_epochs": 1}
    monkeypatch.setitem(PRESETS, preset.name, replace(preset, config={**preset.config, **small}))
    write_fedbn(tmp_path / "office_caltech_10", "office_caltech_10", OFFICE, train=11, test=3)
    run.ok(
        *("benchmark", "fedrdn_office_caltech_10", "--data", tmp_path, "--out", tmp_path / "out"),
        *("--methods", "fedavg", "fedrdn", "--seeds", 1, "--scale", 0.01, "--limit", 2, "--threads", 1),
        *("--no-pictures", "--device", "cpu"),
    )
    table = list(csv.DictReader((tmp_path / "out/published.csv").open()))
    rows = {(row["method"], row["published_in"]): row for row in table}
    assert set(rows) == {(m, f"FedRDN Table {t}") for m in ("fedavg", "fedrdn") for t in (1, 7)}
    stable = rows["fedrdn", "FedRDN Table 7"]
    assert float(stable["mean_published"]) == pytest.approx(0.6918)
    assert float(stable["mean_published_std"]) == pytest.approx(0.0063)
    assert rows["fedavg", "FedRDN Table 1"]["mean_published_std"] == ""
    text = (tmp_path / "out/published.md").read_text()
    assert " / 0.692 ± 0.006 |" in text
    assert "FedRDN Table 7, FedAvg: three runs; p against FedRDN 0.0001." in text
