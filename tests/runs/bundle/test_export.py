"""A MONAI Bundle of a run: made by the command, run where medfedaug cannot be imported, voxel for voxel."""

import json
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from finished_runs import rehashed
from PIL import Image
from running import TINY_ARGS, TINY_NETWORK, command

from medfedaug.config.plan import Plan
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SPLITS, Case
from medfedaug.data.sites import find_sites
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.federation.server.output import write_run
from medfedaug.methods import parse_methods
from medfedaug.runs.bundle.network import plain_inference
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.simulate import configure
from medfedaug.statistics import load_statistics, save_statistics

# Runs bundles as their README says, in a process to which medfedaug and what it needs besides is not there.
ALONE = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("medfedaug", "nvflare", "typer", "SimpleITK", "filelock"):
            raise ImportError(name + " is not there")
sys.meta_path.insert(0, Blocked())
import torch
torch.set_num_threads(1)
from monai.bundle import run, verify_net_in_out
for bundle, images, predictions in json.loads(sys.argv[1]):
    configs = bundle + "/configs/"
    files = {"meta_file": configs + "metadata.json", "config_file": configs + "inference.json"}
    verify_net_in_out("network_def", device="cpu", **files)
    run(**files, bundle_root=bundle, dataset_dir=images, output_dir=predictions)
"""

# As coarse as the volumes of the phantom.
RAS, LPI = np.diag([7.2, 7.2, 25.0, 1.0]), np.diag([-6.9, -7.1, -24.0, 1.0])
OBLIQUE = np.array(
    [[0.6, -7.7, 1.4, 130.0], [6.3, 0.7, -3.5, -12.5], [0.7, 0.35, 22.8, 7.25], [0, 0, 0, 1.0]]
)

NOWHERE = Origin("", None, "")

# MONAI alone predicts in a process of its own.
pytestmark = pytest.mark.usefixtures("onednn")

RUNS = {
    "slices": ("fedavg", {"plan": Plan(orientation="RAS", normalisation=("z_score",))}),
    "resized": ("fedbn", {"image_size": 40}),
    "windows_of_slices": (
        "fedrdn,fedfa",
        {"intensity": "raw", "plan": Plan(orientation="PIR", spacing=(8.5, 6.5, 22), patch_size=(16, 16))},
    ),
    "photographs": ("fedrdn", {}),
    "windows_of_volumes": (
        "fedrdn_v,fedfd",
        {"plan": Plan(spatial_dims=3, orientation="RAS", patch_size=(16, 16, 16), overlap=0.25)},
    ),
    "tomograms": (
        "fedavg",
        {
            "plan": Plan(
                spatial_dims=3,
                spacing=(8, 9, 14),
                normalisation=("ct",),
                ct_intensities=(40.0, 150.0, 90.0, 35.0),
            )
        },
    ),
}


def give_random_weights(run: Path) -> None:
    """Weights that say something else nearly everywhere: one round of training gives one class alone."""
    generator = torch.Generator().manual_seed(4)
    for file in [run / "global_model.pt", *run.glob("state/site_*/*.pt")]:
        found = torch.load(file, weights_only=True)
        nested = [kept["network"] for kept in found["rounds"].values()] if "rounds" in found else [found]
        for state in nested:
            for key, value in state.items():
                if value.is_floating_point():
                    drawn = torch.randn(value.shape, generator=generator) * (0.5 if value.ndim > 1 else 0.2)
                    value.copy_(drawn.abs() + 0.5 if key.endswith("running_var") else drawn)
        torch.save(found, file)
    rehashed(run)


@pytest.fixture(scope="module")
def train(phantom_dir, tmp_path_factory):
    """A run of one round: `train("fedavg", plan=...)`."""

    def make(methods: str, data: Path = phantom_dir, **changes) -> Path:
        out = tmp_path_factory.mktemp("run")
        values = {**TINY_NETWORK, "rounds": 1, "batch_size": 4, "limit": 1, **changes}
        config = configure(find_sites(data), methods=tuple(parse_methods(methods, None)), **values)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        server = run_in_process(config, data, find_sites(data, limit=1), "cpu", state_dir=out / "state")
        write_run(out, server)
        torch.set_num_threads(before)
        give_random_weights(out)
        return out

    return make


@pytest.fixture(scope="module")
def runs(train, images, phantom_dir, pictures):
    """The runs of RUNS, by name."""
    made = {}
    for name, (methods, changes) in RUNS.items():
        data = pictures if name == "photographs" else phantom_dir
        made[name] = train(methods, data, **changes)
        balance(made[name], images[name])
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Two sites of grey photographs, of 8 and of 16 bits."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for site, dtype in (("site_A", np.uint8), ("site_B", np.uint16)):
        entries = []
        for index in range(3):
            label = np.zeros((20, 24), np.uint8)
            label[3:9, 4:12] = 1
            pixels = rng.integers(0, np.iinfo(dtype).max, label.shape).astype(dtype)
            for kind, values in (("images", pixels), ("labels", label)):
                (root / site / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(root / site / kind / f"{index}.png")
            entries.append({"image": f"images/{index}.png", "label": f"labels/{index}.png"})
        splits = dict(zip(("training", "validation", "test"), ([entry] for entry in entries), strict=True))
        labels = {"0": "background", "1": "lesion"}
        (root / site / "dataset.json").write_text(json.dumps({"labels": labels, **splits}))
    return root


@pytest.fixture(scope="module")
def images(tmp_path_factory, pictures) -> dict[str, Path]:
    """New images for each run: volumes with flipped and oblique axes, of several sizes and types, and PNG."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    kinds = {"ras": (RAS, np.int16), "lpi": (LPI, np.uint8), "oblique": (OBLIQUE, np.float32)}
    for index, (name, (affine, dtype)) in enumerate(kinds.items()):
        voxels = np.zeros((27 + index, 24 - index, 5 + index))
        inside = voxels[3:-2, 2:-4, 1:-1]
        inside[...] = rng.integers(20, 200, inside.shape)
        nibabel.save(nibabel.Nifti1Image(voxels.astype(dtype), affine), folder / f"{name}.nii.gz")
    cut = tmp_path_factory.mktemp("photographs")
    for index, site in enumerate(("site_A", "site_B")):
        with Image.open(pictures / site / "images/0.png") as file:
            file.crop((0, 0, 23, 17 + index)).save(cut / f"{site}.png")
    return {**dict.fromkeys(RUNS, folder), "photographs": cut}


