"""What the network is shown: one word means one thing, it is recorded, and no comparison hides it."""

import json

import pytest
import torch
from running import TINY_NETWORK

from medfedaug.analysis import summary_table
from medfedaug.config.run import RunConfig
from medfedaug.data.sites import open_site, site_statistics
from medfedaug.methods import parse_methods
from medfedaug.runs.load_results import load_run
from medfedaug.simulate import simulate
from medfedaug.statistics import load_statistics


def weights(folder):
    return torch.load(folder / "global_model.pt", weights_only=True)


def same(one, other):
    return all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.fixture(scope="module")
def runs(phantom_dir, tmp_path_factory):
    """Runs of one round by method and setting, on volumes whose scanners differ in gain."""
    made = {}

    def make(methods, intensity, **changes):
        name = (methods, intensity, *sorted(changes.items()))
        if name not in made:
            out = tmp_path_factory.mktemp("run") / f"{methods}-{intensity}"
            values = {**TINY_NETWORK, "rounds": 1, "batch_size": 4, **changes}
            config = RunConfig(methods=tuple(parse_methods(methods)), intensity=intensity, **values)
            simulate(phantom_dir, out, config, engine="inprocess", device="cpu")
            made[name] = out
        return made[name]

    return make


def test_raw_is_as_stored_and_scale_is_scaled_for_every_method(runs):
    assert not same(weights(runs("fedavg", "raw")), weights(runs("fedavg", "scale")))
    assert not same(weights(runs("fedrdn", "raw")), weights(runs("fedrdn", "scale")))
    # What went under the name of raw: a method that normalises takes images as stored, the others do not.
    assert same(weights(runs("fedavg", "by_method")), weights(runs("fedavg", "scale")))
    assert same(weights(runs("fedrdn", "by_method")), weights(runs("fedrdn", "raw")))


@pytest.mark.parametrize(
    ("methods", "intensity", "scaling", "by", "words"),
    [
        ("fedavg", "raw", "none", None, "intensities as stored"),
        ("fedavg", "by_method", "each volume", None, "each volume scaled to [0, 1]"),
        ("fedrdn", "by_method", "none", "fedrdn", "intensities as stored, normalised by fedrdn"),
        ("fedrdn", "scale", "each volume", "fedrdn", "each volume scaled to [0, 1], normalised by fedrdn"),
    ],
)
def test_the_input_that_a_run_sees_is_recorded(
    runs, phantom_dir, methods, intensity, scaling, by, words, tmp_path
):
    folder = runs(methods, intensity)
    results = json.loads((folder / "results.json").read_text())
    assert results["input"] == {"scaling": scaling, "normalised_by": by}
    assert str(load_run(folder).input) == words
    assert words in (folder / "report.html").read_text()
    stored = "raw" if scaling == "none" else "scale"
    assert json.loads((folder / "statistics.json").read_text())["intensity"] == stored
    expected = site_statistics(open_site(phantom_dir / "site_A"), stored)
    torch.testing.assert_close(load_statistics(folder / "statistics.json")["site_A"].mean, expected.mean)


def test_different_input_is_never_compared_without_saying_so(runs, run, tmp_path):
    pair = [runs("fedavg", "by_method"), runs("fedrdn", "by_method")]
    out = run.ok("report", *pair, "--out", tmp_path / "page.html", "--tables", tmp_path / "tables")
    said = "Not the same input as fedavg (fedavg: each volume scaled to [0, 1]; fedrdn: intensities as stored"
    assert said in " ".join(out.split())
    for file in ("page.html", "tables/scores.md"):
        assert said in (tmp_path / file).read_text()
    assert "| fedrdn ‡ |" in (tmp_path / "tables/scores.md").read_text()
    assert "each volume scaled to [0, 1]" in (tmp_path / "tables/scores.csv").read_text()

    out = run.ok("report", runs("fedavg", "scale"), runs("fedrdn", "scale"), "--out", tmp_path / "page.html")
    assert "‡" not in out + (tmp_path / "page.html").read_text()


@pytest.mark.all_layers
def test_a_method_is_compared_with_the_fedavg_that_saw_the_same_input(runs):
    folders = [runs(*name) for name in (("fedavg", "by_method"), ("fedavg", "raw"), ("fedrdn", "by_method"))]
    loaded = [load_run(folder) for folder in folders]
    # The other FedAvg is in the table beside the first one, and is marked itself.
    assert [row.other_input for row in summary_table(loaded).rows] == [False, True, False]
    assert [row.other_input for row in summary_table([loaded[0], loaded[2]]).rows] == [False, True]
    # Two words for one input, for instance after the default has changed.
    scaled = [load_run(runs("fedavg", "scale")), load_run(runs("fedfa", "by_method"))]
    assert not any("‡" in note for note in summary_table(scaled).notes)
    assert [row.other_input for row in summary_table(scaled).rows] == [False, False]
