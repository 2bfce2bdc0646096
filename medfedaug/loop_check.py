"""`check_loop_script`: one batch of a custom training loop, without NVFlare."""

import runpy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue

from medfedaug.client import script_at
from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.errors import MedFedAugError
from medfedaug.federation.in_process import SitesInProcess
from medfedaug.federation.messages.messages import TRAIN, Reply, Request
from medfedaug.federation.protocol import Accept, run
from medfedaug.federation.server.server import FederationServer
from medfedaug.federation.site.local_training import LocalRound
from medfedaug.federation.site.script_components import ScriptComponents
from medfedaug.federation.site.script_training import CustomLoop, LoopTraining, ScriptSession
from medfedaug.federation.site.site import Site
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods.base import SitePart

# Standard deviations, and their ratio, from which an image is of another scale. A patch may vary little.
_MEANS, _SPREADS = 10, 4


class _Done(BaseException):
    """Ends a script after its first step; no `Exception`, which the script could catch."""


@dataclass
class LoopCheck:
    """Findings about a script's loop.

    Attributes:
        connected: use of each call in the script, by name.
        problems: missing parts, with remedies.
    """

    connected: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class _ScriptInProcess(CustomLoop):
    """A script in a thread of this process, which ends after its first step."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.session: ScriptSession | None = None
        self.error: BaseException | None = None
        self.steps = 0
        self._rounds: Queue[LocalRound | None] = Queue()
        self._idle = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, session: ScriptSession) -> None:
        """Run the script until it waits for its first round."""
        self.session = session
        self._thread = threading.Thread(target=self._run, args=(session,), daemon=True)
        self._thread.start()
        self._idle.wait()
        self._check_alive("before its first round; it has to call medfedaug.client.join and iterate over it")

    def train(self, round_: LocalRound) -> None:
        """Let the script train until its first step, or without one to the end of the round."""
        self._idle.clear()
        self._rounds.put(round_)
        self._idle.wait()
        if not self.steps:
            self._check_alive(f"before round {round_.number} was over")

    def stepped(self) -> None:
        """End the script."""
        self.steps += 1
        raise _Done

    def _wait(self) -> LocalRound | None:
        self._idle.set()
        return self._rounds.get()

    def _run(self, session: ScriptSession) -> None:
        try:
            with script_at(session, self._wait):
                runpy.run_path(str(self.script), run_name="__main__")
        except _Done:
            pass
        except BaseException as error:  # SystemExit of a script, too
            self.error = error
        finally:
            self._thread = None
            self._idle.set()

    def _check_alive(self, when: str) -> None:
        if self._thread is not None:
            return
        if self.session is not None and self.session.error is not None:
            raise self.session.error
        if isinstance(self.error, MedFedAugError):
            raise self.error
        reason = f" ({type(self.error).__name__}: {self.error})" if self.error is not None else ""
        raise MedFedAugError(f"the script {self.script.name} ended {when}{reason}") from self.error

    def close(self) -> None:
        """End a script that waits for a round."""
        if self._thread is not None:
            self._rounds.put(None)
            self._thread.join(timeout=10)


def check_loop_script(script: str | Path, config: RunConfig, folder: SiteFolder, device: str) -> LoopCheck:
    """Run one batch of a script's loop at one site, and list the calls of the federation that it uses.

    Server and site are real: the methods make their exchange before training, the script trains until the
    first step of its optimiser, and the server takes the update. The model is not scored.
    """
    loop = _ScriptInProcess(Path(script))
    trainer = SiteTrainer(config, folder, device)
    trainer.loop = loop
    server = FederationServer(config, execution=Execution(min_sites=1))
    # A federation has two sites: the second has the same images, and only prepares.
    peer = Site(f"{folder.name}_peer", SiteTrainer(replace(config, loop=None), folder, device))
    try:
        reason = _one_round(server, Site(folder.name, trainer), peer)
    finally:
        loop.close()
    check = LoopCheck(problems=[reason] if reason else [])
    training = getattr(trainer, "training", None)
    if isinstance(training, LoopTraining) and loop.session is not None:
        check.connected = _connected(training, loop.session.components, loop.steps)
        if not training.has_loss and loop.steps:
            check.connected["step"] += ", without the loss, which the report then lacks"
        check.problems += _other_scale(training, trainer)
    return check


class _OneRound(SitesInProcess):
    """Both sites prepare, only the first trains, and the federation ends with its first round.

    Args:
        site: with the script.
        peer: the second site of the federation.
    """

    def __init__(self, site: Site, peer: Site) -> None:
        super().__init__({site.name: site, peer.name: peer})
        self.site = site
        self.reasons: list[str] = []

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Let only the first site train, and keep the error of a site that does not answer."""

        def keep_error(name: str, reply: Reply) -> bool:
            if reply.error:
                self.reasons.append(reply.error)
            return accept(name, reply)

        return super().ask(request, [self.site.name] if request.task == TRAIN else sites, needed, keep_error)

    def round_done(self, server: FederationServer) -> None:
        """End the federation."""
        raise _Done


