"""What a job may name at the server and at a site: every class by itself, and nothing that runs commands."""

import argparse
import dataclasses
import inspect
import json
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from attacks import ATTACKS, REASON, command, spoil
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.common.excepts import ComponentNotAuthorized
from nvflare.fuel.common.excepts import ConfigError as NotBuilt
from nvflare.private.fed.client.client_json_config import ClientJsonConfigurator
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator
from nvflare.private.fed.utils.fed_utils import authorize_build_component
from nvflare.private.fed_json_config import FedJsonConfigurator

from medfedaug.config.run import RunConfig
from medfedaug.errors import MedFedAugError
from medfedaug.federation import FederationServer
from medfedaug.nvflare_jobs import FederationController, MedFedAugRecipe, SiteExecutor
from medfedaug.nvflare_jobs.kit.kit import allowed_classes, open_kit

OURS = sorted({*allowed_classes(server=True), *allowed_classes(server=False)})
SERVER, SITE = "fl-server.example.org", "hospital-a"


@pytest.fixture
def job(tmp_path, tiny_config) -> Path:
    MedFedAugRecipe(config=tiny_config(), name="job").export(job_dir=str(tmp_path))
    return tmp_path / "job"


def configure(kits: Path, side: str) -> Path:
    """A kit as `medfedaug site configure` leaves it."""
    kit = open_kit(kits / (SERVER if side == "server" else SITE))
    kit.write(kit.plan(forbid=True))
    return kit.path


def build(kit: Path, job: Path, side: str) -> FedJsonConfigurator:
    """Build the components of a job as NVFlare's job process at ``kit`` does."""
    workspace = Workspace(str(kit), kit.name, "config")
    arguments = argparse.Namespace(
        job_id="id", client_name=kit.name, workspace=str(kit), sp_scheme="grpc", sp_target="localhost:1"
    )
    kind = ServerJsonConfigurator if side == "server" else ClientJsonConfigurator
    file = job / f"app/config/config_fed_{side}.json"
    configurator = kind(workspace, str(file), arguments, str(job / "app"))
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True)
    context.set_prop(FLContextKey.CURRENT_JOB_ID, "id", private=False, sticky=True)
    context.set_prop(FLContextKey.JOB_META, json.loads((job / "meta.json").read_text()), private=True)
    configurator.set_component_build_authorizer(authorize_build_component, fl_ctx=context, event_handlers=[])
    configurator.configure()
    return configurator


@pytest.mark.parametrize("side", ["client", "server"])
def test_our_own_job_is_built(kits, job, side):
    build(configure(kits, side), job, side)


@pytest.mark.parametrize(
    "path",
    [
        "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
        "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",
        "nvflare.app_common.np.np_model_persistor.NPModelPersistor",
    ],
)
def test_no_job_names_a_component_of_nvflare_such_as_one_that_sends_logs(kits, job, tmp_path, path):
    with pytest.raises(ComponentNotAuthorized, match="is not in allow_list"):
        build(
            configure(kits, "client"),
            spoil(job, tmp_path / "x", "client", {"path": path, "args": {}}),
            "client",
        )


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_component_of_nvflare_that_builds_another_asks_the_list_again(kits, job, tmp_path, side):
    """As `FedOpt`, which NVFlare's own list allows, does with its optimiser."""
    configurator = build(configure(kits, side), job, side)
    with pytest.raises(ComponentNotAuthorized, match=r"'os\.system'.* is not in allow_list"):
        configurator.build_component(command(tmp_path / "mark"))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_with_a_reason_and_writes_nothing(kits, job, tmp_path, side, attack):
    mark = tmp_path / "mark"
    hostile = spoil(job, tmp_path / attack, side, ATTACKS[attack](mark))
    with pytest.raises((ComponentNotAuthorized, NotBuilt), match=REASON):
        build(configure(kits, side), hostile, side)
    assert not mark.exists()


# ------------------------------------------------------------------ every class that the list allows


@pytest.mark.parametrize("path", OURS)
def test_an_allowed_class_is_where_its_path_says_leads_nowhere_else_and_takes_plain_values(path):
    module, name = path.rsplit(".", 1)
    found = getattr(import_module(module), name)
    assert inspect.isclass(found)
    assert (found.__module__, found.__qualname__) == (module, name)
    assert issubclass(found, FLComponent)
    # NVFlare allows what comes after an entry and a dot, too.
    with pytest.raises(ModuleNotFoundError):
        import_module(path)
    parameters = inspect.signature(found).parameters.values()
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    plain = (str, bool, int, float, dict[str, Any], dict[str, Any] | None)
    assert all(p.annotation in plain for p in parameters)


def values(mark: Path) -> list[dict]:
    """A run in which one thing at a time is a command."""
    fields = [{field.name: command(mark)} for field in dataclasses.fields(RunConfig)]
    methods = [{"methods": [{"name": "fedavg", "args": {"method": command(mark)}}]}]
    methods += [
        {"methods": [{"name": method, "args": {argument: command(mark)}}]}
        for method, argument in (("fedfa", "prob"), ("fedrdn", "average"), ("fedharmo", "momentum"))
    ]
    networks = [
        {"network": network, "network_args": {argument: command(mark)}}
        for network, argument in (
            *(("basicunet", "features"), ("basicunet", "act"), ("unet", "norm"), ("unet", "act")),
            *(("resnet18", "pretrained"), ("resnet18", "act"), ("densenet100", "norm"), ("vit", "path")),
        )
    ]
    paths = ("os.system", "monai.networks.nets.os.system", "monai.losses.torch", "monai.networks.nets.torch")
    names = [{"methods": [{"name": path, "args": {}}]} for path in paths]
    names += [
        {key: path, f"{key}_args": {"command": command(mark)}}
        for key in ("network", "loss")
        for path in paths
    ]
    names += [{"loss": "dice", "loss_args": {key: command(mark)}} for key in ("other_act", "weight", "path")]
    return [*fields, *methods, *networks, *names]


def test_whatever_a_job_says_no_command_is_run(tmp_path):
    mark = tmp_path / "mark"
    for config in values(mark):
        for component in (SiteExecutor, FederationController):
            # A command is no number and no name, but a mapping has its keys where names are listed.
            with suppress(MedFedAugError, TypeError, ValueError):
                component(config=config)
                FederationServer(RunConfig.from_dict(config))
        assert not mark.exists(), config
