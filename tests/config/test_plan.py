"""Plans of volumes: grids, patches, what is kept in memory, and plans made of the sites' fingerprints."""

import json

import numpy as np
import pytest
import torch
from asked_plans import asked, prints_of
from monai.data import MetaTensor
from monai.transforms import Orientation
from running import TINY_NETWORK, TINY_OPTIONS

from medfedaug.config.machine import Machine
from medfedaug.config.plan import Plan, load_plan, save_plan
from medfedaug.config.run import Execution
from medfedaug.data.phantom import make_phantom
from medfedaug.data.preparation.cache import CaseCache
from medfedaug.data.preparation.preparation import Preparation
from medfedaug.data.sites import find_sites
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, PrivacyRefused, RunFailed, StorageError
from medfedaug.federation import SiteTrainer, run_in_process
from medfedaug.federation.in_process import InProcessCarrier, PooledCarrier
from medfedaug.federation.messages.messages import FINGERPRINT, Reply, namespaced
from medfedaug.federation.planning.fingerprint import fingerprint
from medfedaug.federation.planning.plan_request import Planning
from medfedaug.federation.planning.planner import make_plan, training_bytes
from medfedaug.federation.site.trainer import site_fingerprint
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.runs.evaluate import evaluate_model
from medfedaug.tasks import SegmentationTask
from medfedaug.tasks.segmentation import patch_centres, patch_window

VOLUMES = Plan(spatial_dims=3, patch_size=(16, 16, 16), patches_per_volume=2)


@pytest.fixture(scope="module")
def volumes_dir(tmp_path_factory):
    """Two sites of five patients with voxels of different size, three classes."""
    root = tmp_path_factory.mktemp("volumes") / "data"
    make_phantom(root, sites=2, patients=5, shape=(20, 20, 12), seed=0, classes=3)
    place(root / "site_A", (1.0, 1.0, 1.0))
    place(root / "site_B", (-1.0, 1.0, 2.0))
    return root


def place(site, edges) -> None:
    """Give the voxels of a site's volumes these edges in mm; with a minus an axis runs to the left."""
    import nibabel

    for file in site.glob("*/*.nii.gz"):
        volume = nibabel.load(file)
        nibabel.Nifti1Image(np.asanyarray(volume.dataobj), np.diag([*edges, 1.0])).to_filename(file)


def affine_of(seed: int, edges=(1.0, 1.0, 1.0), *, oblique: bool) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.normal(size=(3, 3)))[0] if oblique else np.eye(3)[rng.permutation(3)]
    matrix = np.eye(4)
    matrix[:3, :3] = axes @ np.diag(edges) @ np.diag(rng.choice([-1.0, 1.0], 3))
    matrix[:3, 3] = rng.normal(size=3) * 50
    return torch.as_tensor(matrix)


def ellipsoid(shape, radius: float = 0.33) -> torch.Tensor:
    grid = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, n) for n in shape), indexing="ij"))
    centre = torch.tensor([0.1, -0.2, 0.05])[:, None, None, None]
    return (((grid - centre) / (2 * radius)).square().sum(dim=0) < 1)[None].to(torch.uint8)


