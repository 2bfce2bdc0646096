"""Shorten the pauses of NVFlare's simulator, which has no settings for them.

`docs/decisions/fast_start.md` lists each pause, with the change that NVFlare could make. They are pauses
between two checks, or before something is closed. This adapter replaces names in modules of NVFlare, only in
processes of a simulation, for the versions in `VERSIONS`.
"""

import time
from typing import Any

from nvflare.fuel.f3.cellnet import connector_manager
from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.private.fed.app.simulator import simulator, simulator_runner, simulator_worker
from nvflare.private.fed.client import client_runner

_CHECK = 0.05  # seconds between two checks of the simulator, before a first message; NVFlare: 1, 0.5
_ENGINE_CHECK = 0.2  # between two checks of the server's engine, which sends a message each time; NVFlare: 3
_ASK_AGAIN = (0.1, 0.5)  # between two requests of an idle site, from few sites to many; NVFlare: 0.5
_SITES_A_SECOND = 50  # requests of idle sites a second that are no load for the server
_GRACE = 0.1  # before connections are closed; NVFlare: 3


class _Pauses:
    """Module `time` with pauses of limited length."""

    def __init__(self, longest: float) -> None:
        self._longest = longest

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, self._longest))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Runner(simulator_runner.SimulatorRunner):
    """Runs in this process, which is already a separate one, and checks more often."""

    def run(self) -> int:
        status: int = MainProcessMonitor.run(
            main_func=self.simulator_run_main,
            run_dir=self.workspace,
            shutdown_grace_time=_GRACE,
            cleanup_grace_time=6,
        )
        return status

    def setup(self) -> bool:
        ready: bool = super().setup()
        if ready:
            self.server.check_engine_frequency = _ENGINE_CHECK
        return ready


def run_simulator(arguments: list[str], processes: object) -> int:
    """Run NVFlare's simulator in this process."""
    parser = simulator.argparse.ArgumentParser()
    simulator.define_simulator_parser(parser)
    options = parser.parse_args(arguments)
    _replace(simulator, "SimulatorRunner", _Runner)
    _replace(simulator_runner, "subprocess", processes)
    for module in (simulator_runner, connector_manager):
        _replace(module, "time", _Pauses(_CHECK))
    code: int = simulator.run_simulator(options)
    return code


def run_site(arguments: list[str], sites: int) -> None:
    """Run a site of NVFlare's simulator in this process."""
    simulator_worker.sys.argv = arguments
    least, most = _ASK_AGAIN
    _replace(simulator_worker, "time", _Pauses(min(max(least, sites / _SITES_A_SECOND), most)))
    _replace(client_runner, "time", _Pauses(_CHECK))
    args = simulator_worker.parse_arguments()
    MainProcessMonitor.run(
        main_func=simulator_worker.main, run_dir=args.workspace, shutdown_grace_time=_GRACE, args=args
    )


def _replace(module: object, name: str, value: object) -> None:
    getattr(module, name)  # fails for an unknown version of NVFlare
    setattr(module, name, value)
