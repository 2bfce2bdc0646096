"""Attacks on a hospital with a kit's default rules, each through the executor of the job and the site's gate.

Those whose arguments decide how many patients are behind a number are in `test_counted_patients`, and layers
that stay at a site in ``tests/federation/site/test_state.py``.
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hospitals import Deployment, Hospital
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.widgets.convert_to_fed_event import ConvertToFedEvent
from PIL import Image

from medfedaug.config.run import RunConfig
from medfedaug.federation import FederationServer
from medfedaug.federation.messages.initial_weights import InitialWeights
from medfedaug.federation.messages.messages import Request
from medfedaug.hospital.privacy.pseudonyms import PSEUDONYM_KEY
from medfedaug.methods import parse_methods
from medfedaug.nvflare_jobs.job.executor import SiteExecutor
from medfedaug.nvflare_jobs.job.messages import reply_from_model, request_to_model

SIDE, CLASSES = 4, 3
PATIENT = "MUELLER_ANNA"
LEVELS = ("error", "warning", "critical", "exception", "info")


def photographs(folder: Path, seed: int, patients: int = 10) -> Path:
    rng = np.random.default_rng(seed)
    for label, number in itertools.product(range(CLASSES), range(patients)):
        (folder / f"c{label}").mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"c{label}" / f"p{number:03d}.png")
    return folder


def copying(config: RunConfig) -> dict[str, torch.Tensor]:
    """Weights with which the features of a photograph are its pixels."""
    weights = {k: torch.zeros_like(v) for k, v in FederationServer(config, lambda event: None).state.items()}
    for row, column, channel in itertools.product(range(SIDE), range(SIDE), range(3)):
        pixel = (row * SIDE + column) * 3 + channel
        weights["conv1.weight"][pixel, channel, SIDE - 1 + row, SIDE - 1 + column] = 1.0
    for key, value in weights.items():
        if value.ndim == 1 and key.endswith(("weight", "running_var")):
            value.fill_(1.0)
    weights["bn1.bias"].fill_(10.0)
    return weights


@pytest.mark.parametrize("method", ["fedproto", "fpl"])
def test_a_lead_gets_no_photograph_from_an_honest_federation(tmp_path, method):
    """Ten features of three classes are kept, 7 training photographs a class: too few patients of each."""
    wide = 3 * SIDE * SIDE
    config = RunConfig(
        task="classification",
        methods=tuple(parse_methods(method)),
        network="monai.networks.nets.ResNet",
        network_args={
            "block": "basic",
            "layers": [1, 1, 1, 1],
            "block_inplanes": [wide] * 4,
            "conv1_t_size": 2 * SIDE - 1,
            "conv1_t_stride": SIDE,
            "no_max_pool": True,
            "shortcut_type": "A",
            "norm": ["group", {"num_groups": 1}],
        },
        in_channels=3,
        classes=tuple(f"c{n}" for n in range(CLASSES)),
        rounds=1,
        local_steps=5,
        batch_size=2,
        learning_rate=1e-12,
        optimizer="sgd",
        image_size=SIDE,
        intensity="scale",
    )
    torch.save(copying(config), tmp_path / "init.pt")
    initial = InitialWeights.read(tmp_path / "init.pt", FederationServer(config, lambda event: None).state)
    config = RunConfig.from_dict({**config.to_dict(), "init": initial.digest})
    sites = [
        Hospital(tmp_path / "kits" / s, photographs(tmp_path / "data" / s, n)) for n, s in enumerate("AB")
    ]
    deployment = Deployment(sites)
    server = deployment.run(config, initial=initial)
    trained = [reply for _, reply in deployment.replies if reply.task == "train"]
    assert all(reply.weights for reply in trained)
    for payload in (server.payload, *(reply.payload for reply in trained)):
        assert all(not value.any() for value in payload.values())


def test_a_job_without_end_is_refused(tmp_path, tiny_config):
    site = Hospital(tmp_path / "kits/A", photographs(tmp_path / "data/A", 0))
    site.start(tiny_config(rounds=10**9), "job")
    assert "rule max_rounds is 1000" in site.answer(Request("prepare", run="0" * 32)).error


def test_a_server_gets_no_more_trainings_than_a_job_may_have_rounds(hospital_of_one_round):
    site, request = hospital_of_one_round
    assert [bool(site.answer(request).weights) for _ in range(3)] == [True, True, False]
    assert "rule max_rounds is 2" in site.answer(request).error


@pytest.fixture
def hospital_of_one_round(tmp_path, tiny_config, phantom_dir):
    """A site that allows two rounds, and a request for a round of a job that it has prepared."""
    data = min(phantom_dir.glob("site_*"))
    site = Hospital(tmp_path / "kits" / data.name, data, privacy={"min_images": 1}, jobs={"max_rounds": 2})
    config = tiny_config(rounds=1)
    site.start(config, "job")
    server = FederationServer(config, lambda event: None)
    assert site.answer(Request("prepare", run=server.run)).error == ""
    return site, Request("train", 1, weights={k: v.clone() for k, v in server.state.items()}, run=server.run)


class Listening(ConvertToFedEvent):
    """NVFlare's converter of log events in a job, with everything that it would send to the server."""

    def __init__(self) -> None:
        super().__init__([f"_{level}_log_available" for level in LEVELS], "fed.")
        self.sent: list[str] = []

    def fire_fed_event(self, event_type, event_data, fl_ctx, targets=None) -> None:
        self.sent.append(str(event_data))


def context_of(kit: Path, converter: Listening) -> FLContext:
    """A context of NVFlare in which the converter hears every event."""
    workspace = SimpleNamespace(
        get_root_dir=lambda: str(kit),
        get_run_dir=lambda job: str(kit / job),
        get_startup_kit_dir=lambda: str(kit / "startup"),
        get_app_dir=lambda job: str(kit / job / "app"),
        get_job_meta_path=lambda job: str(kit / job / "meta.json"),
    )
    engine = SimpleNamespace(fire_event=converter.handle_event, get_workspace=lambda: workspace)
    own = {FLContextKey.WORKSPACE_OBJECT: workspace}
    manager = FLContextManager(
        engine=engine, identity_name="A", job_id="job", public_stickers={}, private_stickers=own
    )
    context = manager.new_context()
    context.get_workspace = lambda: workspace
    return context


@pytest.mark.parametrize("broken", ["setting", "json", "key", "data"])
def test_no_log_event_of_a_site_names_files_or_settings(tmp_path, tiny_config, broken):
    kit, converter = tmp_path / "A", Listening()
    for folder in ("local", "startup", "medfedaug/A"):
        (kit / folder).mkdir(parents=True)
    (kit / "startup/fed_client.json").write_text("{}")
    settings = {"data": f"/srv/{PATIENT}/images", "device": "cpu"}
    if broken == "setting":
        settings["privacy"] = {"min_images": "ten"}
    text = "{ not json" if broken == "json" else json.dumps(settings)
    (kit / "local/medfedaug.json").write_text(text)
    if broken == "key":
        (kit / "medfedaug/A" / PSEUDONYM_KEY).write_text("SECRET")
    executor = SiteExecutor(config=json.loads(json.dumps(tiny_config().to_dict())))
    request = FLModelUtils.to_shareable(request_to_model(Request("prepare", run="0" * 32)))
    answer = executor.execute("prepare", request, context_of(kit, converter), Signal())
    error = reply_from_model(FLModelUtils.from_shareable(answer)).error
    assert error
    assert PATIENT not in error
    assert "SECRET" not in error
    assert converter.sent == []
