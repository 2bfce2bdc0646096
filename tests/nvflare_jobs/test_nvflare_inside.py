"""Check what each adapter uses of NVFlare; after an upgrade a failure says what changed."""

import inspect
import subprocess
import time
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.fuel.f3.cellnet import connector_manager
from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.job_config.fed_job_config import FedJobConfig
from nvflare.private.fed.app.simulator import simulator, simulator_runner, simulator_worker
from nvflare.private.fed.client import client_runner
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.communicator import Communicator
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.server.server_runner import ServerRunner
from nvflare.private.fed.utils.app_deployer import AppDeployer

from medfedaug.nvflare_jobs.job.carrier import _BEAT
from medfedaug.nvflare_jobs.kit.kit_process import PARENTS
from medfedaug.nvflare_jobs.kit.rejoin import _WORKER
from medfedaug.nvflare_jobs.simulator.simulator_process import VERSIONS, WORKER

REJOIN, LOST, PRESENCE, RECIPE = "kit/rejoin.py", "kit/lost_jobs.py", "job/presence.py", "job/recipe.py"


@pytest.mark.parametrize(
    ("adapter", "where", "names"),
    [
        (REJOIN, Communicator.send_heartbeat, "heartbeat_done HEART_BEAT PROJECT_NAME JOB_IDS ABORT_JOBS"),
        (REJOIN, FederatedServer.client_heartbeat, "ABORT_JOBS"),
        (REJOIN, ClientEngine.start_app, "job_meta allocated_resource token resource_manager"),
        (REJOIN, AppDeployer.deploy, "verify_folder_signature_and_get_signers validate_app"),
        (REJOIN, AppDeployer.deploy, "derive_local_app_info authorize_app_info"),
        (LOST, JobRunner, "get_client_outcome_jobs is_client_outcome_pending resolve_client_outcome"),
        (LOST, ServerEngine, "run_processes exception_run_processes client_manager job_runner"),
        (PRESENCE, ServerRunner, f'client_is_active "{_BEAT}"'),
        (PRESENCE, WFCommServer.client_is_active, "client_name reason fl_ctx"),
        (RECIPE, FedJobConfig._get_custom_file, "custom_dir module source_file"),
        ("kit/launcher.py", ProcessHandle, "self.adapter"),
        ("kit/app_validator.py", ConfigFactory, "_fmt2Loader PyhoconLoader OmegaConfLoader"),
    ],
)
def test_what_an_adapter_uses_is_there(adapter, where, names):
    text = inspect.getsource(where)
    assert not [name for name in names.split() if name not in text], adapter


@pytest.mark.parametrize("module", [*PARENTS, _WORKER, WORKER])
def test_the_modules_of_nvflares_processes_have_their_names(module):
    assert find_spec(module) is not None


@pytest.mark.skipif(version("nvflare") not in VERSIONS, reason="the adapter is off for this NVFlare")
def test_the_simulator_waits_and_starts_sites_by_the_names_that_are_replaced():
    """`simulator/short_waits.py`."""
    for module in (simulator_runner, simulator_worker, client_runner, connector_manager):
        assert module.time is time
    assert simulator_runner.subprocess is subprocess
    assert simulator.SimulatorRunner is simulator_runner.SimulatorRunner
    text = inspect.getsource(simulator_runner)
    assert WORKER in text
    # All that the simulator uses of a site's process.
    used = {word for word in dir(subprocess.Popen) if f"process.{word}(" in text}
    assert used <= {"poll", "wait", "terminate", "kill", "start", "join"}
    monitored = {"main_func", "run_dir", "shutdown_grace_time", "cleanup_grace_time"}
    assert set(inspect.signature(MainProcessMonitor.run).parameters) >= monitored
    assert inspect.signature(FederatedServer).parameters["check_engine_frequency"].default == 3.0
