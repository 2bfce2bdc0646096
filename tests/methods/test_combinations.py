"""Every pair of methods is refused or not as recorded, and on the same ground."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from method_combinations import ALWAYS, SETTINGS, Sites, ground, outcomes, pairs, read_record, specs

from medfedaug.errors import ConfigError
from medfedaug.methods import build_methods

RECORD = {
    (*row[:2], setting): row.outcome
    for row in read_record()
    for setting in ([ALWAYS] if row.settings == ALWAYS else row.named())
}
TOGETHER = [pair for pair in pairs() if (*pair, ALWAYS) not in RECORD]
# A few pairs of each setting, other ones in each.
SAMPLE = [
    (pair, setting)
    for number, setting in enumerate(SETTINGS)
    for pair in itertools.islice(TOGETHER, 17 * number, None, 150 if number else 40)
]


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    return Sites(tmp_path_factory.mktemp("combinations"))


def recorded(pair, names) -> dict[str, str]:
    if (*pair, ALWAYS) in RECORD:
        return {ALWAYS: RECORD[(*pair, ALWAYS)]}
    return {name: RECORD[(*pair, name)] for name in names}


def test_the_record_has_each_pair_once_in_each_setting():
    rows = Counter(
        (*row[:2], setting)
        for row in read_record()
        for setting in (SETTINGS if row.settings == ALWAYS else row.named())
    )
    assert rows == Counter((*pair, setting) for pair in pairs() for setting in SETTINGS)


def test_the_record_has_every_kind_of_refusal():
    grounds = Counter(outcome for outcome in RECORD.values() if " " not in outcome)
    assert set(grounds) == {
        *("allowed", "method", "normalised_input", "global_model", "labels", "norm_layers"),
        *("complete_state_dict", "global_start", "separate_sites"),
        *("averaged_parameters", "averaged_buffers", "exchange", "given_shares", "soft_labels"),
    }


def test_the_same_pairs_exclude_each_other_in_both_orders():
    for pair in pairs():
        for order in dict.fromkeys((pair, pair[::-1])):
            if pair in TOGETHER:
                build_methods(specs(order))
                continue
            with pytest.raises(ConfigError) as refused:
                build_methods(specs(order))
            assert ground(str(refused.value), pair) == RECORD[(*pair, ALWAYS)], order


@pytest.mark.parametrize(("pair", "setting"), SAMPLE)
def test_a_sample_of_pairs_in_each_setting(sites, pair, setting):
    pytest.importorskip("opacus")
    assert outcomes(sites, pair, [setting]) == recorded(pair, [setting])


@pytest.mark.slow
@pytest.mark.parametrize("first", dict.fromkeys(first for first, _ in pairs()))
def test_every_pair_in_every_setting(sites, first):
    pytest.importorskip("opacus")
    for pair in pairs():
        if pair[0] == first:
            assert outcomes(sites, pair) == recorded(pair, SETTINGS), pair


@pytest.mark.slow
@pytest.mark.parametrize("first", dict.fromkeys(first for first, _ in pairs()))
def test_the_order_of_two_methods_decides_nothing(sites, first):
    names = ("slices_batch_norm", "slices", "photographs_batch_norm", "secure_aggregation", "max_share")
    for pair in pairs():
        if pair[0] == first and pair in TOGETHER:
            allowed = [
                {name: outcome == "allowed" for name, outcome in outcomes(sites, order, names).items()}
                for order in (pair, pair[::-1])
            ]
            assert allowed[0] == allowed[1], pair