def dice(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(2 * (a * b).sum() / (a.sum() + b.sum()))


@pytest.mark.parametrize(("seed", "oblique"), [(0, False), (1, True), (2, True)])
def test_axes_are_turned_as_monai_turns_them(seed, oblique):
    image, affine = torch.rand(2, 5, 7, 6), affine_of(seed, (0.7, 1.3, 3.1), oblique=oblique)
    for codes in ("RAS", "LPS", "ASR"):
        place = Preparation(Plan(orientation=codes)).placement(image, affine)
        expected = Orientation(codes, labels=None)(MetaTensor(image, affine=affine))
        assert torch.equal(place.forward(image), expected.as_tensor())
        assert torch.equal(place.back(place.forward(image)), image)


@pytest.mark.parametrize(
    ("edges", "oblique"), [((1.0, 1.0, 1.0), False), ((0.5, 0.5, 3.0), True), ((2.0, 0.8, 0.8), False)]
)
def test_a_perfect_label_map_on_the_plans_grid_is_one_on_the_files(edges, oblique):
    affine = affine_of(1, edges, oblique=oblique)
    shape = [max(12, round(48 / edge)) for edge in edges]
    label = ellipsoid(shape)
    preparation = Preparation(Plan(orientation="RAS", spacing=(1.0, 1.0, 1.0)))
    place = preparation.placement(label.float(), affine)
    planned = preparation.label(label, place)
    assert planned.dtype == torch.uint8
    # As a network would say it: scores, of which the largest wins.
    scores = torch.cat([1 - planned.float(), planned.float()])
    label_back = place.put_back(place.resized_back(scores).argmax(dim=0, keepdim=True))
    assert label_back.shape == label.shape
    assert dice(label_back, label) > 0.98


def test_windows_over_a_volume_give_what_a_network_without_a_view_gives():
    """Of a network that looks at single voxels, no seam can be seen, whatever the windows."""
    network = torch.nn.Conv3d(1, 3, 1).eval()
    image = torch.rand(1, 13, 17, 9)
    expected = network(image[None])[0].argmax(dim=0, keepdim=True)
    for plan in (
        Plan(spatial_dims=3, patch_size=(8, 8, 8), overlap=0.25),
        Plan(spatial_dims=3, patch_size=(32, 8, 4), overlap=0.5),
        Plan(spatial_dims=3),
    ):
        logits = SegmentationTask(3, plan=plan).logits(network, image, 2)
        assert torch.equal(logits.argmax(dim=0, keepdim=True), expected)


def test_patches_are_centred_on_the_foreground_as_often_as_asked():
    label = torch.zeros(1, 1, 40, 30, 20, dtype=torch.uint8)
    label[..., 5:7, 5:7, 5:7] = 1
    label[..., 30:36, 20:26, 12:18] = 2  # 27 times as many voxels, and drawn as often
    centres = patch_centres(label)
    plan = Plan(spatial_dims=3, patch_size=(8, 8, 64), foreground=0.75)
    random = np.random.RandomState(0)
    hits = {0: 0, 1: 0, 2: 0}
    for _ in range(2000):
        window = patch_window(label.shape[2:], centres, plan, random)
        assert [s.stop - s.start for s in window] == [8, 8, 20]
        assert all(s.start >= 0 and s.stop <= n for s, n in zip(window, label.shape[2:], strict=True))
        middle = (window[0].start + 4, window[1].start + 4)
        hits[int(label[0, 0, middle[0], middle[1], :].max())] += 1
    assert hits[1] / 2000 == pytest.approx(0.375, abs=0.04)
    assert hits[2] / 2000 == pytest.approx(0.375, abs=0.04)
    no_foreground = patch_window((40, 30, 20), centres[:0], plan, random)
    assert all(s.start >= 0 for s in no_foreground)


def test_patches_without_a_structure_are_centred_where_the_background_is_known():
    """Two of 20 slices are outlined, and one item is not outlined at all."""
    label = torch.zeros(2, 1, 40, 30, 20, dtype=torch.uint8)
    known = torch.zeros_like(label, dtype=torch.bool)
    known[0, ..., [4, 12]] = True
    label[0, 0, 5:7, 5:7, 4] = 1
    centres = patch_centres(label, known)
    assert {*centres[:, 0].tolist()} == {0}
    plan = Plan(spatial_dims=3, patch_size=(8, 8, 2), foreground=0.5)
    random, hits = np.random.RandomState(0), 0
    for _ in range(500):
        window = patch_window(label.shape[2:], centres, plan, random)
        assert known[0, 0][window].any()
        hits += bool(label[0, 0][window].any())
    assert 0.45 < hits / 500 < 0.65  # a patch of the background may touch the structure
    nothing = [patch_window(label.shape[2:], centres[:0], plan, random)[2].start for _ in range(200)]
    assert len({*nothing}) > 10
    # Where everything is known, centres are the same to the bit.
    complete = torch.ones_like(known)
    assert torch.equal(patch_centres(label, complete), patch_centres(label))
    assert 0 not in patch_centres(label)[:, 1]


def test_what_does_not_fit_into_memory_is_kept_in_files(tmp_path):
    tensors = {"image": torch.rand(2, 1, 5, 6), "label": torch.arange(4)}
    size = sum(value.nbytes for value in tensors.values())
    for folder in (None, tmp_path / "kept"):
        cache = CaseCache(Machine(size / 2**30, folder))
        stored = [cache.get((i,), lambda: dict(tensors)) for i in range(3)]
        assert [case.tensors is None for case in stored] == [False, True, True]
        assert cache.num_bytes == size
        for case in stored:
            assert torch.equal(case.read("label"), tensors["label"])
            assert torch.equal(case.read("image", 1), tensors["image"][1])
            assert torch.equal(
                case.read("image", 1, (slice(1, 3), slice(2, 6))), tensors["image"][1][:, 1:3, 2:6]
            )
            assert case.shape("image") == (2, 1, 5, 6)
            assert ("image" in case, "affine" in case) == (True, False)
    # Found again by a later process, and made anew after a kill in the middle of writing.
    (tmp_path / "kept/.abc").mkdir()
    later = CaseCache(Machine(0, tmp_path / "kept"))
    for key in ((1,), (2,)):
        later.get(key, lambda: pytest.fail("it is there"))
    calls = []
    later.get((0,), lambda: calls.append(0) or dict(tensors))
    assert calls == [0]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        CaseCache(Machine(0, tmp_path / "file")).get((0,), lambda: dict(tensors))


def train(config, data, **more):
    return run_in_process(config, data, sorted(p.name for p in data.iterdir() if p.is_dir()), "cpu", **more)


def volume_config(data, methods="fedavg", plan=VOLUMES, **changes):
    from medfedaug.methods import parse_methods
    from medfedaug.simulate import configure

    values = {**TINY_NETWORK, "rounds": 1, "batch_size": 2, **changes}
    return configure(find_sites(data), methods=tuple(parse_methods(methods)), plan=plan, **values)


def test_methods_train_on_patches_of_volumes(volumes_dir):
    server = train(volume_config(volumes_dir, "norm,fedfd_a"), volumes_dir)
    assert server.record.test["site_A"]["dice"] is not None
    assert all(torch.isfinite(value).all() for value in server.state.values() if value.is_floating_point())


def test_statistics_are_of_what_the_network_sees(volumes_dir):
    """Of the resampled volume, whole or where it is brighter than the darkest voxel."""
    plan = Plan(spatial_dims=3, spacing=(2.0, 2.0, 2.0), orientation="RAS", patch_size=(16, 16, 16))
    trainer = SiteTrainer(volume_config(volumes_dir, plan=plan), volumes_dir / "site_B", "cpu")
    trainer.open("site_B")
    images = []
    for case in trainer.folder.cases["training"]:
        whole = trainer.folder.load_image(case, "scale")[0]
        small = torch.nn.functional.interpolate(whole.flip(0)[None, None], (10, 10, 12), mode="trilinear")
        images.append(small[0, 0].double())
    own = trainer.statistics()
    assert float(own.mean) == pytest.approx(float(torch.stack([x.mean() for x in images]).mean()), rel=1e-5)
    inside = trainer.statistics("foreground")
    expected = torch.stack([x[x > x.min()].std(correction=0) for x in images]).mean()
    assert float(inside.std) == pytest.approx(float(expected), rel=1e-5)
    assert float(inside.mean) > float(own.mean)


def test_scores_are_those_of_the_grid_of_the_file(volumes_dir, tmp_path, run):
    """A run on a coarser grid; `evaluate` opens it again, and no file is left behind."""
    plan = tmp_path / "plan.json"
    save_plan(plan, Plan(spatial_dims=3, spacing=(1.5, 1.5, 1.5), orientation="RAS", patch_size=(16, 16, 16)))
    run.ok(
        *("simulate", "--data", volumes_dir, "--out", tmp_path / "run", "--methods", "fedrdn,fedfa"),
        *("--engine", "inprocess", "--rounds", 1, "--plan", plan, "--overlap", 0.25, "--no-report"),
        *TINY_OPTIONS,
        *("--cache", tmp_path / "cache", "--memory", 0),
    )
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["config"]["plan"]["overlap"] == 0.25
    assert results["config"]["batch_size"] == 2
    again = evaluate_model(tmp_path / "run/global_model.pt", volumes_dir)
    for site, entry in results["test"]["sites"].items():
        assert again["sites"][site]["cases"] == pytest.approx(entry["cases"], abs=1e-3)


# ---------------------------------------------------------------- plans that are made


def test_a_plan_follows_from_the_fingerprints_by_its_rules():
    mm1, mm3 = ((160, 160, 160), (1.0, 1.0, 1.0), 30), ((54, 54, 54), (3.0, 3.0, 3.0), 10)
    made = make_plan(prints_of(A=mm1, B=mm3), asked())
    plan = made.changes["plan"]
    assert (plan.spatial_dims, plan.orientation, plan.spacing) == (3, "RAS", (1.0, 1.0, 1.0))
    assert all(n % 16 == 0 for n in plan.patch_size)
    assert make_plan(prints_of(B=mm3, A=mm1), asked()).changes == made.changes
    # Less memory, smaller patches: what is counted is within it.
    small = make_plan(prints_of(A=mm1, B=mm3), asked(memory=4.0)).changes["plan"]
    assert np.prod(small.patch_size) < np.prod(plan.patch_size)
    with pytest.raises(ConfigError, match="not even patches of 16 x 16 x 16"):
        make_plan(prints_of(A=mm1), asked(memory=0.001))
    # Thick slices keep their own coarse axis, and are pooled less along it.
    thick = ((320, 320, 24), (0.5, 0.5, 5.0), 12)
    made = make_plan(prints_of(A=thick), asked(network="dynunet"))
    assert made.changes["plan"].spacing is None  # all alike
    strides = np.array(made.changes["network_args"]["strides"])
    assert strides[:, 2].prod() < strides[:, 0].prod()
    # Few slices are planned as slices, with a larger batch.
    flat = make_plan(prints_of(A=((256, 256, 5), (1.0, 1.0, 8.0), 12)), asked())
    assert (flat.changes["plan"].spatial_dims, flat.changes["plan"].patch_size) == (2, (256, 256))
    assert flat.changes["batch_size"] == 16
    # A network that is made for images of one size is made for the patch.
    sized = make_plan(prints_of(A=((40, 40, 40), (1.0, 1.0, 1.0), 12)), asked(network="unetr"))
    assert sized.changes["plan"].patch_size == (48, 48, 48)
    # Files that say nothing of millimetres.
    unknown = make_plan(prints_of(A=((64, 64, 32), (0.0, 0.0, 0.0), 12)), asked()).changes["plan"]
    assert (unknown.orientation, unknown.spacing, unknown.patch_size) == (None, None, (64, 64, 32))
    # What is given stays.
    kept = make_plan(
        prints_of(A=mm1),
        asked(given=["patch_size", "spacing"], plan=Plan(3, spacing=(2, 2, 2), patch_size=(32, 32, 32))),
    )
    assert (kept.changes["plan"].spacing, kept.changes["plan"].patch_size) == ((2, 2, 2), (32, 32, 32))


def test_a_site_that_claims_millions_of_cases_decides_nothing():
    honest = {name: ((64, 64, 64), (1.0 + i / 5,) * 3, 50) for i, name in enumerate("ABCD")}
    finest = make_plan(prints_of(**honest, E=((64, 64, 64), (1e-3,) * 3, 2**31)), asked()).changes["plan"]
    coarsest = make_plan(prints_of(**honest, E=((64, 64, 64), (900.0,) * 3, 2**31)), asked()).changes["plan"]
    for made in (finest, coarsest):
        assert all(1.0 <= edge <= 1.6 for edge in made.spacing)


def test_the_bytes_of_a_step_are_counted():
    with torch.device("meta"):
        network = torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.ReLU())
    weights = (4 * 27 + 4) * 4
    # Kept for the backward pass: the input of the convolution, and the output of the ReLU, whose gradient
    # comes on top.
    assert training_bytes(network, (2, 1, 8, 8, 8)) == (2 * 512 + 2 * (2 * 4 * 512)) * 4 + 4 * weights