def own_site(run: Path) -> list[str]:
    opened = FinishedRun.open(run)
    needed = opened.composition.normalises_input or opened.composition.kept_keys
    return ["--site", "site_A"] if needed else []


def balance(run: Path, images: Path) -> None:
    """Half of the voxels of each class: a label map of one class would show nothing."""
    trainer, cases = opened_trainer(run, images, "site_A")
    with torch.no_grad():
        case = trainer.task.evaluation_case(trainer.folder, cases[0], labelled=False)
        seen = trainer.evaluation_transform()({"image": case.image})["image"]
        logits = trainer.task.logits(trainer.network, seen, 4, case.placement)
    weights = torch.load(run / "global_model.pt", weights_only=True)
    weights["model.2.conv.bias"][1] -= (logits[1] - logits[0]).median()
    torch.save(weights, run / "global_model.pt")
    rehashed(run)


def run_alone(jobs: list[tuple[Path, Path, Path]]) -> None:
    asked = json.dumps([list(map(str, job)) for job in jobs])
    done = subprocess.run([sys.executable, "-c", ALONE, asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def opened_trainer(run: Path, images: Path, site: str):
    """A site of a run with the images of a folder, and these as cases."""
    opened = FinishedRun.open(run)
    cases = [Case(path.name, path, "") for path in sorted(images.iterdir())]
    splits = {**dict.fromkeys(SPLITS, ()), "test": tuple(cases)}
    folder = VolumeFolder(site, images, opened.config.classes, splits)
    model = opened.at_site(site, folder, "cpu", statistics=opened.statistics.get(site))
    assert model.recall(opened.local_state(site))
    model.network.eval()
    return model, cases


def label_maps(run: Path, images: Path, site: str = "site_A") -> dict[str, np.ndarray]:
    """What `Task.predict_case` says of images as they lie in a folder."""
    trainer, cases = opened_trainer(run, images, site)
    found = {}
    for case in cases:
        given = trainer.task.evaluation_case(trainer.folder, case, labelled=False)
        transform, size = trainer.evaluation_transform(), trainer.config.batch_size
        predicted = trainer.task.predict_case(trainer.network, given, transform, size)
        found[case.name] = predicted.label[0].numpy()
    return found


@pytest.fixture(scope="module")
def bundles(runs, images, tmp_path_factory):
    """The bundle of each run, made by the command, and where it wrote its label maps."""
    root, made = tmp_path_factory.mktemp("bundles"), {}
    for name, run in runs.items():
        out = command.ok("bundle", run, "--out", root / name, *own_site(run))
        assert "python -m monai.bundle run" in out
        made[name] = root / name, root / f"{name}-predictions"
    run_alone([(bundle, images[name], predictions) for name, (bundle, predictions) in made.items()])
    return made


@pytest.mark.parametrize("name", RUNS)
def test_monai_alone_gives_the_same_label_maps(name, runs, images, bundles):
    wanted = label_maps(runs[name], images[name])
    _, predictions = bundles[name]
    assert {path.name for path in predictions.iterdir()} == set(wanted)
    for case, label in wanted.items():
        if name == "photographs":
            found, label = np.asarray(Image.open(predictions / case)).T, label[..., 0]
        else:
            written, source = nibabel.load(predictions / case), nibabel.load(images[name] / case)
            found = np.asarray(written.dataobj)
            assert np.array_equal(written.affine, source.affine)
        assert found.dtype == np.uint8
        assert np.array_equal(found, label), f"{case}: {(found != label).sum()} voxels differ"
        assert 0.02 < label.astype(bool).mean() < 0.98, "a label map of one class would show nothing"


def test_a_bundle_has_the_files_of_the_specification(bundles):
    folder, _ = bundles["windows_of_volumes"]
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files >= {"configs/metadata.json", "configs/inference.json", "models/model.pt", "docs/README.md"}
    assert "LICENSE" in files
    metadata = json.loads((folder / "configs/metadata.json").read_text())
    assert metadata["schema"].startswith("https://github.com/Project-MONAI/")
    image, pred = (metadata["network_data_format"][key] for key in ("inputs", "outputs"))
    assert image["image"]["spatial_shape"] == [16, 16, 16]
    assert image["image"]["is_patch_data"] is True
    assert pred["pred"]["channel_def"] == {"0": "background", "1": "lesion"}
    assert "medical device" in metadata["intended_use"]
    assert "medfedaug" not in json.dumps(json.loads((folder / "configs/inference.json").read_text()))


def test_the_pair_is_that_of_the_site_and_the_readme_says_so(runs, bundles):
    folder, _ = bundles["windows_of_slices"]
    config = json.loads((folder / "configs/inference.json").read_text())
    pair = load_statistics(runs["windows_of_slices"] / "statistics.json")["site_A"]
    assert (config["mean"], config["std"]) == (pair.mean.tolist(), pair.std.tolist())
    readme = (folder / "docs/README.md").read_text()
    assert "Expected intensities" in readme
    assert "--mean '[0.21]'" in readme
    assert "site_A" not in readme


@pytest.fixture
def untrained(runs, tmp_path):
    """A run's folder with another configuration and its network's first weights: `untrained(network=...)`."""

    def make(**changes) -> FinishedRun:
        record = json.loads((runs["slices"] / "results.json").read_text())
        record["config"].update(changes)
        (tmp_path / "results.json").write_text(json.dumps(record))
        network = Composition(RunConfig.from_dict(record["config"])).network
        torch.save(network.state_dict(), tmp_path / "global_model.pt")
        give_random_weights(tmp_path)
        return FinishedRun.open(tmp_path)

    return make


@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({"network": "basicunet", "network_args": {"features": [8] * 6, "norm": "group"}}, "GroupNorm"),
        ({"network_args": {**TINY_ARGS, "norm": "instance"}}, "InstanceNorm2d"),
        ({"network": "segresnet", "network_args": {"init_filters": 8}}, "GroupNorm"),
        ({"network": "monai.networks.nets.HighResNet", "network_args": {}}, "HighResBlock"),
        ({"precision": "bfloat16"}, "BatchNorm2d"),
        (
            {
                "network": "dynunet",
                "network_args": {"filters": [4, 4, 8, 8, 8]},
                "plan": {"deep_supervision": True},
            },
            "UnetOutBlock",
        ),
    ],
)
def test_networks_are_monais_own_to_the_last_bit(untrained, changes, layer):
    plain = plain_inference(untrained(**changes), NOWHERE)  # raises where a bit differs
    assert not any(type(module).__module__.startswith("medfedaug") for module in plain.network.modules())
    assert layer in {type(module).__name__ for module in plain.network.modules()}
    assert ("bfloat16" in json.dumps(plain.config["initialize"])) == ("precision" in changes)


