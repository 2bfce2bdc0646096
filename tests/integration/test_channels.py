"""Images in several files, one a channel, and sites that lack a channel of the federation."""

import json

import nibabel
import numpy as np
import pytest
import torch
from running import TINY_NETWORK, TINY_OPTIONS

from medfedaug.config.run import RunConfig
from medfedaug.data.preparation.cache import keep_decoded
from medfedaug.data.sites import arrange, check_federation, find_sites, site_statistics
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods.contexts import SiteContext
from medfedaug.methods.fedrdn import FedRDNServer, FedRDNSite
from medfedaug.statistics import load_statistics, usable_pairs
from medfedaug.transforms import FedRDN


def in_files(folder, names=("flair", "t2")):
    """Write each channel of a site's volumes to a file of its own, and list them."""
    content = json.loads((folder / "dataset.json").read_text())
    for row in (row for split in ("training", "validation", "test") for row in content[split]):
        stored = nibabel.load(folder / row["image"])
        voxels = np.asarray(stored.dataobj)
        number = row["image"].split("/")[1].split(".")[0]
        row["image"] = [f"images/{number}_{name}.nii.gz" for name in names]
        for index, file in enumerate(row["image"]):
            nibabel.save(nibabel.Nifti1Image(voxels[..., index], stored.affine), folder / file)
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def test_files_are_channels_each_of_a_scale_of_its_own(make_site):
    together = VolumeFolder.open(make_site("A", channels=2))
    stored = [together.load_case(case) for case in together.cases["training"]]
    apart = VolumeFolder.open(in_files(together.path))
    assert apart.check_files() == 2
    assert [case.name for case in apart.cases["training"]] == ["0_flair", "1_flair"]
    assert [path.name for path in apart.cases["test"][0].files] == ["3_flair.nii.gz", "3_t2.nii.gz"]
    for case, (image, label) in zip(apart.cases["training"], stored, strict=True):
        channels, its_label = apart.load_case(case)
        assert torch.equal(channels, image)
        assert torch.equal(its_label, label)
        low, high = image.flatten(1).amin(1), image.flatten(1).amax(1)
        expected = (image - low.view(2, 1, 1, 1)) / (high - low).view(2, 1, 1, 1)
        torch.testing.assert_close(apart.load_image(case, "scale"), expected)


def test_a_constant_file_beside_another_is_zero_and_images_of_constant_files_are_refused(make_site):
    site = VolumeFolder.open(in_files(make_site("A", channels=2)))
    case = site.cases["training"][0]
    for path in reversed(case.files):
        nibabel.save(nibabel.Nifti1Image(np.full((16, 16, 4), 7, np.float32), np.eye(4)), path)
        if path is case.files[1]:
            scaled = site.load_image(case, "scale")
            assert bool((scaled[1] == 0).all())
            assert float(scaled[0].max()) == 1
    with pytest.raises(DataError, match=r"site A, .*0_flair\.nii\.gz: is constant: every voxel is 7"):
        site.load_image(case)


# --- A site without a channel -----------------------------------------------------------------------------


def named(folder, *names, key="channel_names"):
    content = json.loads((folder / "dataset.json").read_text())
    content[key] = {str(index): name for index, name in enumerate(names)}
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def hospitals(make_site):
    """A has FLAIR and T2, B lacks T2, C has them in another order and as nobody else writes them."""
    named(make_site("A", channels=2), "FLAIR", "T2")
    named(make_site("B"), "FLAIR", key="modality")
    return named(make_site("C", channels=2), "t2", "Flair").parent


def options(data, out, *extra):
    return (
        *("simulate", "--data", data, "--out", out, "--rounds", 2, "--device", "cpu", "--threads", 1),
        *TINY_OPTIONS,
        *("--no-report", "--engine", "inprocess", *extra),
    )


def test_channels_find_their_places_by_name_and_a_missing_one_is_zero(hospitals):
    a, b, c = arrange(find_sites(hospitals))
    assert check_federation([a, b, c])[1] == 2
    assert (a.channel_places, b.channel_places, c.channel_places) == ((), (0,), (1, 0))
    assert [site.missing_channels for site in (a, b, c)] == [(), (1,), ()]
    image = b.load_image(b.cases["test"][0], "scale")
    assert image.shape == (2, 16, 16, 4)
    assert bool((image[1] == 0).all())
    assert (float(image[0].min()), float(image[0].max())) == (0, 1)
    plain = VolumeFolder.open(hospitals / "C")
    assert torch.equal(c.load_image(c.cases["test"][0]), plain.load_image(plain.cases["test"][0]).flip(0))
    with keep_decoded(2**24):  # what is kept is told apart
        assert plain.load_image(plain.cases["test"][0]).ne(c.load_image(c.cases["test"][0])).any()
    assert plain.identity(plain.cases["test"][0]) != c.identity(c.cases["test"][0])