def test_a_plan_is_made_by_the_federation_and_kept(volumes_dir, tmp_path, run):
    """`plan` makes of the data what `simulate --plan auto` makes of what the sites send."""
    options = (*TINY_OPTIONS, "--plan-memory", 0.02, "--overlap", 0.25)
    out = run.ok("plan", "--data", volumes_dir, "--out", tmp_path / "plan.json", *options)
    assert "of 0.02 GiB" in " ".join(out.split())
    assert "the median over the sites" in (tmp_path / "plan.html").read_text()
    simulate = ("simulate", "--data", volumes_dir, "--methods", "fedrdn", "--plan", "auto", *options)
    flags = ("--engine", "inprocess", "--rounds", 1, "--no-pictures", "--out", tmp_path / "run")
    code, _, err = run(*simulate, *flags)
    assert code == 0, err
    results = json.loads((tmp_path / "run/results.json").read_text())
    plan = load_plan(tmp_path / "plan.json")
    assert Plan.from_dict(results["config"]["plan"]) == plan
    assert plan.overlap == 0.25
    assert plan.spatial_dims == 3
    assert set(results["planned"]["fingerprints"]) == {"site_A", "site_B"}
    assert "plan: spacing" in err
    run.ok(*simulate, *flags, "--resume")
    assert "The plan" in (tmp_path / "run/report.html").read_text()


