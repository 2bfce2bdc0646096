"""Benchmarks whose images lie many to a file: how they are read and dealt to sites, and harmful files."""

import os
import pickle

import numpy as np
import pytest
import torch
from benchmark_files import (
    CHARACTERS,
    counts,
    write_cifar,
    write_digits,
    write_fedscale,
    write_tiny_imagenet,
)
from scipy.io import savemat

from medfedaug.data.federation import check_federation
from medfedaug.data.splits import deal_by_dirichlet
from medfedaug.errors import ConfigError, DataError
from medfedaug.research.datasets import archives
from medfedaug.research.datasets.benchmarks import open_benchmark


def test_cifar_10_is_dealt_out_whole_and_the_test_set_in_equal_parts(tmp_path):
    written = write_cifar(tmp_path)
    sites = open_benchmark("cifar_10", tmp_path, clients=5, alpha=0.3)
    assert [site.name for site in sites] == [f"client_{i:03d}" for i in range(5)]
    assert counts(sites) == dict.fromkeys(counts(sites), (36, 4, 10))
    assert check_federation(sites) == ("classification", 3, tuple(f"class_{i}" for i in range(10)))
    for split, total in (("training", 180), ("validation", 20), ("test", 50)):
        assert len({case.name for site in sites for case in site.cases[split]}) == total
    for case in (sites[0].cases["training"][0], sites[3].cases["test"][5]):
        image = sites[0].load_image(case)
        assert image.dtype == torch.uint8
        expected = written[case.image.name][case.index].reshape(3, 32, 32)
        np.testing.assert_array_equal(image.numpy(), expected)
        np.testing.assert_allclose(sites[0].load_image(case, "scale"), expected / 255, rtol=1e-6)
        assert case.label == f"class_{case.index % 10}"
    assert open_benchmark("cifar_10", tmp_path, clients=5, seed=1)[0].cases != sites[0].cases
    assert open_benchmark("cifar_10", tmp_path, clients=5)[0].cases == sites[0].cases


def test_tiny_imagenet(tmp_path):
    ids = write_tiny_imagenet(tmp_path)
    sites = open_benchmark("tiny_imagenet", tmp_path, clients=3, alpha=0.6, validation=0.25)
    assert counts(sites) == dict.fromkeys(counts(sites), (9, 3, 4))
    assert check_federation(sites) == ("classification", 3, ids)
    assert sites[0].load_image(sites[0].cases["training"][0]).shape == (3, 64, 64)
    for site in sites:
        assert all(case.name.split("/")[1].startswith("val_") for case in site.cases["test"])


def test_small_alpha_gives_few_classes_and_large_alpha_all():
    labels = np.arange(10_000) % 10

    def largest_share(alpha):
        parts = deal_by_dirichlet(labels, 20, alpha, seed=3)
        assert {len(part) for part in parts} == {500}
        assert len(np.unique(np.concatenate(parts))) == 10_000
        return np.mean([np.bincount(labels[part], minlength=10).max() / 500 for part in parts])

    # One class of ten has 0.1 to 0.13 of 500 images when all are equally likely, and all of them when the
    # draw is of one class alone, but for the last sites, which get what is left.
    assert largest_share(1e4) < 0.14
    assert 0.3 < largest_share(0.3) < 0.7
    assert largest_share(1e-6) > 0.8


@pytest.mark.parametrize(("sites", "alpha"), [(0, 1.0), (11, 1.0), (2, 0.0), (2, float("nan"))])
def test_deals_that_cannot_be(sites, alpha):
    with pytest.raises(ConfigError):
        deal_by_dirichlet(np.zeros(10, int), sites, alpha, seed=0)


