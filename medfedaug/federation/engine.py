"""`Engine`: runs a federation on one machine, with its `Carrier`; the engines by name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch

from medfedaug.config.machine import Machine
from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.errors import config_errors
from medfedaug.federation.messages.initial_weights import InitialWeights
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.plugins import added_module
from medfedaug.utils.validation import check_choice

# By their names: the import of NVFlare takes seconds.
_ENGINES = {
    "nvflare": ("medfedaug.nvflare_jobs.simulator.simulator", "NVFlareEngine"),
    "inprocess": ("medfedaug.federation.in_process", "InProcessEngine"),
}


@dataclass(frozen=True, kw_only=True)
class FederationRun:
    """A checked run for an engine."""

    config: RunConfig
    data_dir: Path
    sites: Sequence[SiteFolder]
    device: str = "auto"
    state_dir: Path | None = None  # a folder for the state of server and sites; `None` keeps nothing
    resume: bool = False
    execution: Execution = field(default_factory=Execution)
    machine: Machine = field(default_factory=Machine)
    initial: InitialWeights | None = None
    script: Path | None = None  # the file of the run's custom training loop, if any
    # A file to lock while a process of the run is alive; `None` for a single process.
    lock: Path | None = None
    on_event: OnEvent | None = None


class Engine(ABC):
    """Carries requests and replies between a server and its sites, all on one machine.

    `medfedaug.federation.protocol` makes all decisions about a run; an engine provides a
    `medfedaug.federation.protocol.Carrier`.
    """

    name: ClassVar[str]
    own_processes: ClassVar[bool] = False  # whether each site is a process, so that the sites share the cores
    runs_scripts: ClassVar[bool] = False  # whether it can run a custom training loop
    # Whether models travel between server and sites; otherwise all images are in one place.
    travels: ClassVar[bool] = True
    keeps_time: ClassVar[bool] = False  # whether it can simulate sites of different speed

    @abstractmethod
    def run(self, run: FederationRun, work: Path) -> dict[str, Any]:
        """Run or resume a federation to its end.

        Args:
            work: an empty folder for the models and all other files but ``results.json``, also of a failed
                run.

        Returns:
            `medfedaug.federation.FederationServer.results`.
        """


def find_engine(name: str) -> Engine:
    """Return the engine of a name."""
    check_choice("engine", name, _ENGINES)
    if name == "nvflare":
        added_module("privacy", "the engine nvflare")  # its sites have a guard
    module, engine = _ENGINES[name]
    found: Engine = getattr(import_module(module), engine)()
    return found


def check_device(device: str) -> None:
    """Check that a device can be used."""
    if device != "auto":
        with config_errors(f"device {device} cannot be used"):
            torch.zeros(1, device=device).item()  # of the device meta no value can be read