def test_a_run_with_a_plan_of_its_own_is_continued_with_it(volumes_dir, tmp_path):
    methods, carrier = "pooled,norm", PooledCarrier
    config = volume_config(volumes_dir, methods, plan=Plan(), planning={"memory": 0.02}, rounds=2)
    whole = train(config, volumes_dir, carrier=carrier)
    events = []

    def stop(event):
        events.append(event["event"])
        if event["event"] == "round_started" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, volumes_dir, carrier=carrier, on_event=stop, state_dir=tmp_path / "state")
    assert "planned" in events
    events.clear()
    again = train(
        config,
        volumes_dir,
        carrier=carrier,
        on_event=lambda e: events.append(e["event"]),
        state_dir=tmp_path / "state",
        resume=True,
    )
    assert "planned" not in events
    assert again.config == whole.config
    assert all(torch.equal(again.state[key], value) for key, value in whole.state.items())


@pytest.mark.parametrize("min_sites", [0, 2])
def test_a_site_that_sends_no_fingerprint_is_named_or_done_without(volumes_dir, tmp_path, min_sites):
    class Silent(InProcessCarrier):
        def ask(self, request, sites, needed, accept):
            if request.task != FINGERPRINT:
                return super().ask(request, sites, needed, accept)
            super().ask(request, [site for site in sites if site != "site_C"], needed, accept)
            return {"site_C": "site site_C did not answer within 1 s"}

    data = tmp_path / "data"
    make_phantom(data, sites=3, patients=5, shape=(20, 20, 12), seed=0)
    config = volume_config(data, plan=Plan(), planning={"memory": 0.02})
    more = {"carrier": Silent, "execution": Execution(min_sites=min_sites)}
    if not min_sites:
        with pytest.raises(RunFailed, match="no plan could be made: site site_C did not answer"):
            train(config, data, **more)
        return
    server = train(config, data, **more)
    assert set(server.planning.sites) == {"site_A", "site_B"}
    assert set(server.sites) == {"site_A", "site_B", "site_C"}