def _one_round(server: FederationServer, site: Site, peer: Site) -> str:
    """Run the federation to the end of its first round; return the reason of a failure."""
    carrier = _OneRound(site, peer)
    try:
        run(server, carrier)
    except _Done:
        refused = [str(refusal["reason"]) for entry in server.rounds for refusal in entry.get("refused", ())]
        return next(iter([*carrier.reasons, *refused]), "")
    except MedFedAugError as error:
        return next(iter(carrier.reasons), str(error))
    return ""


def _connected(training: LoopTraining, components: ScriptComponents, steps: int) -> dict[str, str]:
    losses = [name for name, part in training.parts.items() if type(part).loss is not SitePart.loss]
    correcting = [n for n, p in training.parts.items() if type(p).before_step is not SitePart.before_step]
    parts = [n for n in ("samples", "statistics", "score", "criterion") if getattr(components, n) is not None]
    network = "the script's own network" if components.network is not None else "the job's network"
    transformed = "called" if training.transform.used else "not called"
    return {
        "join": f"site {training.folder.name}, methods {', '.join(training.parts)}; {network}",
        "given to join": ", ".join(parts) or "nothing: statistics and scores are of the job's own pipeline",
        "transform": f"{transformed}; {_needed(training.transforming)}",
        "loss_terms": f"{'called' if training.passed else 'not called'}; {_needed(losses)}",
        "before_step": _needed(correcting),
        "step": "called" if steps else "not called",
    }


def _other_scale(training: LoopTraining, trainer: SiteTrainer) -> list[str]:
    """Return the problem of images on another scale than the statistics with which a method normalises."""
    normalising = [m.name for m in trainer.composition.methods if "normalised_input" in m.provides]
    if not (normalising and trainer.shows_statistics and training.transform.first):
        return []
    own = trainer.statistics()
    mean, std = (training.transform.first[key].to(own.std) for key in ("mean", "std"))
    spread = std / own.std
    apart = ((mean - own.mean).abs() > _MEANS * own.std) | (spread > _SPREADS) | (spread * _SPREADS**2 < 1)
    apart &= own.std > 0
    return [
        f"federation.transform got an image with mean {mean[channel]:.3g} and standard deviation "
        f"{std[channel]:.3g} in channel {channel}, and {normalising[0]} normalises with "
        f"{own.mean[channel]:.3g} and {own.std[channel]:.3g}: scale images as the job does "
        f"(--intensity {trainer.config.intensity}), or give join() samples prepared by the script"
        for channel in apart.nonzero().flatten().tolist()[:1]
    ]


def _needed(methods: list[str]) -> str:
    return f"needed by {', '.join(methods)}" if methods else "no method of the job needs it"
