"""`Engine`: runs a federation on one machine, with its `Carrier`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from medfedaug.config.machine import Machine
from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.federation.messages.initial_weights import InitialWeights
from medfedaug.utils.event_text import OnEvent


@dataclass(frozen=True, kw_only=True)
class FederationRun:
    """A checked run for an engine.

    Args:
        state_dir: a folder for the state of server and sites; ``None`` keeps nothing.
        script: the file of the run's custom training loop, if any.
        lock: a file to lock while a process of the run is alive; ``None`` for a single process.
    """

    config: RunConfig
    data_dir: Path
    sites: Sequence[SiteFolder]
    device: str = "auto"
    state_dir: Path | None = None
    resume: bool = False
    execution: Execution = field(default_factory=Execution)
    machine: Machine = field(default_factory=Machine)
    initial: InitialWeights | None = None
    script: Path | None = None
    lock: Path | None = None
    on_event: OnEvent | None = None


class Engine(ABC):
    """Carries requests and replies between a server and its sites, all on one machine.

    `medfedaug.federation.protocol` makes all decisions about a run; an engine provides a
    `medfedaug.federation.protocol.Carrier`. `medfedaug.federation.engines` lists the engines.

    Attributes:
        own_processes: whether each site is a process, so that the sites share the cores.
        runs_scripts: whether it can run a custom training loop.
        travels: whether models travel between server and sites; otherwise all images are in one place.
        keeps_time: whether it can simulate sites of different speed.
    """

    name: ClassVar[str]
    own_processes: ClassVar[bool] = False
    runs_scripts: ClassVar[bool] = False
    travels: ClassVar[bool] = True
    keeps_time: ClassVar[bool] = False

    @abstractmethod
    def run(self, run: FederationRun, work: Path) -> dict[str, Any]:
        """Run or resume a federation to its end.

        Args:
            work: an empty folder for the models and all other files but ``results.json``, also of a failed
                run.

        Returns:
            `medfedaug.federation.FederationServer.results`.
        """
