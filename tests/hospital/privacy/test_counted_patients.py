"""Arguments of a job that decide how many patients are behind a number, and methods that cannot say which.

Each job runs through the executor and the gate of a hospital with a kit's default rules.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hospitals import Hospital
from outside_package import outside_package as outside_package
from PIL import Image

from medfedaug.config.run import RunConfig
from medfedaug.federation import FederationServer
from medfedaug.federation.messages.messages import Reply, Request
from medfedaug.federation.site.entry_patients import EntryPatients
from medfedaug.methods import parse_methods
from medfedaug.methods.census import Census

SIDE = 6


def photographs(folder: Path, classes: int = 2, patients: int = 20) -> Path:
    """A site of photographs, one of each patient: 20 patients of a class are 12 training photographs."""
    rng = np.random.default_rng(1)
    for label, number in itertools.product(range(classes), range(patients)):
        (folder / f"c{label}").mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"c{label}" / f"p{number:03d}.png")
    return folder


@pytest.fixture
def hospital(tmp_path):
    def make(privacy=None, **data) -> Hospital:
        return Hospital(tmp_path / "kits/A", photographs(tmp_path / "data/A", **data), privacy=privacy or {})

    return make


def job(methods: str = "fedavg", arguments=None, *, norm="group", classes: int = 2, **given) -> RunConfig:
    if isinstance(norm, str):
        norm = [norm, {"num_groups": 1} if norm == "group" else {}]
    network = {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [4, 4, 4, 4], "norm": norm}
    return RunConfig(
        task="classification",
        methods=tuple(parse_methods(methods, arguments or {})),
        network="monai.networks.nets.ResNet",
        network_args={**network, "conv1_t_size": 3, "no_max_pool": True, "shortcut_type": "A"},
        in_channels=3,
        classes=tuple(f"c{n}" for n in range(classes)),
        image_size=SIDE,
        intensity="scale",
        **{
            "rounds": 1,
            "local_steps": 5,
            "batch_size": 2,
            "learning_rate": 1e-12,
            "optimizer": "sgd",
            **given,
        },
    )


def answers(site: Hospital, config: RunConfig) -> tuple[Reply, Reply]:
    """Begin a job, and return the answers to its first two requests."""
    site.start(config, "job")
    server = FederationServer(config, lambda event: None)
    weights = {key: value.clone() for key, value in server.state.items()}
    prepared = site.answer(Request("prepare", run=server.run))
    return prepared, site.answer(Request("train", 1, weights=weights, run=server.run))


def refused(reply: Reply, reason: str) -> None:
    assert reason in reply.error
    assert not reply.weights
    assert not reply.payload


@pytest.mark.parametrize("method", ["fedproto", "fpl"])
def test_no_class_of_a_few_kept_images_leaves(hospital, method):
    """Five steps of two images keep ten features of five classes: one or two patients of each."""
    _, reply = answers(hospital(classes=5), job(method, classes=5))
    assert reply.error == ""
    assert all(not value.any() for value in reply.payload.values())


def test_no_class_leaves_an_honest_server(hospital):
    """A lead who chooses the weights gets no class's mean from the result that all sites receive."""
    config = job("fedproto")
    _, reply = answers(hospital(), config)
    assert reply.payload["fedproto/counts"].tolist() == [0.0, 0.0]
    _, reply = answers(hospital(), job("fedproto", local_steps=0, batch_size=8))
    assert reply.payload["fedproto/counts"].tolist() == [12.0, 12.0]


@pytest.mark.parametrize("arguments", [{"bins": 2000}, {"tau": 1e-7}])
def test_no_histogram_lists_the_patients(hospital, arguments):
    with pytest.raises(Exception, match="fedfa_h"):
        answers(hospital(), job("fedfa_h", {"fedfa_h": arguments}))


def test_each_bin_of_a_histogram_has_enough_patients(hospital):
    _, reply = answers(hospital(), job("fedfa_h", {"fedfa_h": {"bins": 32, "stage": "enc2"}}))
    assert reply.error == ""
    heights = {round(float(height), 6) for height in reply.payload["fedfa_h/histogram"].flatten()}
    assert len(heights) <= 2 * 4  # of 24 patients in each of four channels there are two groups of bins


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("fedmix", {"group": 10}), ("feddg_ga", {}), ("fedsr", {}), ("fraug", {}), ("bin", {})],
)
def test_images_losses_and_weights_of_classes_leave_in_simulations_only(hospital, method, arguments):
    prepared, _ = answers(hospital(), job(method, {method: arguments}))
    refused(prepared, f"{method} sends what a site cannot say the patients of, and runs in simulations only")