def test_a_site_whose_fingerprint_is_none_is_named():
    good = namespaced(prints_of(A=((64, 64, 64), (1.0, 1.0, 1.0), 12))["A"], "plan")
    planning = Planning(asked(), "0" * 32)
    assert planning.accept("A", Reply(FINGERPRINT, payload=good))
    for key, value in (
        ("extent", -1.0),
        ("extent", 0.5),  # half a voxel
        ("extent", 1e9),
        ("spacing", 1e9),
        ("foreground", 2.0),
        ("cases", 0.0),
        ("extent", torch.nan),
    ):
        bad = {**good, f"plan/{key}": torch.full_like(good[f"plan/{key}"], value)}
        assert not planning.accept("B", Reply(FINGERPRINT, payload=bad))
        assert "site B" in planning.refused["B"]
        assert key in planning.refused["B"]
    for key in ("more", "plan/more", "plan/extent"):
        assert not planning.accept("B", Reply(FINGERPRINT, payload={**good, key: torch.ones(3)}))
    assert list(planning.sites) == ["A"]


def test_a_site_sends_no_fingerprint_of_fewer_cases_than_its_policy_allows(volumes_dir):
    config = volume_config(volumes_dir, plan=Plan(), planning={"memory": 0.1})
    trainer = SiteTrainer(
        config, volumes_dir / "site_A", "cpu", privacy=SitePrivacy(PrivacyPolicy(min_images=10))
    )
    trainer.open("site_A")
    with pytest.raises(PrivacyRefused, match="min_images"):
        site_fingerprint(trainer)


