"""A MONAI Bundle as the training definition: four in the zoo's layout, against MONAI's own engines."""

import copy
import json
import re
import shutil

import bundles
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator, SupervisedTrainer

from medfedaug.config import bundle_reference
from medfedaug.config.run import RunConfig, derive_seed
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation import run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure
from medfedaug.statistics import load_statistics
from medfedaug.tasks.bundle.definition import BundleDefinition


@pytest.fixture(scope="session")
def phantom(tmp_path_factory):
    """Two sites of volumes, one training case of which two patches are cut, or more."""
    root = tmp_path_factory.mktemp("bundle_data") / "data"
    make_phantom(root, sites=2, patients=4, shape=(24, 24, 8), seed=0)
    return root


@pytest.fixture(scope="session")
def data(tmp_path_factory, phantom):
    """The folder of sites for each kind of Bundle."""
    root = tmp_path_factory.mktemp("kinds")
    return {
        "volumes": phantom,
        "channels": bundles.make_brats_sites(root / "channels"),
        "photographs": bundles.make_photographs(root / "photographs"),
    }


@pytest.fixture
def make(tmp_path):
    """Write a Bundle, changed as its configuration is: `make("volumes", lambda c: c.pop("loss"))`."""

    def write(kind: str, change=lambda config: None, name: str | None = None):
        config = bundles.KINDS[kind]()
        change(config)
        return bundles.write(tmp_path / (name or f"{kind}_bundle"), config)

    return write


def settings(bundle, sites, methods="fedavg", **changes) -> RunConfig:
    """A run of a Bundle."""
    values = {"rounds": 1, "methods": tuple(parse_methods(methods)), **changes}
    return configure(find_sites(sites), bundle=bundle, **values)


METRICS = {
    "volumes": ["mean_dice", "accuracy"],
    "channels": ["mean_dice", "mean_dice_tc", "mean_dice_wt", "mean_dice_et"],
    "photographs": ["accuracy", "f1"],
}


