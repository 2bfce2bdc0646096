import math

import pytest
from calibrations import fingerprint

from medfedaug.analysis.fingerprint_distance import KINDS, appearance, distances
from medfedaug.errors import ConfigError


def test_sites_that_are_alike_are_nowhere_apart():
    assert distances([fingerprint("A"), fingerprint("B")]) == {
        site: dict.fromkeys(KINDS, 0.0) for site in "AB"
    }


def test_each_kind_is_the_mean_over_the_others_in_its_unit():
    sites = [fingerprint("A"), fingerprint("B"), fingerprint("C", mean=0.36, size=0.04, edge=4, present=0.5)]
    found = distances(sites)
    # The square's entry adds the spread of 0.02 to each site.
    assert found["C"]["intensity"] == pytest.approx(0.06 / 0.02, rel=1e-6)
    assert found["A"]["intensity"] == pytest.approx(1.5, rel=1e-6)
    assert found["C"]["contrast"] == pytest.approx(0)
    assert found["C"]["polarity"] == pytest.approx(0.06 / 0.1)
    assert found["C"]["size"] == pytest.approx(2)  # 0.01 to 0.04 are two octaves
    assert found["C"]["resolution"] == pytest.approx(1)  # two octaves of the edge, none of the thickness
    assert found["A"]["resolution"] == pytest.approx(0.5)
    assert found["C"]["prevalence"] == pytest.approx(0.5)
    assert appearance(found["C"]) == pytest.approx(3 / math.sqrt(2))


def test_polarity_counts_where_images_are_far_under_each_others_statistics():
    one_way = distances([fingerprint("A", 0.2, 0.02), fingerprint("B", 0.3, 0.2)])
    both = distances([fingerprint("A", 0.2, 0.05), fingerprint("B", 0.8, 0.05)])
    assert one_way["A"]["polarity"] == pytest.approx(0.5)
    assert both["A"]["polarity"] == pytest.approx(12)


def test_unknown_geometry_and_absent_classes_are_no_distance():
    sites = [fingerprint("A"), fingerprint("B", geometry=0, edge=50, present=0)]
    found = distances(sites)["A"]
    assert found["resolution"] == found["field_of_view"] == found["size"] == 0
    assert found["prevalence"] == 1


def test_a_spread_below_zero_by_noise_makes_no_infinite_distance():
    sites = [fingerprint("A", spread=0), fingerprint("B", mean=0.4, spread=0)]
    assert distances(sites)["A"]["intensity"] == pytest.approx(10)


def test_sites_that_cannot_be_compared_are_named():
    from dataclasses import replace

    with pytest.raises(ConfigError, match="two sites or more, found 1"):
        distances([fingerprint("A")])
    with pytest.raises(ConfigError, match="site B has classes"):
        distances([fingerprint("A"), replace(fingerprint("B"), classes=("background", "tumour"))])
