"""The names of NVFlare that the adapter replaces are still what it replaces."""

import inspect
import subprocess
import time
from importlib.metadata import version

import pytest
from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.private.fed.app.simulator import simulator, simulator_runner, simulator_worker
from nvflare.private.fed.server.fed_server import FederatedServer

from medfedaug.nvflare_jobs.simulator.simulator_process import VERSIONS, WORKER

pytestmark = pytest.mark.skipif(
    version("nvflare") not in VERSIONS, reason="the adapter is off for this NVFlare"
)


def test_the_simulator_waits_and_starts_sites_by_the_names_that_are_replaced():
    assert simulator_runner.time is time
    assert simulator_runner.subprocess is subprocess
    assert simulator_worker.time is time
    assert simulator.SimulatorRunner is simulator_runner.SimulatorRunner
    assert simulator_worker.__name__ == WORKER
    text = inspect.getsource(simulator_runner)
    assert WORKER in text
    # All that the simulator uses of a site's process.
    used = {word for word in dir(subprocess.Popen) if f"process.{word}(" in text}
    assert used <= {"poll", "wait", "terminate", "kill", "start", "join"}
    assert set(inspect.signature(MainProcessMonitor.run).parameters) >= {
        "main_func",
        "run_dir",
        "shutdown_grace_time",
        "cleanup_grace_time",
    }
    assert inspect.signature(FederatedServer).parameters["check_engine_frequency"].default == 3.0
