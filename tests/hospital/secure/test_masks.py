"""Properties of the parts of secure aggregation, over values that hypothesis looks for."""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hostile import colluders
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from medfedaug.errors import MedFedAugError
from medfedaug.federation.messages.messages import TRAIN, Request
from medfedaug.hospital.primitives import SHARE_BYTES, join, split
from medfedaug.hospital.secure.agreement import Training, request_digest, threshold
from medfedaug.hospital.secure.history import ModelSketch, OpenedSum, SumHistory, SumRules
from medfedaug.hospital.secure.layout import FRACTION_BITS, LARGEST_TERM, SumLayout
from medfedaug.methods.base import ServerContext

PRIME = 2**521 - 1
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

numbers = st.floats(-LARGEST_TERM, LARGEST_TERM, width=64)
counts = st.integers(1, 2**31).map(float)


def layout(size: int) -> SumLayout:
    return SumLayout([], ServerContext(nn.Linear(size, 1, bias=False), 1), ["weight"])


# ---------------------------------------------------------------- encoding


@quick
@given(
    st.lists(st.tuples(st.lists(numbers, min_size=3, max_size=3), counts), min_size=3, max_size=9), st.data()
)
def test_the_sum_of_encoded_numbers_is_their_mean_to_the_stated_precision(sites, data):
    sums = layout(3)
    total = float(sum(weight for _, weight in sites))
    there = sorted(data.draw(st.sets(st.sampled_from(range(len(sites))), min_size=1)))
    words, share = np.zeros(3, dtype=np.uint64), Fraction()
    for index in there:
        values, weight = sites[index]
        tensor = torch.tensor([values], dtype=torch.float64)
        words += sums.encode("A", {"weight": tensor}, {}, weight=weight, total=total, sites=len(sites))
        share += Fraction(weight) / Fraction(total)
    decoded = sums.decode(words, float(share), 1.0)[0]["weight"].double().flatten().tolist()
    for position, value in enumerate(decoded):
        exact = sum(Fraction(sites[i][0][position]) * Fraction(sites[i][1]) for i in there)
        exact = exact / Fraction(total) / share
        # Rounding at each site, of its product in float64, and at last to float32.
        each = sum(abs(sites[i][0][position]) * sites[i][1] for i in there) / total * 2.0**-50
        allowed = (len(there) * 2.0**-FRACTION_BITS / 2 + each) / float(share) + abs(float(exact)) * 2.0**-23
        assert abs(float(Fraction(value) - exact)) <= allowed + 1e-44


@quick
@given(numbers, counts, counts)
def test_every_term_keeps_its_sign_and_its_size(value, weight, total):
    """Nothing saturates."""
    tensor = torch.tensor([[value]], dtype=torch.float64)
    words = layout(1).encode("A", {"weight": tensor}, {}, weight=weight, total=weight + total, sites=3)
    (word,) = words.view(np.int64)
    exact = Fraction(value) * Fraction(weight) / Fraction(weight + total) * 2**FRACTION_BITS
    assert abs(int(word) - exact) <= 1 + abs(exact) * Fraction(1, 2**50)


@quick
@given(st.one_of(st.floats(LARGEST_TERM, exclude_min=True), st.just(math.nan)), st.booleans(), counts)
def test_a_number_that_does_not_fit_is_refused_without_saying_it(value, negative, weight):
    tensor = torch.tensor([[-value if negative else value]], dtype=torch.float64)
    with pytest.raises(MedFedAugError) as found:
        layout(1).encode("A", {"weight": tensor}, {}, weight=weight, total=4 * weight, sites=3)
    assert str(found.value) == (
        "site A: weight has a value of more than 6.711e+07, or that is no number, and secure aggregation "
        "adds up smaller ones"
    )


# ---------------------------------------------------------------- what sites agree on


@quick
@given(st.data())
def test_whatever_changes_in_a_training_changes_what_is_signed(data):
    values = st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=2)
    draw = lambda: {"a": torch.tensor(data.draw(values)), "b": torch.tensor(data.draw(values))}  # noqa: E731
    weights, once, payload = draw(), draw(), draw()
    request = Request(TRAIN, 3, weights=weights, payload=payload, run="r", selected_round=1)
    digest = request_digest(request, once)
    assert digest == request_digest(Request(**{**vars(request), "once": once, "masks": {"x": 1}}), dict(once))
    changed = {"a": weights["a"].clone(), "b": weights["b"]}
    changed["a"][data.draw(st.integers(0, 1))] += 4  # no drawn value is as large
    for other, its_once in (
        (Request(**{**vars(request), "weights": changed}), once),
        (Request(**{**vars(request), "payload": changed}), once),
        (request, changed),
        (request, {}),
        (Request(**{**vars(request), "weights": {"a": weights["b"], "c": weights["a"]}}), once),
        (Request(**{**vars(request), "weights": {k: v.reshape(1, 2) for k, v in weights.items()}}), once),
        (Request(**{**vars(request), "weights": {k: v.double() for k, v in weights.items()}}), once),
        (Request(**{**vars(request), "round": 4}), once),
        (Request(**{**vars(request), "run": "s"}), once),
        (Request(**{**vars(request), "selected_round": 2}), once),
        (Request(**{**vars(request), "planned": {"batch_size": 1}}), once),
    ):
        assert request_digest(other, its_once) != digest
    training = Training("r", 3, "config", digest, {"A": 1.0, "B": 2.0})
    for more in (
        {"run": "s"},
        {"round": 4},
        {"config": "x"},
        {"request": bytes(32)},
        {"weights": {"A": 1.0}},
    ):
        assert (
            Training(**{**vars(Training("r", 3, "config", digest, training.weights)), **more}).digest
            != training.digest
        )


