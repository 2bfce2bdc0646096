"""Histogram standardisation against Nyúl, Udupa and Zhang, IEEE TMI 2000: landmarks and the lines between."""

from __future__ import annotations

import json

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from reference import UNEVEN, assert_models, assert_tested, descend, federated_averaging, pixels

from medfedaug import functional as F
from medfedaug.data.sites import open_site
from medfedaug.federation import FederationServer, Site, SiteTrainer, run_in_process
from medfedaug.federation.server.output import write_run
from medfedaug.methods import build_methods
from medfedaug.methods.base import ServerContext
from medfedaug.privacy import PrivacyPolicy
from medfedaug.runs.evaluate import evaluate_model
from medfedaug.transforms import StandardizeHistogram, StandardizeHistogramd

SITES = ["site_A", "site_B", "site_C"]


def landmarks(image):
    """Percentiles of what is brighter than the darkest voxel in some channel, (C, 11)."""
    flat = image.reshape(len(image), -1)
    inside = flat[:, (flat > flat.min(axis=1, keepdims=True)).any(axis=0)]
    ordered, result = np.sort(inside, axis=1), []
    for share in (0.01, *np.arange(0.1, 0.95, 0.1), 0.99):
        place = share * (ordered.shape[1] - 1)
        below = int(np.floor(place + 1e-9))
        above = min(below + 1, ordered.shape[1] - 1)
        result.append(ordered[:, below] + (place - below) * (ordered[:, above] - ordered[:, below]))
    return np.stack(result, axis=1)


def standard_scale(images_by_site):
    """The mean over the sites of the mean over the images, on the scale from 0 to 1."""
    sites = []
    for images in images_by_site:
        marks = np.stack([landmarks(image) for image in images])
        low, high = marks[..., :1], marks[..., -1:]
        with np.errstate(invalid="ignore"):
            sites.append(((marks - low) / (high - low)).mean(axis=0))
    return np.nanmean(sites, axis=0)


def standardised(image, scale):
    """Value by value, in each channel: the line whose landmarks are on both sides."""
    marks = landmarks(image)
    result = np.empty(image.shape)
    for out, values, own, goal in zip(result, image, marks, scale, strict=True):
        lines = [j for j in range(len(own) - 1) if own[j + 1] > own[j]]
        if not lines:
            out[...] = 0
            continue
        for where, value in np.ndenumerate(values):
            j = max([lines[0], *(k for k in lines if own[k] <= value)])
            out[where] = goal[j] + (value - own[j]) * (goal[j + 1] - goal[j]) / (own[j + 1] - own[j])
    return result


def all_standardised(images, scale):
    return torch.from_numpy(np.stack([standardised(image, scale) for image in images.numpy()]))


def test_images_get_the_landmarks_of_the_standard_histogram(federate):
    sizes = {"A": 5, "B": 10, "C": 15, "D": 5}
    run = federate("nyul", plan=UNEVEN, sizes=sizes, holdout=("D",))
    scale = standard_scale([pixels(run, site).numpy() for site in "ABC"])
    assert not np.allclose(scale[0], scale[1])
    expected = {site: all_standardised(pixels(run, site), scale) for site in "ABC"}
    for (site, _), batches in run.batches.items():
        batches.assert_images(expected[site])

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    model = rounds[run.server.selected_round - 1].model
    for site in sizes:  # also the one that never trained
        assert_tested(run, site, model, lambda images: all_standardised(images, scale))


@pytest.fixture
def volumes(make_site):
    """Three sites of volumes of three classes, whose scanners have other contrast; slices differ too."""
    for number, name in enumerate(SITES):
        folder = make_site(name, cases=(2, 1, 1))
        for file in sorted(folder.glob("images/*")):
            image = nibabel.load(file)
            values = np.asarray(image.dataobj) * np.array([1.0, 2.0, 0.5, 3.0])
            changed = (values / 100) ** (1 + number) * 50
            nibabel.save(nibabel.Nifti1Image(changed.astype(np.float32), image.affine), file)
        for file in sorted(folder.glob("labels/*")):
            image = nibabel.load(file)
            label = np.asarray(image.dataobj).copy()
            label[6:9, 4:9][label[6:9, 4:9] == 1] = 2
            nibabel.save(nibabel.Nifti1Image(label, image.affine), file)
        content = json.loads((folder / "dataset.json").read_text())
        content["labels"] = {"0": "background", "1": "oedema", "2": "core"}
        (folder / "dataset.json").write_text(json.dumps(content))
    return folder.parent


def voxels(folder, split="training"):
    """The volumes of a site as its files have them, (1, X, Y, Z) each."""
    return [
        np.asarray(nibabel.load(case.image).dataobj, np.float64)[None]
        for case in open_site(folder).cases[split]
    ]


@pytest.mark.parametrize("intensity", ["by_method", "scale"])
def test_slices_are_standardised_by_the_landmarks_of_their_volume(federate, volumes, intensity):
    """Scaling each volume first makes no difference."""
    run = federate(
        "nyul",
        sizes=dict.fromkeys(SITES, 0),
        folder=volumes,
        network="reference_segmenting",
        network_args={},
        augmentation="none",
        rounds=1,
        intensity=intensity,
    )
    arguments = {site: voxels(volumes / site) for site in SITES}
    scale = standard_scale(arguments.values())
    for (site, _), batches in run.batches.items():
        whole = [standardised(volume, scale) for volume in arguments[site]]
        alone = [standardised(v[..., z], scale) for v in arguments[site] for z in (1, 2)]
        slices = torch.from_numpy(np.stack([v[..., z] for v in whole for z in (1, 2)]))
        batches.assert_images(slices)
        assert np.abs(slices.numpy() - np.stack(alone)).max() > 0.1