def test_a_fingerprint_is_in_one_order_of_axes(volumes_dir):
    site = VolumeFolder.open(volumes_dir / "site_B")
    entries = fingerprint(site, site.classes)
    assert entries["extent"][1].tolist() == pytest.approx([20, 20, 24])
    assert entries["spacing"][1].tolist() == pytest.approx([1, 1, 2])
    assert entries["cases"].tolist() == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--patch-size", "16,16"), "patch_size must be 3 numbers"),
        (("--spacing", "1,0,1"), "spacing must be three lengths"),
        (("--orientation", "RAA"), "orientation must have a letter"),
        (("--image-size", "32"), "image_size resizes slices"),
        (("--plan-memory", "1"), "--plan-memory is for --plan auto"),
        (("--plan", "nowhere.json"), "nowhere.json: not a plan"),
    ],
)
def test_options_that_make_no_plan_are_one_line(options, message, run, volumes_dir, tmp_path):
    base = ("simulate", "--data", volumes_dir, "--methods", "fedavg", "--out", tmp_path / "out")
    err = run.refused(*base, "--spatial-dims", 3, *options)
    assert message in " ".join(err.split())
    assert not (tmp_path / "out").exists()


def test_a_plan_that_needs_geometry_names_the_file_without(make_site, run, tmp_path):
    import nibabel

    folders = [make_site(name, cases=(2, 1, 1)) for name in "AB"]
    file = folders[0] / "images/0.nii.gz"
    bare = nibabel.Nifti1Image(np.asanyarray(nibabel.load(file).dataobj), None)
    bare.header["sform_code"] = bare.header["qform_code"] = 0
    bare.to_filename(file)
    err = run.refused(
        *("simulate", "--data", folders[0].parent, "--methods", "fedavg", "--out", tmp_path / "out"),
        *("--engine", "inprocess", "--spacing", "1,1,1", "--rounds", 1),
    )
    assert "the file states no geometry" in err
    assert "0.nii.gz" in err


def test_a_plan_with_tiny_voxels_is_refused_before_the_memory_is_full(make_site, run, tmp_path):
    """The plan may be the server's."""
    data = make_site("A", cases=(2, 1, 1)).parent
    make_site("B", cases=(2, 1, 1))
    err = run.refused(
        *("simulate", "--data", data, "--methods", "fedavg", "--out", tmp_path / "out"),
        *("--engine", "inprocess", "--spacing", "0.005,0.005,0.005", "--rounds", 1),
    )
    assert "resampled to 0.005 x 0.005 x 0.005 mm it would have" in err
    assert "536,870,912 numbers are prepared of one case" in err