# ---------------------------------------------------------------- shares


def gauss(points: list[tuple[int, int]]) -> int:
    """The polynomial's value at 0, by elimination."""
    size = len(points)
    rows = [[pow(x, power, PRIME) for power in range(size)] + [y] for x, y in points]
    for i in range(size):
        pivot = next(r for r in range(i, size) if rows[r][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        inverse = pow(rows[i][i], -1, PRIME)
        rows[i] = [value * inverse % PRIME for value in rows[i]]
        for r in range(size):
            if r != i:
                rows[r] = [(a - rows[r][i] * b) % PRIME for a, b in zip(rows[r], rows[i], strict=True)]
    return rows[0][size]


@quick
@given(st.binary(min_size=32, max_size=32), st.integers(1, 12), st.data())
def test_any_shares_that_are_enough_give_the_secret_and_no_fewer_do(secret, number, data):
    needed = data.draw(st.integers(1, number))
    shares = split(secret, number, needed)
    assert {len(share) for share in shares} == {SHARE_BYTES}
    chosen = data.draw(st.permutations(range(1, number + 1)))
    enough = {x: shares[x - 1] for x in chosen[: data.draw(st.integers(needed, number))]}
    assert join(enough) == secret
    assert gauss([(x, int.from_bytes(s, "big")) for x, s in enough.items()]) == int.from_bytes(secret, "big")
    few = {x: shares[x - 1] for x in chosen[: needed - 1]}
    if len(few) > 1:
        with pytest.raises(OverflowError):
            join(few)
    if needed > 1:
        # Whatever the secret is, there is a last share that goes with the few: they say nothing of it.
        x = chosen[needed - 1]
        other = split(secret, number, needed)
        if needed > 2:
            with pytest.raises(OverflowError):
                join({**few, x: other[x - 1]})


# ---------------------------------------------------------------- what a site remembers


def sketch(values, step=1.0, key=bytes(32)):
    before = {"w": torch.tensor(values, dtype=torch.float64)}
    return ModelSketch.of(key, before, {"w": before["w"] + step / math.sqrt(len(values))})


names = st.frozensets(st.sampled_from("ABCDEFGH"), min_size=3)


@quick
@given(st.lists(names, min_size=1, max_size=6), st.integers(2, 3))
def test_what_was_opened_of_one_model_has_no_difference_of_few_sites(sets, least):
    history, opened = SumHistory(), []
    for number, chosen in enumerate(sets):
        new = OpenedSum("job", number, chosen, sketch([1.0, 2.0, 3.0]))
        try:
            history.enter(new, SumRules(least=least))
        except ValueError as error:
            assert "was opened for other sites before" in str(error)  # noqa: PT017
            continue
        opened.append(chosen)
    # By linear algebra over all that was opened: no combination has factors at fewer sites, but for one set.
    matrix = np.array([[site in one for site in "ABCDEFGH"] for one in opened], dtype=float)
    rank = np.linalg.matrix_rank(matrix)
    for few in (c for n in range(1, least) for c in combinations(range(8), n)):
        outside = np.delete(matrix, few, axis=1)
        assert np.linalg.matrix_rank(outside) == rank
    # What was opened once is opened again, and it lets a site count sets whatever the models are.
    history.enter(OpenedSum("other", 0, opened[0], sketch([1.0, 2.0, 3.0])), SumRules(least=least))
    for number, chosen in enumerate(sets):
        rules = SumRules(least=0, most_sets=1)
        new = OpenedSum("third", number, chosen, sketch([9.0 * (number + 1), 0.0, 0.0], step=1e-3))
        if chosen == sets[0]:
            history.enter(new, rules)
        else:
            with pytest.raises(ValueError, match="max_sum_sets is 1"):
                history.check(new, rules)


@quick
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e3))
def test_a_sketch_keeps_the_distance_of_models(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(5000, generator=generator, dtype=torch.float64)
    other = one + torch.randn(5000, generator=generator, dtype=torch.float64) * scale
    key = generator.initial_seed().to_bytes(32, "big")
    images = [ModelSketch.of(key, {"w": model}, {"w": model}).image for model in (one, other)]
    assert np.linalg.norm(images[0] - images[1]) == pytest.approx(float((one - other).norm()), rel=0.35)


@given(st.integers(3, 40), st.data())
@quick
def test_as_many_colluders_as_the_page_says_leave_one_list_and_two_honest_sites(known, data):
    floor = data.draw(st.integers(3, known))
    helpers = colluders(known, floor)
    for sites in range(floor, known + 1):
        # Two lists of the sum need t signatures each, of the honest sites no one twice.
        assert 2 * (threshold(sites) - helpers) > sites - helpers
        assert max(floor, threshold(sites)) - helpers >= 2
    more = helpers + 1
    assert any(
        2 * (threshold(sites) - more) <= sites - more or max(floor, threshold(sites)) - more < 2
        for sites in range(floor, known + 1)
    )