def test_a_channel_without_variation_becomes_zero_and_has_no_vote(federate, make_photos, tmp_path):
    for name, per_class in {"A": 5, "B": 6}.items():
        make_photos(name, per_class, size=8)
    for file in (tmp_path / "photos/B").rglob("*.png"):
        values = np.asarray(Image.open(file)).copy()
        values[..., 2] = 7
        Image.fromarray(values).save(file)
    run = federate("nyul", sizes={"A": 5, "B": 6}, rounds=1, folder=tmp_path / "photos")
    images = {site: pixels(run, site) for site in "AB"}
    assert float(images["B"][:, 2].std()) == 0
    scale = standard_scale([one.numpy() for one in images.values()])
    for site, arguments in images.items():
        run.batches[site, 1].assert_images(all_standardised(arguments, scale))


def test_few_grey_levels_leave_no_line_between_equal_landmarks():
    image = np.array([[[0, 1, 1, 1, 1, 1, 1, 5, 9, 9]]], float)
    scale = np.linspace(0, 1, 11)[None] ** 2
    result = StandardizeHistogram(scale)(torch.from_numpy(image)).double().numpy()
    np.testing.assert_allclose(result, standardised(image, scale), atol=1e-6)
    assert np.isfinite(result).all()
    assert (np.diff(result[0, 0]) >= 0).all()


def prepared(config, data_dir, policy):
    """Return a site's reply before training."""
    trainer = SiteTrainer(config, data_dir, "cpu", policy=policy)
    return Site("site_A", trainer).answer(FederationServer(config).prepare())


def test_landmarks_that_are_none_are_refused():
    transform = StandardizeHistogramd("image", [np.linspace(0, 1, 11)])
    image = torch.rand(1, 20, 20)
    expected = transform({"image": image})["image"]
    own = F.histogram_landmarks(image).numpy()
    assert torch.equal(transform({"image": image, "landmarks": own})["image"], expected)
    with pytest.raises(ValueError, match=r"landmarks of shape \(1, 3\), expected \(1, 11\)"):
        transform({"image": image, "landmarks": [[10.0, 20.0, 30.0]]})  # a point in the body
    image[0, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        transform({"image": image})


def test_landmarks_of_float64_are_not_rounded_and_their_map_has_a_gradient():
    image = 1e6 + torch.rand(1, 1000, dtype=torch.float64) / 100  # less than float32 resolves
    marks = F.histogram_landmarks(image)
    np.testing.assert_allclose(marks, landmarks(image.numpy()), rtol=0, atol=1e-9)
    scale = torch.linspace(0, 1, 11, dtype=torch.float64)[None]
    image.requires_grad_()
    (slope,) = torch.autograd.grad(F.map_landmarks(image, F.histogram_landmarks(image), scale).sum(), image)
    lines = 0.1 / marks.diff(dim=1)[0]
    own = (image.detach() >= marks.T).sum(dim=0).sub(1).clamp(0, 9)
    torch.testing.assert_close(slope[0], lines[own], rtol=1e-6, atol=0)


def test_what_leaves_a_site_passes_its_guard(tiny_config, phantom_dir):
    config = tiny_config("nyul", rounds=1)
    plain = prepared(config, phantom_dir, PrivacyPolicy(min_images=1)).payload
    (key,) = plain
    values = {}
    for noise in (1e-7, 1.0):
        policy = PrivacyPolicy(min_images=1, noise_multiplier=noise, epsilon=1e30)
        values[noise] = prepared(config, phantom_dir, policy).payload[key]
    torch.testing.assert_close(values[1e-7], plain[key], atol=1e-5, rtol=1e-5)
    assert float((values[1.0] - plain[key]).abs().max()) > 1e-3
    assert float(values[1.0].min()) >= 0
    torch.testing.assert_close(values[1.0].sum(dim=1), torch.ones(len(plain[key])))
    refused = prepared(config, phantom_dir, PrivacyPolicy(min_images=100))
    assert refused.payload == {}
    assert "nyul's statistics would summarise" in refused.error


def test_a_model_is_evaluated_with_the_scale_that_it_was_trained_with(tiny_config, phantom_dir, tmp_path):
    sites = ["site_A", "site_B", "site_C"]
    server = run_in_process(tiny_config("nyul"), phantom_dir, sites, "cpu")
    write_run(tmp_path, server)
    assert torch.load(tmp_path / "global_exchange.pt", weights_only=True).keys() == {"nyul/steps"}
    evaluation = evaluate_model(tmp_path / "global_model.pt", phantom_dir, device="cpu")
    test = server.results()["test"]
    expected = {**test["sites"], **test["unseen"]}
    assert {name: scores["dice"] for name, scores in evaluation["sites"].items()} == {
        name: expected[name]["dice"] for name in sites
    }


def test_what_is_no_scale_is_refused():
    server = build_methods([{"name": "nyul"}])[0].before_training(ServerContext(torch.nn.Identity(), 1))
    good = torch.full((1, 10), 0.1)
    for bad in (good * 2, good - torch.eye(10)[:1] * 0.2, torch.full((1, 10), 0.05)):
        with pytest.raises(ValueError, match="add up to 1"):
            server.check({"steps": bad})
    server.check({"steps": good})
    server.check({"steps": good * 0})