def test_a_running_average_is_of_all_patients(hospital):
    """With the momentum 0 the last batch of two images is the running average."""
    site = hospital()
    arguments = {"fedfa": {"momentum": 0.0, "prob": 1.0, "stages": ["layer1"]}}
    prepared, reply = answers(site, job("fedfa", arguments))
    assert prepared.error == reply.error == ""
    trainer = site.executor._site.trainer
    layer = next(iter(trainer.parts["fedfa"].layers.values()))
    (mean,) = (value for key, value in reply.payload.items() if key.endswith("/mean"))
    assert not torch.allclose(mean, layer.statistics()[0])
    cases = list(trainer.parts["fedfa"]._by_case())
    key = f"{layer.stage}/mean"
    assert torch.allclose(mean, torch.stack([case[key] for case in cases]).mean(dim=0).float(), atol=1e-5)


def test_no_norm_layer_keeps_the_last_batch_alone(hospital):
    for momentum in (1.0, 3.0, -0.5):
        _, reply = answers(hospital(), job(norm=["batch", {"momentum": momentum}]))
        refused(reply, "running_mean stays here: ")


def test_a_running_average_over_few_images_stays(hospital):
    """The last four steps of two images have weights of a tenth or more."""
    _, reply = answers(hospital(), job(norm=["batch", {"momentum": 0.5}]))
    refused(reply, "stays here: fewer than 10 patients would be behind it")


def test_an_update_of_few_patients_stays(hospital):
    _, reply = answers(hospital({"min_images": 12}), job())
    refused(reply, "stays here: fewer than 12 patients would be behind it (min_images")


@pytest.mark.parametrize(
    ("methods", "arguments", "settings"),
    [
        ("fedavg", {}, {"weight_decay": 100.0}),
        ("fedprox", {"fedprox": {"mu": 100.0}}, {}),
        ("fedavg", {}, {"momentum": 100.0}),
        ("fedavg", {}, {"weight_decay": 1e6, "optimizer": "adam"}),
    ],
)
def test_no_update_is_of_one_batch_because_other_steps_fade(hospital, methods, arguments, settings):
    """A rate of 0.01 and a pull of 100 leave the last step; a momentum of 100 the first one."""
    _, reply = answers(hospital(), job(methods, arguments, learning_rate=0.01, **settings))
    refused(reply, "stays here: fewer than 10 patients would be behind it")


def test_no_update_is_of_one_class_because_the_loss_leaves_out_all_others(hospital, tmp_path):
    """The class has 3 training photographs, and all classes together 15."""
    site = hospital()
    photographs(tmp_path / "data/A/rare", classes=1, patients=5)
    (tmp_path / "data/A/rare/c0").rename(tmp_path / "data/A/c2")
    (tmp_path / "data/A/rare").rmdir()
    given = {"classes": 3, "local_steps": 0, "batch_size": 64, "learning_rate": 0.1}
    _, reply = answers(site, job(**given, loss_args={"weight": [0.0, 0.0, 1.0]}))
    refused(reply, "stays here: fewer than 10 patients would be behind it")
    _, reply = answers(site, job(**given))
    assert reply.weights


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_an_update_of_enough_patients_leaves(hospital, norm):
    prepared, reply = answers(hospital(), job(norm=norm))
    assert prepared.error == reply.error == ""
    assert reply.weights


@pytest.mark.parametrize(
    ("methods", "norm"),
    [
        ("fedrdn", "group"),
        ("fedharmo", "group"),
        ("scaffold", "group"),
        ("fednova", "group"),
        ("fedfd", "batch"),
        ("fedfd_a", "batch"),
        ("selfreg", "group"),
        ("dac_sc", "batch"),
        ("fedfa,fedfa_h", "group"),
    ],
)
def test_a_method_that_can_say_its_patients_runs_at_a_hospital(hospital, methods, norm):
    arguments = {"fedfa": {"stages": ["layer1"]}} if "fedfa" in methods.split(",") else {}
    prepared, reply = answers(hospital(), job(methods, arguments, norm=norm, local_steps=0, batch_size=4))
    assert prepared.error == ""
    if not prepared.payload:  # otherwise the server's result is missing
        assert reply.error == ""
        assert reply.payload


