"""Images and models in a report: worst and best cases."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from matplotlib import colors
from monai.networks.nets import UNet
from running import TINY_NETWORK

from medfedaug.analysis import write_report
from medfedaug.data.sites import find_sites
from medfedaug.research.comparison.report_images import CaseView, case_picture, extreme_cases
from medfedaug.runs.evaluate import open_model
from medfedaug.simulate import configure, simulate


@pytest.fixture(scope="module")
def trained(phantom_dir, tmp_path_factory):
    """A run of one round on the phantom, with a site that did not train."""
    out = tmp_path_factory.mktemp("run") / "fedrdn"
    config = configure(
        find_sites(phantom_dir),
        methods=({"name": "fedrdn", "args": {}},),
        **TINY_NETWORK,
        rounds=1,
        batch_size=4,
    )
    simulate(phantom_dir, out, config, engine="inprocess", device="cpu")
    return out


# ------------------------------------------------------------------ cases


def test_worst_and_best_are_those_of_the_results(trained, phantom_dir):
    results = json.loads((trained / "results.json").read_text())
    for trainer, _ in open_model(trained / "global_model.pt", phantom_dir, device="cpu"):
        group = "unseen" if trainer.name == "site_C" else "sites"
        scores = results["test"][group][trainer.name]["cases"]
        views = extreme_cases(trainer, scores)
        ranks = ["worst", "best"] if len(scores) > 1 else ["only"]
        assert [view.rank for view in views] == ranks
        assert views[0].score == min(scores.values()) == scores[views[0].case]
        assert views[-1].score == (max(scores.values()) if len(scores) > 1 else views[0].score)


def test_the_slice_is_the_one_with_most_truth(trained, phantom_dir):
    trainer, _ = next(open_model(trained / "global_model.pt", phantom_dir, device="cpu"))
    case = trainer.folder.cases["test"][0]
    view = extreme_cases(trainer, {case.name: 0.5})[0]
    image, truth = trainer.folder.load_case(case, "scale")
    normalised = trainer.evaluation_transform()({"image": image})["image"]
    predicted = trainer.task.logits(trainer.network, normalised).argmax(dim=0, keepdim=True)
    sizes = [int(truth[..., z].count_nonzero()) for z in range(truth.shape[-1])]
    largest = sizes.index(max(sizes))
    assert np.array_equal(view.truth, truth[0, :, :, largest].numpy())
    assert np.array_equal(view.prediction, predicted[0, :, :, largest].numpy())
    assert view.image.shape == view.truth.shape
    assert (view.image.min(), view.image.max()) == (0, 1)


def test_case_picture_outlines_truth_and_prediction():
    truth, predicted = np.zeros((12, 8), np.uint8), np.zeros((12, 8), np.uint8)
    truth[2:5, 3:6], predicted[0:4, 4:8] = 1, 2  # the prediction touches the border
    views = [
        CaseView("A", f"p{k}", rank, 0.25, np.ones((12, 8)), truth, predicted)
        for k, rank in enumerate(["worst", "best"])
    ]
    figure = case_picture(views)
    assert [panel.get_title() for panel in figure.axes] == [
        "worst at A\nDice 0.250",
        "case\np0",
        "best at A\nDice 0.250",
        "case\np1",
    ]
    plain, overlaid = figure.axes[:2]
    assert not plain.collections
    outlines = overlaid.collections
    assert [colors.to_hex(o.get_edgecolor()[0]).upper() for o in outlines] == ["#56B4E9", "#E69F00"]
    # First axis to the right, second upwards; closed also along the border.
    for outline, (left, right, low, high) in zip(
        outlines, [(1.5, 4.5, 2.5, 5.5), (-0.5, 3.5, 3.5, 7.5)], strict=True
    ):
        (path,) = outline.get_paths()
        assert (path.vertices.min(0).tolist(), path.vertices.max(0).tolist()) == ([left, low], [right, high])
        assert path.vertices[0].tolist() == path.vertices[-1].tolist()


# ------------------------------------------------------------------ the page


@pytest.mark.usefixtures("drawn")
def test_report_with_data_shows_cases(trained, phantom_dir, tmp_path):
    out = write_report([trained], tmp_path / "r.html", data=phantom_dir, device="cpu")
    text = out.read_text()
    assert "Worst and best case of each site" in text
    assert text.count("data:image/jpeg;base64,") == 1
    assert 'class="photo"' in text
    assert not re.search(r"https?:|//[a-z]", re.sub(r"base64,[\w+/=]+", "", text))


def test_no_picture_of_cases_that_the_run_was_not_tested_with(trained, phantom_dir, tmp_path):
    """Of another split, the model may have been trained with them."""
    other = tmp_path / "data"
    shutil.copytree(phantom_dir, other)
    for listing in other.glob("*/dataset.json"):
        content = json.loads(listing.read_text())
        if content["training"]:
            content["training"], content["test"] = content["test"], content["training"]
        listing.write_text(json.dumps(content))
    text = write_report([trained], tmp_path / "r.html", data=other, device="cpu").read_text()
    assert text.count("these are not the test cases that the run was tested with") == 1
    assert "image/jpeg" not in text


def test_report_goes_on_without_a_model(trained, phantom_dir, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "results.json").write_text((trained / "results.json").read_text())
    text = write_report([alone], tmp_path / "r.html", data=phantom_dir, device="cpu").read_text()
    assert text.count(" has no global_model.pt.") == 1


def test_a_network_that_cannot_run_on_prepared_images_is_named_in_one_line(
    trained, phantom_dir, tmp_path, monkeypatch
):
    """A script's loop may train a network on images that it prepares in another way."""

    def forward(network: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"expected axes z, y, x\ngot {tuple(images.shape)}")

    monkeypatch.setattr(UNet, "forward", forward)
    write_report([trained], tmp_path / "report.html", data=phantom_dir, device="cpu")
    text = (tmp_path / "report.html").read_text()
    reason = (
        "the network cannot run on images as medfedaug prepares them (RuntimeError: expected axes z, y, x"
    )
    assert text.count(f"No picture: {reason}") == 1


def test_a_run_that_kept_layers_at_the_sites_is_shown_with_them(trained, phantom_dir, tmp_path):
    config = configure(
        find_sites(phantom_dir),
        methods=({"name": "fedbn", "args": {}},),
        **TINY_NETWORK,
        rounds=1,
        batch_size=4,
    )
    results = simulate(phantom_dir, tmp_path / "run", config, engine="inprocess", device="cpu")
    both = [trained, tmp_path / "run"]
    text = write_report(both, tmp_path / "both.html", data=phantom_dir, device="cpu").read_text()
    case = text.index("where fedrdn and fedbn differ most")
    assert text.index("Test score by site and method") < case < text.index("training sites: ")
    text = write_report(both[1:], tmp_path / "r.html", data=phantom_dir, device="cpu").read_text()
    name, score = min(results["test"]["sites"]["site_A"]["cases"].items(), key=lambda found: found[1])
    assert f"at site_A: {name}, {score:.3f}" in text
    assert "at site_C" not in text  # it did not train