@pytest.mark.parametrize("kind", bundles.KINDS)
def test_a_bundle_runs_by_one_command_and_its_key_metric_selects_and_is_reported(
    kind, make, data, tmp_path, run
):
    out, bundle = tmp_path / "out", make(kind)
    command = [
        "simulate",
        "--bundle",
        bundle,
        "--data",
        data[kind],
        "--methods",
        "fedfa" if kind == "photographs" else "fedrdn,fedfa",
        "--no-report",
    ]
    rounds = 2 if kind == "volumes" else 1
    printed = run.ok(*command, "--rounds", rounds, "--engine", "inprocess", "--out", out)
    results = json.loads((out / "results.json").read_text())
    assert list(results["test"]["mean"]) == METRICS[kind]
    key = f"val_{METRICS[kind][0]}"
    scores = [entry[key] for entry in results["rounds"]]
    assert results["selected_round"] == 1 + scores.index(max(scores))
    for site in results["test"]["sites"].values():
        assert all(0 <= site[name] <= 1 for name in METRICS[kind])
    assert METRICS[kind][0] in printed.replace("\n", "").replace(" ", "") or kind == "channels"
    assert results["config"]["bundle"] == bundle_reference.AllowedBundle.of(bundle).reference
    weights = torch.load(out / "global_model.pt", weights_only=True)
    BundleDefinition(bundle_reference.allow(bundle)).network().load_state_dict(weights)
    gamma = [entry["methods"]["fedfa"] for entry in results["rounds"]]
    assert all(gamma), "FFA is in the Bundle's network"
    if kind == "photographs":
        return
    assert results["input"] == {"scaling": "bundle", "normalised_by": "fedrdn"}
    # Statistics are those of what the Bundle's transforms give, here computed by MONAI alone.
    found, (site, *_) = load_statistics(out / "statistics.json"), find_sites(data[kind])
    parser = ConfigParser(ConfigParser.load_config_file(str(next((bundle / "configs").glob("train.*")))))
    transforms = parser.get_parsed_content("validate#preprocessing")
    images = [
        transforms(
            {
                "image": [str(f) for f in case.files] if case.others else str(case.image),
                "label": str(case.label),
            }
        )["image"]
        for case in site.cases["training"]
    ]
    flat = [np.asarray(image).reshape(len(image), -1).astype(np.float64) for image in images]
    np.testing.assert_allclose(
        found[site.name].mean, np.mean([f.mean(1) for f in flat], 0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(found[site.name].std, np.mean([f.std(1) for f in flat], 0), rtol=1e-4)


def items(site, split):
    return [{"image": str(case.image), "label": str(case.label)} for case in site.cases[split]]


def engine(bundle, kind, network, loader):
    """MONAI's own engine of a Bundle, with another network and other data in it."""
    parser = ConfigParser(ConfigParser.load_config_file(str(bundle / "configs/train.json")))
    parser.parse()
    for name in ("train", "validate"):
        parser[f"{name}#handlers"] = []
    parser["network"], parser["device"] = "$None", "$torch.device('cpu')"
    get = parser.get_parsed_content
    common = {"device": torch.device("cpu"), "amp": False}
    if kind == "trainer":
        args = {k: v for k, v in parser["optimizer"].items() if k not in ("_target_", "params")}
        optimiser = torch.optim.SGD(network.parameters(), **args)
        return SupervisedTrainer(
            **common,
            max_epochs=1,
            train_data_loader=loader,
            network=network,
            optimizer=optimiser,
            loss_function=get("loss"),
            inferer=get("train#inferer"),
        )
    return SupervisedEvaluator(
        **common,
        val_data_loader=loader,
        network=network,
        inferer=get("validate#inferer"),
        postprocessing=get("validate#postprocessing"),
        key_val_metric=get("validate#key_metric"),
        additional_metrics=get("validate#additional_metrics"),
    )


def without_draws(config):
    config["train"]["random_transforms"] = []
    # Of an adaptive one, the first step of a bias without gradient is noise.
    more = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    config["optimizer"].update(_target_="torch.optim.SGD", lr=0.1, **more)


def test_a_round_is_the_mean_of_what_monais_trainer_does_at_each_site_and_its_evaluator_scores_it(
    make, phantom
):
    bundle = make("volumes", without_draws)
    config = settings(bundle, phantom)
    server = run_in_process(config, phantom, find_sites(phantom), "cpu")
    networks, samples = [], []
    for site in find_sites(phantom):
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(0, "network"))
            network = BundleDefinition.of(config).network()
        parser = ConfigParser(ConfigParser.load_config_file(str(bundle / "configs/train.json")))
        transforms = parser.get_parsed_content("validate#preprocessing")
        loader = DataLoader(Dataset(items(site, "training"), transforms), batch_size=2)
        assert len(loader) == 1  # one batch, in which the order does not matter
        engine(bundle, "trainer", network, loader).run()
        networks.append(network.state_dict())
        samples.append(len(site.cases["training"]))
    shares = [count / sum(samples) for count in samples]
    for name, value in server.state.items():
        if value.is_floating_point():
            mean = sum(share * state[name] for share, state in zip(shares, networks, strict=True))
            torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-5)
    tested = server.results()["test"]["sites"]
    network.load_state_dict(server.selection.state, strict=False)
    for site in find_sites(phantom):
        loader = DataLoader(Dataset(items(site, "test"), transforms), batch_size=1)
        evaluator = engine(bundle, "evaluator", network, loader)
        evaluator.run()
        for name in ("mean_dice", "accuracy"):
            assert tested[site.name][name] == pytest.approx(evaluator.state.metrics[f"val_{name}"], abs=1e-6)


PROBE = '''
"""Shows what reaches the first random transform of training."""
from monai.transforms import MapTransform, RandomizableTransform

SEEN = []

class Recordd(MapTransform, RandomizableTransform):
    def __init__(self, keys):
        MapTransform.__init__(self, keys)
        RandomizableTransform.__init__(self, 1.0)

    def __call__(self, data):
        SEEN.extend(data[key].clone() for key in self.keys)
        return data
'''