def test_femnist_as_fedscale_deals_it(tmp_path):
    write_fedscale(tmp_path / "femnist", {"train": {"7": 20, "8": 3}, "test": {"7": 4}, "val": {"9": 2}})
    sites = open_benchmark("femnist", tmp_path / "femnist")
    # A number of the test list is another writer; the second of the training list has too few images.
    assert counts(sites) == {"train_7": (16, 2, 2), "test_7": (0, 0, 4), "val_9": (0, 0, 2)}
    case = sites[1].cases["test"][3]
    assert (case.label, sites[1].load_image(case).unique().tolist()) == (CHARACTERS[3], [3])
    with pytest.raises(ConfigError, match="2 writers are more than the 1 with 10 images"):
        open_benchmark("femnist", tmp_path / "femnist", writers=2)
    listed = tmp_path / "femnist/client_data_mapping/val.csv"
    head = "client_id,sample_path,label_name,label_id\n"
    for row in ("9,data/a.png,a,62", "9,data/a.png,a,-1", "9", "9,data/a.png,a,x", '9,"data', "\xff"):
        listed.write_bytes(f"{head}{row}\n".encode("latin-1"))
        with pytest.raises(DataError, match=r"line \d: client_id,sample_path,label_name,label_id"):
            open_benchmark("femnist", tmp_path / "femnist")
    listed.write_text(f"{head}9,../../a.png,a,1\n")
    with pytest.raises(DataError, match="not below"):
        open_benchmark("femnist", tmp_path / "femnist")
    listed.unlink()
    (tmp_path / "femnist/client_data_mapping/train.csv").unlink()
    with pytest.raises(DataError, match="is missing, and femnist needs it"):
        open_benchmark("femnist", tmp_path / "femnist")


def test_digits_in_their_authors_files(tmp_path):
    written = write_digits(tmp_path)
    names = ["MNIST", "MNIST_M", "SVHN", "USPS", "SynthDigits"]
    for site, stem in (("SVHN", ""), ("SynthDigits", "synth_")):
        (tmp_path / site).mkdir()
        for part, number in (("train", 50), ("test", 20)):
            colour = np.full((32, 32, 3, number), 9, np.uint8) * np.arange(number, dtype=np.uint8)
            label = (np.arange(number, dtype=np.uint8) % 10)[:, None]
            if site == "SVHN":
                label[label == 0] = 10
            savemat(tmp_path / f"{site}/{stem}{part}_32x32.mat", {"X": colour, "y": label})
    sites = {site.name: site for site in open_benchmark("digits", tmp_path)}
    assert counts(sites.values()) == dict.fromkeys(names, (40, 10, 20))
    assert check_federation(list(sites.values())) == ("classification", 3, tuple("0123456789"))
    for site in sites.values():
        for case in site.cases["training"]:
            number = int(case.image.stem) if site.name == "MNIST_M" else case.index
            assert case.label == str(number % 10)
    case = sites["MNIST"].cases["validation"][4]
    image = sites["MNIST"].load_image(case)
    for channel in image:
        np.testing.assert_array_equal(channel, written["MNIST"][case.index])
    case = sites["USPS"].cases["training"][3]
    image = sites["USPS"].load_image(case)[0].numpy().astype(int).ravel()
    assert abs(image - written["USPS"][case.index]).max() <= 1
    if "SVHN" in sites:
        case = sites["SVHN"].cases["test"][13]
        assert sites["SVHN"].load_image(case).unique().tolist() == [9 * 13 % 256]


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Harmful()),
        pickle.dumps((np.array([Harmful()], dtype=object), np.zeros(1))),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c_codecs\nencode\n(S'x'\nS'zlib'\ntR.",
        b"",
        b"\x80\x04",
    ],
)
def test_a_pickle_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py/data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_3: cannot be read"):
        open_benchmark("cifar_10", tmp_path)
    (tmp_path / "amazon_train.pkl").write_bytes(content)
    with pytest.raises(DataError, match=r"site amazon, .*amazon_train\.pkl: cannot be read"):
        open_benchmark("office_caltech_10", tmp_path)
    assert not (tmp_path / "harmed").exists()


def test_an_archive_that_changed_is_noticed(tmp_path):
    write_cifar(tmp_path)
    site = open_benchmark("cifar_10", tmp_path, clients=2)[0]
    archives.read_archive.cache_clear()
    other = tmp_path / "other"
    write_cifar(other, batch=3)
    path = tmp_path / "cifar-10-batches-py/data_batch_1"
    path.write_bytes((other / "cifar-10-batches-py/data_batch_1").read_bytes())
    with pytest.raises(DataError, match=r"site client_000, .*data_batch_1: holds 3 images, number \d+ is"):
        site.check_files()
    path.unlink()
    archives.read_archive.cache_clear()
    with pytest.raises(DataError, match=r"site client_000, .*data_batch_1: a listed file is missing"):
        site.check_files()
