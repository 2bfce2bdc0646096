"""The one place that counts patients, against counts by hand."""

import pytest
import torch

from medfedaug.federation.site.entry_patients import step_weights
from medfedaug.methods.census import Census, Contributors, contributors_of


def census(patients: int = 10, images: int = 1, least: int = 10) -> Census:
    owners = [f"p{n}" for n in range(patients) for _ in range(images)]
    return Census(owners, least)


@pytest.mark.parametrize(
    ("weights", "least", "problem"),
    [
        ([1.0] * 10, 10, ""),
        ([2.0, *[1.0] * 9], 10, ""),  # an honest mean, in which one patient has two images
        ([1.0] * 9, 10, "fewer than 10 patients would be behind it"),
        ([3.0, *[1.0] * 9], 10, "one patient would have more than 20% of it"),
        ([1.0] * 5 + [1e-9] * 50, 10, "fewer than 10 patients would be behind it"),
        ([1.0], 1, ""),
        ([0.0] * 10, 10, ""),  # about nobody
    ],
)
def test_a_number_leaves_from_enough_patients_with_small_shares(weights, least, problem):
    assert Contributors(torch.tensor([weights])).problem(least) == problem


def test_every_row_counts():
    rows = Contributors(torch.tensor([[1.0] * 10, [1.0] * 9 + [0.0]]))
    assert rows.enough(10).tolist() == [True, False]
    assert rows.problem(10) == "fewer than 10 patients would be behind it"


def test_the_effective_number_of_a_number_that_leaves_is_at_least_half_of_the_least():
    torch.manual_seed(0)
    for _ in range(200):
        weights = torch.rand(1, 12).double() ** 3
        if bool(Contributors(weights).enough(10)):
            assert float(weights.sum() ** 2 / weights.square().sum()) >= 5.0


def test_a_running_average_counts_its_last_steps():
    counted = census(20)
    for first in range(0, 20, 2):
        counted.step([first, first + 1])
    assert int(counted.of_steps().number) == 20
    weights = counted.of_steps([0.5**age for age in range(10)]).weights[0]
    assert weights[18] / weights[16] == pytest.approx(2.0)
    last = counted.of_steps([1.0, *[0.0] * 9]).weights[0]
    assert last.nonzero().flatten().tolist() == [18, 19]


@pytest.mark.parametrize("weights", [[1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_nobody_can_count_strange_weights_of_steps(weights):
    counted = census()
    counted.step([0, 1])
    counted.step([2, 3])
    assert counted.of_steps(weights) is None


@pytest.mark.parametrize(("momentum", "pull"), [(0.0, 0.0), (0.9, 0.0), (0.0, 3.0), (0.5, 2.0), (0.0, 10.0)])
def test_the_weights_of_steps_are_those_of_the_optimiser(momentum, pull):
    """Gradients of SGD enter linearly: each is replaced by another in turn."""
    gradients = torch.tensor([1.0, -2.0, 0.5, 3.0])

    def trained(values) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimiser = torch.optim.SGD([parameter], lr=0.1, momentum=momentum, weight_decay=pull)
        for value in values:
            parameter.grad = value.double().reshape(1)
            optimiser.step()
        return parameter.detach()

    weights = step_weights(4, 0.1, momentum, pull)
    for step in range(4):
        changed = gradients.clone()
        changed[step] += 1.0
        moved = float((trained(changed) - trained(gradients)).abs())
        assert moved == pytest.approx(weights[3 - step], abs=1e-12)


def test_an_unknown_batch_makes_the_whole_round_unknown():
    counted = census()
    counted.step([0, 1])
    counted.step(None)
    assert counted.of_steps() is None
    assert contributors_of(counted.over_steps(torch.ones(2))) is None


def test_a_sample_from_which_a_step_learns_nothing_does_not_count():
    counted = census(20)
    for gradients in ([1.0] * 20, [1.0] * 9 + [0.0] * 11, [1.0] * 9 + [1e-9] * 11, [0.0] * 20):
        counted.begin()
        counted.step(range(20))
        counted.gradients(torch.tensor(gradients)[:, None])
        few = sum(gradients) == pytest.approx(9, abs=1e-6)
        assert bool(counted.of_steps().problem(10)) is few


def test_a_mark_is_lost_by_any_arithmetic():
    value = census().of_all(torch.ones(3))
    assert contributors_of(value) is not None
    for other in (value + 0, value[:1], value.clone(), value.double(), torch.stack([value])):
        assert contributors_of(other) is None


def test_means_over_cases_leave_out_cases_without_a_value():
    rows = [torch.tensor([float(n), float("nan") if n else 1.0]) for n in range(10)]
    (mean,) = census().over_cases({"x": row} for row in rows).values()
    assert mean.tolist() == [4.5, 1.0]
    assert contributors_of(mean).number.tolist() == [10, 1]
    assert contributors_of(mean).problem(10) == "fewer than 10 patients would be behind it"


def test_a_row_is_known_whole_or_not_at_all():
    """Otherwise nobody would be behind the row, in which each number is of one patient."""
    rows = [torch.tensor([[1.0, float("nan")], [float("nan"), 1.0]][n % 2 :][:1]) for n in range(2)]
    (mean,) = census(2).over_cases({"x": row} for row in rows).values()
    assert mean.tolist() == [[0.0, 0.0]]


def test_means_over_cases_have_weights():
    rows = ({"x": torch.tensor([value])} for value in (0.0, 4.0))
    (mean,) = census(2, least=1).over_cases(rows, [3.0, 1.0]).values()
    assert mean.item() == 1.0
    assert float(contributors_of(mean).share) == 0.75


def test_a_class_of_too_few_patients_is_one_that_the_site_lacks():
    patients = torch.tensor([*range(10), 0, 0])
    classes = torch.zeros(12, 2)
    classes[:10, 0], classes[10:, 1] = 1.0, 1.0  # the second class: two images of one patient
    sums, counts = census().by_class(torch.ones(12, 3), classes, patients)
    assert counts.tolist() == [10.0, 0.0]
    assert sums.tolist() == [[10.0] * 3, [0.0] * 3]
    assert contributors_of(sums).problem(10) == ""
    assert census(least=1).by_class(torch.ones(12, 3), classes, patients)[1].tolist() == [10.0, 2.0]


def test_bins_of_too_few_patients_are_merged():
    ten = [torch.eye(4)[[min(n // 5, 1)]] for n in range(10)]  # five patients in each of the first two bins
    merged = census().histogram(ten)
    assert merged.tolist() == [[0.25] * 4]
    assert contributors_of(merged).problem(10) == ""
    many = census(20).histogram(torch.eye(4)[[n // 10]] for n in range(20))
    assert many[0, 0].item() == 0.5
    assert many[0, 1:].sum().item() == pytest.approx(0.5)


def test_a_patient_who_outweighs_the_last_bins_does_not_keep_the_histogram_at_the_site():
    counts = [torch.tensor([[10.0, 1.0, 0.0]]) for _ in range(10)]
    counts[0] = torch.tensor([[10.0, 1.0, 3.0]])
    merged = census().histogram(counts)
    assert merged.tolist() == [[pytest.approx(1 / 3)] * 3]
    assert contributors_of(merged).problem(10) == ""


def test_a_flag_needs_enough_patients():
    counted = census()
    assert counted.flags([None, range(10), range(9), []]).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_images_of_a_patient_are_one_patient():
    counted = census(patients=2, images=8, least=3)
    assert counted.patients == 2
    assert (
        contributors_of(counted.of_all(torch.ones(1))).problem(3)
        == "fewer than 3 patients would be behind it"
    )
