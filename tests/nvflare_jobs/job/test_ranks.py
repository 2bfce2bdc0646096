"""A script's loop in two processes of a site, joined by gloo on a CPU."""

import json

import pytest
import torch
import torch.distributed as dist
from script_site import ScriptSite

from medfedaug.config.run import RunConfig
from medfedaug.config.training_scripts import loop_reference
from medfedaug.data.phantom import make_phantom
from medfedaug.errors import ConfigError
from medfedaug.federation import FederationServer, Reply, Request, Site, SiteTrainer
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.methods import parse_methods
from medfedaug.nvflare_jobs.job import ranks

NETWORK = {"features": [4, 4, 8, 8, 8, 4], "norm": ["instance", {"affine": True}]}

SCRIPT = """
import os
import signal
import time

import torch
import torch.distributed as dist
from monai.data import DataLoader, Dataset
from monai.networks.nets import BasicUNet
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, ScaleIntensityd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from medfedaug import client

KEYS = ("image", "label")
network = BasicUNet(2, 1, 2, features=(4, 4, 8, 8, 8, 4), norm=("instance", {"affine": True}))
federation = client.join(network)
several = dist.is_initialized()
rank = dist.get_rank() if several else 0
model = DistributedDataParallel(network) if several else network
load = Compose([LoadImaged(KEYS), EnsureChannelFirstd(KEYS), ScaleIntensityd("image")])
volumes = [load({key: file[key] for key in KEYS}) for file in client.files("training")]
slices = [{key: volume[key][..., i] for key in KEYS} for volume in volumes for i in range(2, 6)]
dataset = Dataset(slices, federation.transform)
sampler = DistributedSampler(dataset, shuffle=False) if several else None
loader = DataLoader(dataset, batch_size=2 if several else 4, sampler=sampler)
criterion = torch.nn.CrossEntropyLoss()
optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
for round_ in federation:
    for number, batch in enumerate(loader):
        image, label = batch["image"].as_tensor(), batch["label"].as_tensor()
        if several and rank == 1 and round_.number == 2 and number == 1:
            pass
        output = model(image)
        loss = criterion(output, label[:, 0].long()) + federation.loss_terms(batch, output)
        optimiser.zero_grad()
        loss.backward()
        federation.before_step()
        optimiser.step()
        federation.step(loss)
"""
ENDED = (
    "site site_A: rank 1 of 2 of the training script train_2.py ended before round 2 was over ({}); "
    "the site's log says why"
)
TROUBLE = SCRIPT[SCRIPT.index("        if several") : SCRIPT.index("        output = ")]


class Federation:
    """A site with a script, a site without, and their server.

    Args:
        root: for the site's files.
        data: of both.
        script: the text of the script.
        methods: of the job.
        processes: of the site with the script.
        **settings: of its kit.
    """

    def __init__(self, root, data, script, methods="scaffold", processes=2, **settings) -> None:
        path = root / f"train_{processes}.py"
        path.write_text(script)
        values = {"rounds": 2, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.05}
        values |= {"network_args": NETWORK, "methods": tuple(parse_methods(methods))}
        config = RunConfig(**values, loop=loop_reference(str(path))[0])
        self.site = ScriptSite(
            root / f"kit_{processes}", data / "site_A", path, processes=processes, **settings
        )
        self.site.start(config)
        self.server = FederationServer(config)
        self.other = Site("site_B", SiteTrainer(RunConfig(**values), data / "site_B", "cpu", threads=1))

    def prepare(self) -> Reply:
        """Both sites prepare. Returns the answer of the site with the script, as the others do."""
        reply = self._ask(self.server.prepare(), self.server.accept_preparation)
        self.server.finish_preparation()
        return reply

    def round(self) -> Reply:
        """One round of both sites."""
        reply = self._ask(self.server.start_round(["site_A", "site_B"]), self.server.accept)
        self.server.finish_round()
        return reply

    def _ask(self, request: Request, accept) -> Reply:
        reply = self.site.answer(request)
        assert not reply.error, reply.error
        assert accept("site_A", reply)
        assert accept("site_B", self.other.answer(request))
        return reply

    def refused(self, request: Request | None = None) -> str:
        """The reason why the site with the script sends nothing for the next round."""
        reply = self.site.answer(request or self.server.start_round(["site_A", "site_B"]))
        assert not reply.weights
        return reply.error