def test_a_site_without_a_channel_trains_and_is_scored(run, hospitals, tmp_path):
    out = tmp_path / "out"
    code, _, err = run(*options(hospitals, out, "--methods", "fedrdn,fedfa"))
    assert code == 0, err
    assert "B: has no channel T2; it is 0 there" in err
    results = json.loads((out / "results.json").read_text())
    assert results["config"]["channel_names"] == ["FLAIR", "T2"]
    assert results["config"]["in_channels"] == 2
    assert results["input"]["missing_channels"] == {"B": "T2"}
    assert "constant_channels" not in results["input"]
    assert all("train_loss" in results["rounds"][1]["sites"][site] for site in "ABC")
    assert set(results["test"]["sites"]) == set("ABC")
    saved = load_statistics(out / "statistics.json")
    assert saved["B"].constant == (1,)
    code, printed, _ = run(
        "evaluate", "--model", out / "global_model.pt", "--data", hospitals / "B", "--device", "cpu"
    )
    assert code == 0
    assert f"{results['test']['sites']['B']['dice']:.4f}" in printed


def test_what_the_network_sees_of_a_missing_channel(hospitals):
    """At B it is 0 whoever's pair is drawn; at A the pair of B has for it the average of A's and C's."""
    sites = {site.name: site for site in arrange(find_sites(hospitals))}
    pairs = {name: site_statistics(site, "scale") for name, site in sites.items()}
    image = sites["B"].load_image(sites["B"].cases["training"][0], "scale")
    own = FedRDN(usable_pairs(pairs, own=pairs["B"]))
    for _ in range(6):
        assert bool((own(image)[1] == 0).all())
    assert bool((FedRDN(pairs, site="B")(image)[1] == 0).all())
    drawn = usable_pairs(pairs, own=pairs["A"])["B"]
    for values, of in ((drawn.mean, "mean"), (drawn.std, "std")):
        expected = (getattr(pairs["A"], of)[1] + getattr(pairs["C"], of)[1]) / 2
        assert float(values[1]) == pytest.approx(float(expected))
    assert float(drawn.std[0]) == float(pairs["B"].std[0])


def test_noise_leaves_a_missing_channel_missing(hospitals):
    """Its absence is in no patient's image: the pair stays 0, and nobody draws noise in its place."""
    (b,) = (site for site in arrange(find_sites(hospitals)) if site.name == "B")
    part = FedRDNSite(SiteContext("B", torch.nn.Identity(), missing_channels=b.missing_channels))
    noisy = {"mean": torch.tensor([0.4, 0.1]), "std": torch.tensor([0.2, 0.05])}
    sent = part.privatised(noisy, 12)
    assert sent["mean"].tolist() == pytest.approx([0.4, 0.0])
    assert sent["std"].tolist() == pytest.approx([0.2, 0.0])
    assert noisy["std"][1] > 0
    FedRDNServer(2).check(sent)


def test_other_names_with_as_many_channels_are_refused(run, hospitals, tmp_path):
    named(hospitals / "C", "FLAIR", "T1")
    code, _, err = run(*options(hospitals, tmp_path / "out", "--methods", "fedavg"))
    assert code == 2
    words = "site C, {}: has the channel 'T1', but the 2 of site A are FLAIR, T2. Name a channel alike at all"
    assert words.format(hospitals / "C/dataset.json") in " ".join(err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channel_names": ["FLAIR"]}, "'channel_names' does not map the channels' indices to names"),
        ({"channel_names": {"0": "FLAIR", "2": "T2"}}, "Give 0, 1, 2, ... each a name of its own"),
        ({"modality": {"0": "T2", "1": "t2"}}, "'modality' is {0: 'T2', 1:"),
        ({"modality": {"0": "T2"}, "channel_names": {"0": "T1"}}, "'channel_names' and 'modality' differ"),
        ({"channel_names": {"0": "FLAIR", "1": "T2"}}, "names 2 channels; the images have 1. Correct"),
    ],
)
def test_odd_names_of_channels_are_one_line(run, make_site, tmp_path, change, words):
    folder = make_site("B")
    make_site("A")
    content = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**content, **change}))
    code, _, err = run(*options(folder.parent, tmp_path / "out", "--methods", "fedavg"))
    message = " ".join(err.split())
    assert code == 2
    assert message.startswith("medfedaug: site B, ")
    assert words in message
    assert not (tmp_path / "out").exists()


def test_a_job_says_the_channels_by_name(run, hospitals, tmp_path):
    """`export` takes the names, and a site that is opened for the job finds its places."""
    code, _, err = run(
        *("export", "--methods", "fedrdn", "--rounds", 1, "--min-sites", 2, "--out", tmp_path / "job"),
        *("--channel-name", "FLAIR", "--channel-name", "T2", *TINY_OPTIONS),
        *("--classes", "background,lesion"),
    )
    assert code == 0, err
    texts = "".join(path.read_text() for path in (tmp_path / "job").rglob("*.json"))
    assert '"channel_names": ["FLAIR", "T2"]' in " ".join(texts.split()).replace("[ ", "[").replace(" ]", "]")
    config = RunConfig(channel_names=("FLAIR", "T2"), classes=("background", "lesion"), **TINY_NETWORK)
    assert config.in_channels == 2
    trainer = SiteTrainer(config, hospitals / "B", "cpu")
    trainer.open("B")
    assert trainer.folder.missing_channels == (1,)
    with pytest.raises(ConfigError, match="3 channels need as many different names"):
        RunConfig(channel_names=("FLAIR", "T2"), in_channels=3)
