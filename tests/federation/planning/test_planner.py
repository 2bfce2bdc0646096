"""Plans that are made have their numbers along the axes that volumes are turned to."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from asked_plans import asked, prints_of, write_volumes

from medfedaug.config.plan import Plan
from medfedaug.data.preparation.preparation import Preparation
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import UpdateRefused
from medfedaug.federation.planning.fingerprint import _of_foreground, check_fingerprint, fingerprint
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


def test_ct_is_clipped_to_the_range_of_all_sites_where_these_outlined_different_classes():
    """The ribs of one site lie above the lungs of two others."""
    size = ((64, 64, 64), (1.0, 1.0, 1.0), 10)
    prints = prints_of(A=size, B=size, C=size)
    rows = {"A": (-900.0, -500.0, -800.0, 60.0), "B": (-950.0, -550.0, -820.0, 50.0)}
    rows["C"] = (100.0, 900.0, 400.0, 200.0)
    for site, row in rows.items():
        prints[site]["ct"] = torch.tensor([row])
    config = asked(channel_names=("CT",))
    alike = make_plan(prints, config)
    assert alike.changes["plan"].ct_intensities[:2] == (-900.0, -500.0)
    prints["C"]["foreground"] = torch.tensor([-1.0])
    apart = make_plan(prints, config)
    assert apart.changes["plan"].ct_intensities == (-950.0, 900.0, -800.0, 60.0)
    assert any("range of all sites" in why for _, why in apart.reasons)
    assert not any("range of all sites" in why for _, why in alike.reasons)
    check_fingerprint("C", prints["C"])
    prints["C"]["foreground"] = torch.tensor([-0.5])
    with pytest.raises(UpdateRefused, match="plan/foreground"):
        check_fingerprint("C", prints["C"])


def test_a_class_that_no_label_map_of_a_site_shows_is_named():
    prints = prints_of(A=SPINE["A"], B=SPINE["B"])
    prints["B"]["foreground"] = torch.tensor([0.0])
    reasons = dict(make_plan(prints, asked()).reasons)
    assert "site A" not in reasons
    assert reasons["site B"].startswith("no sampled label map shows foreground: ")


TWO_PROTOCOLS = {  # the same anatomy, thick and thin slices
    "MR": {"thick": ((96, 96, 12), (0.5, 0.5, 5.0)), "thin": ((96, 96, 48), (0.5, 0.5, 1.2))},
    "CT": {"thick": ((64, 64, 16), (0.8, 0.8, 5.0)), "thin": ((80, 80, 80), (0.64, 0.64, 1.0))},
}


def sites_on_disk(folder, modality, cases):
    """Fingerprints of volumes that lie in files, cases by protocol."""
    plans = {}
    for name, (size, edges) in TWO_PROTOCOLS[modality].items():
        site = write_volumes(folder / name, size, edges, modality, cases[name])
        plans[name] = fingerprint(VolumeFolder.open(site), ("background", "lesion"))
    return plans


@pytest.mark.parametrize(
    ("modality", "cases", "expected"),
    [("MR", (3, 3), "thin"), ("CT", (2, 4), "thin"), ("CT", (5, 3), "thick")],
)
def test_a_plan_of_two_protocols_is_of_a_volume_that_patients_have(modality, cases, expected, tmp_path):
    prints = sites_on_disk(tmp_path, modality, dict(zip(("thick", "thin"), cases, strict=True)))
    made = make_plan(prints, asked(channel_names=(modality,)))
    plan = made.changes["plan"]
    edges = TWO_PROTOCOLS[modality][expected][1]
    assert plan.spacing == pytest.approx(edges)
    for axis, patch in enumerate(plan.patch_size):
        covered = patch * plan.spacing[axis]
        extents = [n[axis] * e[axis] for n, e in TWO_PROTOCOLS[modality].values()]
        assert min(extents) <= covered < max(extents) + 16 * plan.spacing[axis]


def test_intensities_of_a_structure_that_few_patients_have_stay(tmp_path):
    """The quantiles of CT are of the voxels of those who have the structure."""
    site = write_volumes(tmp_path / "site", (16, 16, 16), (1.0, 1.0, 1.0), "CT", 4)
    folder = VolumeFolder.open(site)
    classes = ("background", "lesion")
    shown = fingerprint(folder, classes, least=1)["ct"]
    assert shown.any()
    several = len(folder.cases["training"])
    assert fingerprint(folder, classes, least=several)["ct"].tolist() == shown.tolist()
    assert not fingerprint(folder, classes, least=several + 1)["ct"].any()


def test_no_quantile_of_ct_is_one_voxel_of_one_patient():
    """Of 11 patients one has metal, whose voxels are the upper 2 % of all voxels together."""
    site = SimpleNamespace(federation_channels=(), channel_names=("CT",))
    usual = [torch.full((1, 100), 50.0 + patient, dtype=torch.float64) for patient in range(10)]
    metal = torch.full((1, 100), 3000.0, dtype=torch.float64)
    assert float(_of_foreground(site, 1, [*usual, metal])[0, 1]) == pytest.approx((545 + 3000) / 11)


def test_a_caller_hears_of_each_volume_that_was_read(tmp_path):
    site = write_volumes(tmp_path / "A", (8, 8, 4), (1.0, 1.0, 1.0), "MR", 3)
    read = []
    fingerprint(VolumeFolder.open(site), ("background", "lesion"), on_read=lambda *pair: read.append(pair))
    of = read[-1][1]
    assert read == [(number + 1, of) for number in range(of)]


def test_extent_and_edges_are_of_the_same_cases(tmp_path):
    """Three thick and three thin volumes of one site: its median extent is that of a patient."""
    sizes, edges = zip(*TWO_PROTOCOLS["MR"].values(), strict=True)
    site = write_volumes(tmp_path / "both", sizes[0], edges[0], "MR", 3)
    write_volumes(site, sizes[1], edges[1], "MR", 4)
    payload = fingerprint(VolumeFolder.open(site), ("background", "lesion"))
    assert payload["extent"][:, 2].tolist() == pytest.approx([57.6, 57.6, 60.0])
    plan = make_plan({"A": payload}, asked()).changes["plan"]
    assert plan.spacing == pytest.approx((0.5, 0.5, 1.2))
    assert plan.patch_size[2] == 48


@pytest.mark.parametrize(
    ("size", "edges", "fine"),
    [
        ((256, 256, 20), (0.5, 0.5, 5.0), True),  # coarser, and far fewer voxels
        ((256, 256, 100), (0.5, 0.5, 5.0), False),  # as many voxels as other axes, within a factor of 3
        ((256, 256, 20), (0.5, 2.0, 5.0), False),  # less than three times the next coarsest
    ],
)
def test_an_anisotropic_axis_is_one_of_few_and_coarse_voxels(size, edges, fine):
    """nnU-Net's two conditions for the 10 % quantile."""
    prints = prints_of(A=(size, edges, 10))
    prints["A"]["spacing"][0, 2] = 2.5
    plan = make_plan(prints, asked()).changes["plan"]
    assert plan.spacing == (edges[0], edges[1], 2.5 if fine else 5.0)
