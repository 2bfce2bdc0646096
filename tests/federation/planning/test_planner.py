"""Plans that are made have their numbers along the axes that volumes are turned to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from asked_plans import asked, prints_of

from medfedaug.config.plan import Plan
from medfedaug.data.preparation import Preparation
from medfedaug.federation.planning.planner import make_plan

SPINE = {  # sagittal: few thick slices along R
    "A": ((12, 256, 320), (4.0, 0.7, 0.7), 10),
    "B": ((12, 256, 320), (4.4, 0.8, 0.8), 10),
}


def prepared(plan: Plan) -> tuple[int, ...]:
    """The size of a volume of site A, stored as (S, R, A), on the grid of a plan."""
    affine = torch.zeros(4, 4, dtype=torch.float64)
    affine[2, 0], affine[0, 1], affine[1, 2], affine[3, 3] = 0.7, 4.0, 0.7, 1
    place = Preparation(plan).placement(torch.zeros(1, 320, 12, 256), affine)
    assert place is not None
    return place.size


@pytest.mark.parametrize(
    ("orientation", "order"), [("RAS", (0, 1, 2)), ("ASR", (1, 2, 0)), ("PLI", (1, 0, 2))]
)
def test_spacing_and_patch_are_along_the_axes_of_a_given_orientation(orientation, order):
    base = make_plan(prints_of(**SPINE), asked(memory=2.0)).changes["plan"]
    given = asked(memory=2.0, given=["orientation"], plan=Plan(orientation=orientation))
    plan = make_plan(prints_of(**SPINE), given).changes["plan"]
    assert plan.orientation == orientation
    assert plan.spacing == tuple(base.spacing[axis] for axis in order)
    assert sorted(plan.patch_size) == sorted(base.patch_size)
    assert plan.patch_size[order.index(0)] == min(plan.patch_size)
    # No axis is made of what is not there, or lost.
    assert prepared(plan) == tuple(np.array(prepared(base))[list(order)])


@pytest.mark.parametrize(
    ("size", "edges", "given", "expected"),
    [
        ((5, 256, 320), (1.0, 1.0, 1.0), [], ("ASR", (256, 320))),  # few slices, whatever their edges
        ((256, 5, 320), (0.7, 6.0, 0.7), [], ("RSA", (256, 320))),
        ((12, 256, 320), (4.0, 0.7, 0.7), ["spatial_dims"], ("ASR", (256, 320))),
        ((256, 320, 40), (0.7, 0.7, 3.0), ["spatial_dims"], ("RAS", (256, 320))),
        ((256, 320, 256), (1.0, 1.0, 1.0), ["spatial_dims"], ("RAS", (256, 320))),
    ],
)
def test_slices_are_those_that_the_scanner_took(size, edges, given, expected):
    made = make_plan(prints_of(A=(size, edges, 10)), asked(given=given, plan=Plan(spatial_dims=2)))
    plan = made.changes["plan"]
    assert (plan.spatial_dims, plan.orientation, plan.patch_size) == (2, *expected)