def test_the_number_of_samples_of_few_patients_stays(hospital):
    """Of 24 patients three have samples, as where only slices with a lesion train."""
    site, config = hospital(), job()
    site.start(config, "job")
    site.answer(Request("prepare", run="0" * 32))
    training = site.executor._site.trainer.training
    training.weights_of_cases = lambda samples: [5, 5, 5, *[0] * 21]
    reply = site.answer(Request("prepare", run="0" * 32))
    refused(reply, "number of samples stays here: fewer than 10 patients would be behind it")


def test_cases_without_anything_annotated_do_not_count_in_a_step():
    counted = Census([f"p{n}" for n in range(20)], least=10, silent=range(2, 20))
    assert counted.step(range(20)).tolist() == [*range(20)]
    assert counted.of_steps().problem(10) == "fewer than 10 patients would be behind it"


def test_running_statistics_are_also_of_cases_without_anything_annotated():
    """One patient has most of the images, and nothing annotated in them."""
    counted = Census([*range(20), *["many"] * 60], least=10, silent=range(20, 80))
    patients = EntryPatients(counted, torch.nn.BatchNorm1d(1))
    patients.begin()
    counted.step(range(80))
    patients.network(torch.randn(80, 1))
    found = patients.of(patients.network.state_dict())
    assert found["weight"].problem(10) == ""
    assert not found["running_mean"].enough(10)


def test_a_codebook_that_the_pass_changes_is_no_trained_parameter():
    """As the embedding of MONAI's `EMAQuantizer`: a parameter without gradients, of the last batch."""
    network = torch.nn.Module()
    network.codebook = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    network.still = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    network.trained = torch.nn.Parameter(torch.zeros(3))
    counted = Census(range(10), least=10)
    patients = EntryPatients(counted, network)
    patients.begin()
    counted.step(range(10))
    network.codebook.data.add_(1.0)
    found = patients.of(network.state_dict())
    assert found["codebook"] is None
    assert found["still"].problem(10) == found["trained"].problem(10) == ""


def test_a_parameter_that_a_method_trains_by_itself_has_unknown_patients():
    """With a rate of its own the last step may be all that is left."""
    counted = Census(range(10), least=10)
    patients = EntryPatients(counted, torch.nn.Linear(1, 1))
    patients.begin()
    counted.step(range(10))
    own, given = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    patients.optimised([given])
    found = patients.of({"own": own, "given": given})
    assert found["own"] is None
    assert found["given"].problem(10) == ""


CARELESS = """
import torch
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart

class Server(ServerExchange):
    shapes = {"mean": (3,)}
    def accept(self, site, payload, weight=1.0): pass
    def result(self): return {}

class Site(SitePart, SiteExchange):
    def __init__(self, context):
        self.context, self.every_round = context, self
    def collect(self):
        for images in self.context.training_images():
            last = images
        return {"mean": last.mean(dim=(0, 2, 3))}  # of the last batch
    def apply(self, payload): pass

class Careless(Method):
    name = "careless"
    def at_site(self, context): return Site(context)
    def every_round(self, context): return Server()
"""


def test_a_careless_method_of_somebody_else_sends_nothing(hospital, outside_package):
    outside_package("careless_package", CARELESS, {"medfedaug.methods": {"careless": "Careless"}})
    site = hospital()
    site.set(data=str(site.data), device="cpu", plugins=["careless_package"])
    _, reply = answers(site, job("careless"))
    refused(reply, "careless/mean stays here: the site cannot say which patients are in it")


def test_what_was_refused_before_training_does_not_leave_when_it_is_asked_for_again(
    hospital, outside_package
):
    source = CARELESS.replace("every_round", "before_training")
    outside_package("careless_package", source, {"medfedaug.methods": {"careless": "Careless"}})
    site = hospital()
    site.set(data=str(site.data), device="cpu", plugins=["careless_package"])
    site.start(job("careless"), "job")
    for _ in range(2):
        refused(site.answer(Request("prepare", run="0" * 32)), "careless/mean stays here")