@pytest.fixture
def federation(tmp_path):
    """`federation("os._exit(3)", processes=2)`, with trouble in the second step of rank 1 in round 2."""
    data, begun = tmp_path / "data", []
    make_phantom(data, sites=2, patients=4, shape=(32, 32, 8), seed=0)

    def begin(trouble="pass", script=SCRIPT, **given) -> Federation:
        text = script.replace(TROUBLE, TROUBLE.replace("pass", trouble))
        begun.append(Federation(tmp_path, data, text, **given))
        return begun[-1]

    yield begin
    begun[-1].site.end()
    assert not dist.is_initialized()


def same(found: Reply, expected: Reply) -> None:
    assert found.num_samples == expected.num_samples == 8
    if "val_dice" in found.metrics:
        assert found.metrics["val_dice"] == pytest.approx(expected.metrics["val_dice"], abs=1e-6)
    for part in ("weights", "payload"):
        one, other = getattr(found, part), getattr(expected, part)
        assert one.keys() == other.keys()
        for key, value in one.items():
            torch.testing.assert_close(value, other[key], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_two_processes_are_one_with_the_doubled_batch_until_one_dies(federation):
    one = federation(processes=1)
    expected = [one.prepare(), one.round()]
    one.site.end()  # NVFlare has one script in a process
    two = federation("os._exit(3)", processes=2)
    for found, reply in zip([two.prepare(), two.round()], expected, strict=True):
        same(found, reply)
    assert two.refused() == ENDED.format("exit status 3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (
            "raise OSError('no such disk')",
            "rank 1 of 2 of the training script train_2.py ended before round 2",
        ),
        ("time.sleep(600)", "the training script train_2.py ended before round 2 was over (RuntimeError: "),
        ("break", "the training script train_2.py ended before round 2 was over (RuntimeError: "),
        (
            "next(network.parameters()).data += 1",
            "rank 1 of 2 has other weights than rank 0 after the round; take the same steps",
        ),
    ],
)
def test_processes_that_do_not_train_together_are_told_and_nothing_hangs(
    federation, monkeypatch, trouble, reason
):
    monkeypatch.setattr(ranks, "_PATIENCE", 15.0)
    two = federation(trouble)
    two.prepare()
    two.round()
    assert reason in two.refused()


@pytest.mark.slow
def test_every_process_has_the_methods_in_a_simulation(run, tmp_path, monkeypatch):
    make_phantom(tmp_path / "data", sites=2, patients=4, shape=(32, 32, 8), seed=0)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("MEDFEDAUG_PROCESSES", "2")
    settings = ("--methods", "fedfa+,fedrdn,fedbn", "--network-args", json.dumps(NETWORK), "--rounds", 2)
    code, _, err = run(
        *("simulate", "--data", tmp_path / "data", *settings, "--device", "cpu", "--threads", 1),
        *("--loop", tmp_path / "train.py", "--no-report", "--out", tmp_path / "run"),
    )
    assert code == 0, err
    rounds = json.loads((tmp_path / "run/results.json").read_text())["rounds"]
    assert all(len(entry["sites"]) == 2 and not entry.get("refused") for entry in rounds)


def test_the_number_of_processes_is_the_sites():
    assert SiteSettings.load(None, {"MEDFEDAUG_PROCESSES": "2"}).processes == 2
    assert SiteSettings.load(None, {}).processes == 1
    for value in (0, 1.5, "two"):
        with pytest.raises(ConfigError, match="processes"):
            SiteSettings.from_dict({"processes": value}, "medfedaug.json")
