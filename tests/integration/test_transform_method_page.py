"""`docs/methods.md`: a method of one's own that is a transform, as the page says."""

import sys

import pytest
import torch
from installed_package import install
from running import TINY_OPTIONS

pytestmark = pytest.mark.slow  # pip, in processes

HEADING = "## The most common case: a transform"


@pytest.fixture
def contrast(tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    target = install("methods.md", HEADING, "contrast_method", tmp_path / "source", tmp_path / "site")
    monkeypatch.syspath_prepend(str(target))
    yield target
    sys.modules.pop("contrast_method", None)


def test_the_transform_of_the_page_trains_repeats_and_has_options(contrast, phantom_dir, run, tmp_path):
    def model(name, methods, *more):
        out = tmp_path / name
        code, _, err = run(
            *("simulate", "--data", phantom_dir, "--methods", methods, "--rounds", 1, "--local-epochs", 1),
            *(*TINY_OPTIONS, "--engine", "inprocess", "--no-report", "--out", out),
            *more,
        )
        assert code == 0, err
        return torch.load(out / "final_model.pt", weights_only=True)

    def same(first, second):
        return all(torch.equal(first[key], second[key]) for key in first)

    own = model("own", "contrast")
    assert same(own, model("again", "contrast"))
    plain = model("plain", "fedavg")
    assert not same(own, plain)
    assert same(model("never", "contrast", "--set", "contrast.prob=0"), plain)
    out = run("methods", "contrast")[1]
    assert "strength" in out
    assert "the package contrast-method" in " ".join(out.split())
