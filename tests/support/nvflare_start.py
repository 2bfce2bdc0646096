"""Run as a process: starts kits as NVFlare's parent and job processes do, and gives them jobs.

Argument: a JSON list with KIT, ``client`` or ``server``, and APP... of each kit, which has a process of its
own: a copy of this one, which has imported PyTorch. Prints a line of JSON for each app: the answer of the
parent process, which deploys it, and what a job process builds, or says, where it is given the app all the
same.
"""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey, SiteType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.app.fl_conf import FLClientStarterConfiger, FLServerStarterConfiger
from nvflare.private.fed.client.client_json_config import ClientJsonConfigurator
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.fed.utils.fed_utils import authorize_build_component, security_init
from nvflare.private.privacy_manager import PrivacyManager, PrivacyService

import medfedaug.nvflare_jobs.job.recipe  # noqa: F401, for PyTorch, which the classes of jobs need

JOB = "job"


def start(kit: Path, server: bool, job: str | None) -> tuple[Workspace, argparse.Namespace]:
    """As ``client_train`` and ``server_train``, or their job processes, until they connect."""
    name = SiteType.SERVER if server else kit.name
    workspace = Workspace(str(kit), name, "config")
    arguments = argparse.Namespace(
        job_id=job, client_name=name, workspace=str(kit), sp_scheme="grpc", sp_target="localhost:1"
    )
    arguments.parent_url, arguments.parent_conn_sec = "tcp://localhost:1", ""
    options = [f"uid={name}", "org=org", "secure_train=true", "config_folder=config"]
    kind = FLServerStarterConfiger if server else FLClientStarterConfiger
    configurator = kind(workspace, arguments, options)
    configurator.configure()
    if job is None:
        site_type = SiteType.SERVER if server else SiteType.CLIENT
        security_init(True, "org", workspace, configurator.app_validator, site_type)
        PrivacyService.initialize(PrivacyManager(None, None, None))
    return workspace, arguments


def deployed(workspace: Workspace, app: Path) -> str:
    meta = {
        "job_id": JOB,
        "submitter_name": "lead@example.org",
        "submitter_org": "o",
        "submitter_role": "lead",
    }
    data = zip_directory_to_bytes(str(app), "")
    try:
        return AppDeployer().deploy(workspace, JOB, meta, "app", data, FLContext()) or ""
    except Exception as error:
        return str(error)


def built(workspace: Workspace, arguments: argparse.Namespace, server: bool, app: Path) -> str:
    side, kind = ("server", ServerJsonConfigurator) if server else ("client", ClientJsonConfigurator)
    try:
        file = str(app / f"config/config_fed_{side}.json")
        configurator = kind(workspace, file, arguments, str(app))
        context = FLContext()
        context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True)
        context.set_prop(FLContextKey.CURRENT_JOB_ID, JOB, private=False, sticky=True)
        context.set_prop(FLContextKey.JOB_META, {}, private=True)
        configurator.set_component_build_authorizer(
            authorize_build_component, fl_ctx=context, event_handlers=[]
        )
        configurator.configure()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return json.dumps(configurator.config_data)


def answer(kit: Path, server: bool, apps: list[Path]) -> None:
    workspace, _ = start(kit, server, None)
    refusals = [deployed(workspace, app) for app in apps]
    ConfigService.reset()
    workspace, arguments = start(kit, server, JOB)
    for app, refusal in zip(apps, refusals, strict=True):
        report = {"deployed": refusal, "built": built(workspace, arguments, server, app)}
        print(json.dumps(report), flush=True)


def main() -> None:
    logging.disable(logging.CRITICAL)
    for kit, side, *apps in json.loads(sys.argv[1]):
        if copy := os.fork():
            _, status = os.waitpid(copy, 0)
            if status:
                sys.exit(1)
        else:
            answer(Path(kit), side == "server", [Path(app) for app in apps])
            return


if __name__ == "__main__":
    main()