PLUS = "monai.networks.nets.BasicUNetPlusPlus"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"network_args": {**TINY_ARGS, "norm": "group"}}, "MONAI's class makes another one"),
        ({"network": PLUS, "network_args": {"features": [4] * 6}}, "at inference the network computes"),
    ],
)
def test_networks_that_monai_has_not_like_that_are_refused(untrained, changes, says):
    with pytest.raises(ConfigError, match=f"{says}.*; use `medfedaug predict`"):
        plain_inference(untrained(**changes), NOWHERE)


@pytest.mark.all_layers
@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ("fedfd_a", "fedfd_a: at inference the network computes what MONAI's unet does not"),
        ("fedharmo", "fedharmo: MONAI has no transform that does what NormalizeAmplitude does"),
    ],
)
def test_what_a_method_does_beyond_monai_is_refused_in_a_line(train, methods, says, tmp_path):
    err = command.refused("bundle", train(methods), "--out", tmp_path / "bundle")
    assert says in err
    assert "use `medfedaug predict`" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "bundle").exists()


def test_what_is_missing_is_named(runs, tmp_path):
    out = tmp_path / "bundle"

    def refused(name: str, *more) -> str:
        err = command.refused("bundle", runs[name], "--out", out, *more)
        assert list(tmp_path.iterdir()) in ([], [tmp_path / "own.json"])
        return err

    assert "name a site of the run with --site" in refused("windows_of_slices")
    assert "'elsewhere' took no part in the run, whose sites are site_A, site_B" in refused(
        "slices", "--site", "elsewhere"
    )
    assert "fedbn: layers of the model stay at the sites; name one with --site" in refused("resized")
    pair = load_statistics(runs["windows_of_slices"] / "statistics.json")["site_A"]
    save_statistics(tmp_path / "own.json", {"new": pair}, "raw")
    assert "do not normalise" in refused("slices", "--statistics", tmp_path / "own.json")
    assert "of raw images" in refused("windows_of_volumes", "--statistics", tmp_path / "own.json")
    assert "exclude each other" in refused(
        "slices", "--site", "site_A", "--statistics", tmp_path / "own.json"
    )
    (tmp_path / "own.json").unlink()
    out.mkdir()
    (out / "somebody's").touch()
    code, _, err = command("bundle", runs["slices"], "--out", out)
    assert (code, "not an empty folder" in err) == (2, True)
