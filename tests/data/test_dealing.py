"""Dealing the domains of a data set to further sites."""

from collections import Counter

import pytest
from benchmark_files import counts, picture

from medfedaug.errors import DataError
from medfedaug.research.datasets.benchmarks import open_benchmark

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


@pytest.fixture(scope="module")
def pacs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pacs")
    for site in DOMAINS:
        for label in ("dog", "house", "person"):
            for i in range(40):
                picture(root / site / label / f"{i:02d}.jpg", i)
    return root


@pytest.mark.all_layers
def test_domains_are_dealt_evenly_to_clients_and_the_one_left_out_stays_whole(pacs):
    whole = {site.name: site for site in open_benchmark("pacs", pacs)}
    sites = open_benchmark("pacs", pacs, deal=4, unseen="photo")
    assert [site.name for site in sites[:5]] == [*(f"art_painting_{k}" for k in range(4)), "cartoon_0"]
    assert counts(sites)["photo"] == (0, 0, 120)
    assert not sites[-1].trains
    assert {counts([site])[site.name] for site in sites[:-1]} == {(18, 6, 6)}
    for site in sites[:4]:
        assert Counter(case.label for case in site.cases["training"]) == {"dog": 6, "house": 6, "person": 6}
    for split, cases in whole["cartoon"].cases.items():  # each case once, and in its own split
        dealt = [case for site in sites if site.name.startswith("cartoon") for case in site.cases[split]]
        assert sorted(dealt, key=str) == sorted(cases, key=str)
    assert open_benchmark("pacs", pacs, deal=4, unseen="photo") == sites


@pytest.mark.all_layers
def test_a_small_alpha_gives_each_client_few_classes(pacs):
    sites = open_benchmark("pacs", pacs, deal=3, deal_alpha=0.05)
    assert all(sum(counts([site])[site.name]) == 40 for site in sites)
    shares = [max(Counter(c.label for c in site.cases["training"]).values()) / 24 for site in sites]
    assert max(shares) > 0.9
    with pytest.raises(DataError, match=r"site art_painting_00, .* is empty"):
        open_benchmark("pacs", pacs, deal=60)


@pytest.mark.all_layers
def test_sites_of_two_domains(pacs):
    sites = open_benchmark("pacs", pacs, deal_domains=2, unseen="sketch")
    assert [site.name for site in sites] == [
        "art_painting_cartoon",
        "cartoon_photo",
        "photo_art_painting",
        "sketch",
    ]
    for site in sites[:3]:
        assert {split: len(cases) for split, cases in site.cases.items()} == {
            "training": 72,
            "validation": 24,
            "test": 24,
        }
        assert Counter(case.name.split("/")[0] for case in site.cases["test"]).most_common()[1][1] == 12
    files = [case.image for site in sites for cases in site.cases.values() for case in cases]
    assert len(files) == len(set(files)) == 4 * 120
