"""Photographs in one folder per class: splits, samples, accuracy, and the published lists."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from medfedaug.config.run import RunConfig
from medfedaug.data.images import ImageFolder
from medfedaug.data.sites import check_federation, find_sites, open_site, site_statistics
from medfedaug.errors import ConfigError, DataError
from medfedaug.federation import SiteTrainer
from medfedaug.federation.messages.messages import PREPARE, Request
from medfedaug.federation.site.site import Site
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure
from medfedaug.tasks import ClassificationTask, EvaluationCase, make_task


def test_seeded_split_is_by_class_disjoint_and_always_the_same(make_photos):
    site = open_site(make_photos("A", per_class=10))
    assert isinstance(site, ImageFolder)
    names = {split: {case.name for case in cases} for split, cases in site.cases.items()}
    assert {split: len(found) for split, found in names.items()} == {
        "training": 12,
        "validation": 4,
        "test": 4,
    }
    assert not names["training"] & names["validation"] | names["training"] & names["test"]
    for cases in site.cases.values():
        assert {case.label for case in cases} == {"cat", "dog"}
    assert open_site(site.path).cases == site.cases


def test_published_lists_are_taken_in_their_order(make_photos):
    folder = make_photos("A", per_class=5)
    (folder.parent / "splits").mkdir()
    files = [[f"A/{label}/{i}.png", label] for label in ("dog", "cat") for i in range(5)]
    (folder.parent / "splits/A_train.json").write_text(json.dumps(files[:7]))
    (folder.parent / "splits/A_test.json").write_text(json.dumps(files[7:]))
    site = open_site(folder)
    assert [case.name for case in site.cases["training"]] == [f[0] for f in files[:4]]
    assert [case.name for case in site.cases["validation"]] == [f[0] for f in files[4:7]]
    assert [case.name for case in site.cases["test"]] == [f[0] for f in files[7:]]


def test_lists_say_whose_the_images_are_and_patients_stay_together(make_photos):
    """Ten images to train and validate; of the six that train, two are of patients with images after them."""
    folder = make_photos("A", per_class=7)
    (folder.parent / "splits").mkdir()
    whose = [7, " 7 ", "b", "c", None, "d", "e", "7", "b", "f"]
    files = [[f"A/{label}/{i}.png", label] for i in range(7) for label in ("dog", "cat")]
    train = [[*file, patient] for file, patient in zip(files, whose, strict=False)]
    lists = {part: folder.parent / f"splits/A_{part}.json" for part in ("train", "test")}
    lists["train"].write_text(json.dumps(train))
    lists["test"].write_text(json.dumps([[*files[10], "g"], [*files[11], "g"], files[12], files[13]]))
    site = open_site(folder)
    names = [file[0] for file in files]
    assert [c.name for c in site.cases["training"]] == [*names[:6], names[7], names[8]]
    assert [c.name for c in site.cases["validation"]] == [names[6], names[9]]
    assert site.cases_of_patients("training") == (3, 2, 1, 1, 1)
    assert site.patients("test") == {names[10]: 0, names[11]: 0, names[12]: 1, names[13]: 2}
    other = open_site(make_photos("B", per_class=5))
    config = configure([site, other], methods=parse_methods("fedrdn"), network="lenet5", image_size=32)
    trainer = SiteTrainer(config, folder, "cpu", privacy=SitePrivacy(PrivacyPolicy(min_images=6)))
    error = Site("A", trainer).answer(Request(PREPARE)).error
    assert "statistics would summarise 5 patients, and this site needs at least 6" in error
    lists["test"].write_text(json.dumps([[*files[10], "d"], files[11]]))
    with pytest.raises(DataError, match=r"patient d is in test, and in training with A/cat/2\.png"):
        open_site(folder)


def test_statistics_and_grey_images(make_photos):
    folder = make_photos("A", per_class=5)
    Image.fromarray(np.full((40, 40), 7, np.uint8)).save(folder / "cat/0.png")
    site = open_site(folder)
    found = site_statistics(site)
    pixels = [site.load_image(case).double() for case in site.cases["training"]]
    torch.testing.assert_close(found.mean, torch.stack([p.mean((1, 2)) for p in pixels]).mean(0))
    assert found.num_channels == 3


def test_faults(make_photos, make_site):
    folder = make_photos("A", per_class=5)
    site = open_site(folder)
    site.cases["training"][0].image.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"site A, .*cannot be read"):
        [site.load_image(case) for case in site.cases["training"]]
    make_site("B", root=folder.parent, channels=3)
    with pytest.raises(DataError, match=r"site B.*segmentation, site A for classification"):
        check_federation([open_site(folder), open_site(folder.parent / "B"), open_site(folder, name="C")])
    with pytest.raises(DataError, match="class 'cat' is not among"):
        ClassificationTask(["bird", "dog"], scale=True).check_site(site)
    samples = [{"image": torch.zeros(3, n, n), "label": torch.tensor(0)} for n in (4, 5)]
    with pytest.raises(ConfigError, match="--image-size"):
        ClassificationTask(["a", "b"], scale=True).collate(samples)


def test_faults_of_folders_and_lists_name_site_and_file(make_photos):
    folder = make_photos("A", per_class=1)
    with pytest.raises(DataError, match=r"site A, .*A/splits: the split 'validation' is empty"):
        open_site(folder)
    (folder.parent / "splits").mkdir()
    lists = {part: folder.parent / f"splits/A_{part}.json" for part in ("train", "test")}

    def opened(train, test):
        for part, entries in (("train", train), ("test", test)):
            lists[part].write_text(entries if isinstance(entries, str) else json.dumps(entries))
        site = open_site(folder)
        site.check_files()

    cat, dog = ["A/cat/0.png", "cat"], ["A/dog/0.png", "dog"]
    for train, test, message in (
        ("{", [cat], r"A_train\.json: not a list of \[path, class\]"),
        ([cat, dog], [3], r"A_test\.json: not a list of \[path, class\]"),
        ([cat, dog], [["A/cow/0.png", "cow"]], r"A_test\.json: names the class 'cow'.* cat, dog"),
        ([cat, dog], [cat], r"A/cat/0\.png: listed more than once"),
        ([cat, dog], [["A/cat/7.png", "cat"]], r"A/cat/7\.png: cannot be read"),
    ):
        with pytest.raises(DataError, match="site A, .*" + message):
            opened(train, test)
    for file in folder.rglob("*.png"):
        file.unlink()
    for file in lists.values():
        file.unlink()
    with pytest.raises(DataError, match=r"site A, .*A: holds neither a dataset\.json nor images in a folder"):
        open_site(folder)


def test_configuration_follows_from_the_data(make_photos, make_site, tmp_path):
    for name in "AB":
        make_photos(name, per_class=5)
    sites = find_sites(tmp_path / "photos")
    config = configure(sites, rounds=3, network=None)
    assert (config.task, config.network) == ("classification", "alexnet")
    assert (config.optimizer, config.rounds) == ("sgd", 3)
    assert (config.in_channels, config.classes) == (3, ("cat", "dog"))
    with pytest.raises(ConfigError, match="data are for classification"):
        configure(sites, task="segmentation")
    for name in "AB":
        make_site(name)
    assert configure(find_sites(tmp_path / "data")).network == "basicunet"


def test_plain_images_are_divided_by_255_and_accuracy_counts_hits():
    class Brightness(nn.Module):
        def forward(self, x):
            self.seen = x
            bright = (x.mean(dim=(1, 2, 3)) > 0.5).float()
            return torch.stack([1 - bright, bright], dim=1)

    config = RunConfig(task="classification", classes=("dark", "bright"), in_channels=3)
    task = make_task(config, normalised=False)
    cases = [
        EvaluationCase(str(i), torch.full((3, 4, 4), v, dtype=torch.uint8), torch.tensor(y))
        for i, (v, y) in enumerate([(255, 1), (0, 0), (200, 0), (10, 0), (204, 1)])
    ]

    def transform(data):
        for step in task.transforms():
            data = step(data)
        return data

    network = Brightness()
    scores = task.evaluate(network, cases, transform, batch_size=2)
    assert scores["accuracy"] == 0.8
    assert scores["cases"] == {"0": 1.0, "1": 1.0, "2": 0.0, "3": 1.0, "4": 1.0}
    torch.testing.assert_close(network.seen, torch.full((1, 3, 4, 4), 0.8))


def test_statistics_over_the_foreground_of_photographs(make_photos, tmp_path):
    """Of the pixels that are brighter than the darkest one: here half of each image is black."""
    for name in "AB":
        for path in make_photos(name, per_class=6).glob("*/*.png"):
            pixels = np.asarray(Image.open(path)) // 2 + 100
            pixels[:, :20] = 0
            Image.fromarray(pixels).save(path)
    methods = parse_methods("fedrdn", {"fedrdn": {"over": "foreground"}})
    config = configure(find_sites(tmp_path / "photos"), methods=methods, network="lenet5", rounds=1)
    trainer = SiteTrainer(config, tmp_path / "photos/A", "cpu")
    trainer.open("A")
    bright = [
        trainer.folder.load_image(case)[:, :, 20:].flatten(1).double() / 255
        for case in trainer.folder.cases["training"]
    ]
    found = trainer.statistics("foreground")
    torch.testing.assert_close(
        found.mean, torch.stack([b.mean(1) for b in bright]).mean(0), rtol=1e-5, atol=0
    )
    expected = torch.stack([b.std(1, correction=0) for b in bright]).mean(0)
    torch.testing.assert_close(found.std, expected, rtol=1e-5, atol=0)


def test_what_leaves_a_site_are_plain_tensors(make_photos, tmp_path):
    """MONAI's meta data follow an image through transforms and network; NVFlare refuses them on arrival."""
    for name in "AB":
        make_photos(name, per_class=6)
    methods = ({"name": "fedrdn"}, {"name": "fedfa"}, {"name": "fedfa_h"})
    config = configure(find_sites(tmp_path / "photos"), methods=methods, network="lenet5", image_size=32)
    trainer = SiteTrainer(config, tmp_path / "photos", "cpu")
    trainer.open("A")
    own = trainer.statistics()
    once = {"fedrdn/mean/A": own.mean, "fedrdn/std/A": own.std, "fedrdn/count/A": torch.ones(1)}
    trainer.start_round(1, {}, once=once)
    sent = trainer.train(1)
    for value in (*sent.weights.values(), *sent.payload.values()):
        assert type(value) is torch.Tensor
        assert value.is_contiguous()
    batch = next(iter(trainer.samples.loader(trainer.own_dataset(0), 0)))
    assert type(batch["image"]) is torch.Tensor