def test_fedrdn_is_at_the_end_of_the_deterministic_part_and_the_bundles_own_scripts_are_found(make, phantom):
    def record(config):
        config["train"]["random_transforms"].insert(
            0, {"_target_": "scripts.probe.Recordd", "keys": ["image"]}
        )

    bundle = make("volumes", record)
    (bundle / "scripts").mkdir()
    (bundle / "scripts/__init__.py").write_text("")
    (bundle / "scripts/probe.py").write_text(PROBE)
    config = settings(bundle, phantom, "fedrdn")
    server = run_in_process(config, phantom, find_sites(phantom), "cpu")
    from scripts import probe  # which only the Bundle has

    pairs = server.statistics
    site = find_sites(phantom)[0]
    plain = SiteTrainer(settings(bundle, phantom), site, "cpu")
    plain.open("")
    images = [plain.samples.training().draw(i, np.random.RandomState(0))["image"] for i in (0, 1)]
    possible = [
        (image - pair.mean.float().view(-1, 1, 1, 1)) / pair.std.float().view(-1, 1, 1, 1)
        for image in images
        for pair in pairs.values()
    ]
    own = [seen for seen in probe.SEEN[:2] if any(torch.allclose(seen, p, atol=1e-4) for p in possible)]
    assert len(own) == 2
    assert all(seen.shape[1:] == (24, 24, 8) for seen in own), "before the random crop"


def test_where_images_are_scaled_after_the_random_part_fedrdn_is_refused(make, data):
    bundle = make("photographs")
    with pytest.raises(ConfigError, match=r"ScaleIntensityd .*would undo"):
        Composition(settings(bundle, data["photographs"], "fedrdn"))
    Composition(settings(bundle, data["photographs"], "fedfa"))


def test_training_images_of_a_method_are_the_same_crops_each_time_and_are_not_augmented(make, phantom):
    trainer = SiteTrainer(settings(make("volumes"), phantom), find_sites(phantom)[0], "cpu")
    trainer.open("")
    samples = trainer.samples
    first, again = ([batch.clone() for batch in samples.images(samples.training())] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    cut = torch.cat(first)
    assert cut.shape[1:] == (1, 16, 16, 8)
    assert len(cut) == 2 * len(samples.training()), "two patches of each volume"
    assert cut.min() >= 0, "RandShiftIntensityd would make some negative"
    assert cut.max() <= 1
    by_case = [torch.cat(list(samples.images(one))) for one in samples.by_case()]
    assert torch.equal(torch.cat(by_case), cut)


def remove(*path):
    def change(config):
        inner = config
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return change


def put(value, *path):
    def change(config):
        inner = config
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


def resampled_late(config):
    spacing = {"_target_": "Spacingd", "keys": ["image", "label"], "pixdim": [2, 2, 2]}
    config["train"]["random_transforms"].append(spacing)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove("train", "trainer"), "train#trainer or trainer: is missing"),
        (remove("train", "trainer", "loss_function"), "train#trainer#loss_function: is missing"),
        (remove("network_def"), "network.*network_def"),
        (remove("train", "dataset", "transform"), "train#dataset#transform: is missing"),
        (remove("train", "trainer", "train_data_loader"), "train#trainer#train_data_loader: is missing"),
        (remove("validate", "evaluator", "key_val_metric"), "validate#evaluator#key_val_metric: is missing"),
        (put("GanTrainer", "train", "trainer", "_target_"), "train#trainer: is GanTrainer; only MONAI's"),
        (put("$print", "train", "trainer", "prepare_batch"), "train#trainer#prepare_batch"),
        (put(4, "train", "dataloader", "repeats"), "train#dataloader#repeats"),
        (put("$@network.encoder.parameters()", "optimizer", "params"), "optimizer#params"),
        (put("NoSuchNetwork", "network_def", "_target_"), "network.*NoSuchNetwork"),
        (put("SlidingWindowInferer", "train", "inferer", "_target_"), "train#inferer|inferer"),
        (put("@train#preprocessing", "validate", "dataset", "transform"), "has random transforms"),
        (resampled_late, "Spacingd needs to know where voxels lie"),
    ],
)
def test_what_a_bundle_lacks_is_one_line_that_names_the_key(change, words, make, phantom):
    with pytest.raises(MedFedAugError, match=words) as caught:
        Composition(settings(make("volumes", change), phantom))
    assert "\n" not in str(caught.value)
    assert "Bundle volumes_bundle: train.json: " in str(caught.value)


