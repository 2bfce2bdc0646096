"""The papers' tables and figures: none is forgotten, and each can be run or says why not."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmark_files import OFFICE, write_fedbn

from medfedaug.errors import ConfigError
from medfedaug.methods import build_methods
from medfedaug.research.papers.papers import entries, find_entry
from medfedaug.research.papers.presets import PRESETS
from medfedaug.research.papers.published import published_rows
from medfedaug.research.sweeps import run_list
from medfedaug.research.sweeps.experiment import make_experiment
from medfedaug.research.sweeps.run_list import plan

DOCS = Path(__file__).parents[3] / "docs"
# Tables, figures, and sections whose experiment has neither.
PLACES = {
    "fedfa": (16, 3, ()),
    "fedfa+": (12, 7, ("4", "6.1", "6.2")),
    "fedrdn": (8, 3, ("4.3",)),
    "fedfd_a": (16, 7, ()),
    "fraug": (3, 2, ()),
}
RUNNABLE = [
    (entry.name, protocol) for entry in entries().values() if not entry.reason for protocol in entry.protocols
]


def test_no_table_or_figure_of_a_paper_is_forgotten():
    wanted = []
    for paper, (tables, figures, sections) in PLACES.items():
        numbered = [f"table{k + 1}" for k in range(tables)] + [f"figure{k + 1}" for k in range(figures)]
        wanted += [f"{paper}:{place}" for place in (*numbered, *(f"section{one}" for one in sections))]
    assert [*entries()] == wanted


def test_an_entry_can_be_run_or_says_why_not():
    for entry in entries().values():
        assert bool(entry.reason) != bool(entry.protocols), entry.name
        assert entry.title
        assert all(note.endswith(".") for note in entry.notes), entry.name
    named = {row.source for preset in PRESETS.values() for row in published_rows(preset)}
    assert named <= {entry.source for entry in entries().values()}


def without_data(monkeypatch) -> None:
    sites = [SimpleNamespace(name=name, trains=True) for name in "AB"]
    settings = {"in_channels": 3, "classes": tuple("abc")}
    monkeypatch.setattr(run_list, "open_benchmark", lambda *args, **options: sites)
    monkeypatch.setattr(run_list, "federation_settings", lambda data: settings)
    monkeypatch.setattr(run_list, "Composition", lambda config: build_methods(config.methods))


@pytest.mark.parametrize(("name", "protocol"), RUNNABLE)
def test_every_run_of_an_entry_can_be_planned(monkeypatch, tmp_path, name, protocol):
    without_data(monkeypatch)
    given = {"entry": name, "protocol": protocol, "data": tmp_path, "out": tmp_path}
    experiment = make_experiment(None, given)
    first, *also = experiment.comparisons()
    options = {"seeds": 1, "holdout": experiment.holdout, "also": also}
    runs = plan(experiment.preset(), tmp_path, first.methods, axes=first.axes, **options)
    rows = [row for row in find_entry(name).published if row.protocol == protocol]
    made = {(run.methods, run.variant, bool(run.held_out)) for run in runs}
    assert {(row.methods, row.variant, row.held_out) for row in rows} <= made


def test_what_is_given_besides_changes_all_runs_of_an_entry():
    given = {"entry": "fedfa+:table12", "protocol": "domainnet_10", "data": "d", "out": "o"}
    whole = make_experiment(None, given)
    assert whole.methods == ("fedavg", "fedfa")
    experiment = make_experiment(None, {**given, "methods": ["fedavg"]}, ["network=lenet5", "image_size=32"])
    assert {one.methods for one in experiment.comparisons()} == {("fedavg",)}
    for one in experiment.comparisons():
        settings = {axis.name: axis.values for axis in one.axes}
        assert settings == {"network": ("lenet5",), "image_size": (32,)}
    with pytest.raises(ConfigError, match=r"fedfa\+:table12 does not compare fedprox"):
        make_experiment(None, {**given, "methods": ["fedprox"]}).comparisons()
    with pytest.raises(ConfigError, match="fedmix is not among the methods"):
        make_experiment(None, given, ["fedmix.group=2"]).comparisons()
    held_out = make_experiment(None, {**given, "entry": "fedfa+:table6"})
    assert held_out.holdout == ("all",)


@pytest.mark.parametrize(
    ("entry", "protocol", "message"),
    [
        ("fedrdn:table6", "", "fedrdn:table6 cannot be run: it shows data"),
        ("fedrdn:table1", "", "has the protocols fedrdn_office_caltech_10, fedrdn_domainnet_10"),
        ("fedrdn:table5", "pacs", "has the protocols fedrdn_office_caltech_10, not 'pacs'"),
        ("fedrdn:table33", "", "entry 'fedrdn:table33' is not known; did you mean fedrdn:table3"),
    ],
)
def test_an_entry_that_cannot_be_run_is_refused(entry, protocol, message):
    with pytest.raises(ConfigError, match=message):
        make_experiment(None, {"entry": entry, "protocol": protocol, "data": "d", "out": "o"})


def test_the_page_is_written_from_the_entries():
    """After a change: ``python docs/entries.py``."""
    page = (DOCS / "papers.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS / "entries.py"))["written"](page) == page


def test_the_list_names_entries_with_details(run):
    _, out, _ = run("benchmark", "--list")
    assert all(f"{name}  {entry.source}: {entry.title}" in out for name, entry in entries().items())
    _, out, _ = run("benchmark", "--list", "fedrdn:table5")
    assert "--methods fedavg norm fedmix fedrdn --set network=resnet18" in out
    assert "Images have 256 x 256 pixels" in out


def arguments(name, data, out):
    small = ("--seeds", 1, "--scale", 0.001, "--limit", 2, "--threads", 1, "--no-pictures", "--device", "cpu")
    return ("benchmark", name, "--data", data, "--out", out, *small)


def finished(out: Path) -> dict[str, dict]:
    return {
        path.parent.relative_to(out).as_posix(): json.loads(path.read_text())
        for path in out.rglob("results.json")
    }


def test_an_entry_runs_where_its_data_are_and_continues_from_its_file(run, tmp_path):
    write_fedbn(tmp_path / "data/office_caltech_10", "office_caltech_10", OFFICE, train=10, test=3)
    out = tmp_path / "out"
    tiny = ("--set", "network=lenet5", "image_size=32")
    code, _, err = run(*arguments("fedfa+:table11", tmp_path / "data", out), *tiny)
    assert code == 0, err
    assert "is run without domainnet_10, mini_prostate_mri_slices, whose data are not in" in err
    made = finished(out)
    assert {path.split("/")[:2][1] for path in made} == {"fedfa"}
    variances = {record["config"]["methods"][0]["args"].get("variance") for record in made.values()}
    assert variances == {None, "direct"}
    again = make_experiment(out / "office_caltech_10/experiment.yml", {})
    assert (again.entry, again.protocol) == ("fedfa+:table11", "office_caltech_10")
    assert len(again.comparisons()) == 2