@pytest.mark.all_layers
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--network-args", '{"channels": [4]}'), "bundle and network_args cannot be combined: it follows"),
        (("--loss", "dice"), "bundle and loss cannot be combined"),
        (("--patch-size", "8,8,8", "--spatial-dims", 3), "plan follows"),
        (("--methods", "fedmix"), "fedmix and the loss of the Bundle volumes_bundle cannot be combined"),
        (("--bundle", "nowhere"), "--bundle nowhere: no such folder"),
    ],
)
def test_what_does_not_go_with_a_bundle_is_refused_before_anything_is_written(
    options, words, make, phantom, tmp_path, run
):
    command = ["simulate", "--bundle", make("volumes"), "--data", phantom, "--methods", "fedavg"]
    err = run.refused(*command, "--engine", "inprocess", "--out", tmp_path / "out", *options)
    assert re.search(words, " ".join(err.split())), err
    assert not (tmp_path / "out").exists()


def test_partial_labels_are_refused_with_the_options_that_take_the_bundles_own_loss(
    make, phantom, tmp_path, run
):
    data = tmp_path / "data"
    shutil.copytree(phantom, data)
    file = data / "site_B/dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "ignore": 255}))
    command = ["simulate", "--data", data, "--methods", "fedavg", "--rounds", 1, "--engine", "inprocess"]
    err = run.refused(*command, "--bundle", make("volumes"), "--out", tmp_path / "out")
    assert "site_B" in err
    assert "which the transforms of a Bundle do not support" in " ".join(err.split())
    option, value = "--loss", "monai.losses.DiceCELoss"
    assert f"--network CLASS.PATH {option} {value}" in " ".join(err.split())
    assert not (tmp_path / "out").exists()


def test_the_direction_of_the_key_metric_is_the_bundles(make, phantom):
    def distance(config):
        steps = [bundles.target("Activationsd", keys="pred", softmax=True)]
        steps.append(bundles.target("AsDiscreted", keys="label", to_onehot=2))
        config["train"]["postprocessing"]["transforms"] = steps
        del config["validate"]["evaluator"]["additional_metrics"]
        config["validate"]["key_metric"] = {
            "val_gap": {
                "_target_": "MeanSquaredError",
                "output_transform": "$monai.handlers.from_engine(['pred', 'label'])",
            }
        }

    server = run_in_process(
        settings(make("volumes", distance, "gap_bundle"), phantom, rounds=3, learning_rate=0.05),
        phantom,
        find_sites(phantom),
        "cpu",
    )
    results = server.results()
    scores = [entry.get("val_gap") for entry in results["rounds"]]
    known = [score for score in scores if score is not None]
    assert len(set(known)) > 1
    assert results["selected_round"] == 1 + scores.index(min(known))
    assert results["metrics"]["gap"]["higher_is_better"] is False
    assert results["test"]["worst"]["gap"]["value"] == max(
        site["gap"] for site in results["test"]["sites"].values()
    )

    def compared(config):
        config["validate"]["evaluator"]["metric_cmp_fn"] = "$lambda now, best: now < best"
        config["validate"]["key_metric"] = {
            "val_odd": copy.deepcopy(config["validate"]["key_metric"]["val_mean_dice"])
        }

    task = Composition(settings(make("volumes", compared, "odd_bundle"), phantom)).task()
    from medfedaug.metrics.registry import METRICS

    assert METRICS[task.metric].higher_is_better is False
