"""``simulate --loop FILE --check``: one batch of a custom training loop, without NVFlare."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from medfedaug.cli.console import Table, out_console, say
from medfedaug.config.run import Execution, RunConfig
from medfedaug.config.training_scripts import loop_reference
from medfedaug.data.base import SiteFolder
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation.in_process import SitesInProcess
from medfedaug.federation.messages.messages import TRAIN, Reply, Request
from medfedaug.federation.protocol import Accept, run
from medfedaug.federation.server.server import FederationServer
from medfedaug.federation.site.guard import Guard, Privacy
from medfedaug.federation.site.local_training import LocalRound
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.script_components import ScriptComponents
from medfedaug.federation.site.script_training import CustomLoop, LoopTraining
from medfedaug.federation.site.site import Site
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods.base import overridden
from medfedaug.nvflare_jobs.job.loop import ScriptDone, ScriptLoop
from medfedaug.simulate import Simulation


def check_loop(simulation: Simulation) -> None:
    """Let the script of a simulation train one batch at the first site, and print the calls that it makes.

    Server and site are real: the methods make their exchange before training, the script trains until the
    first step of its optimiser, and the server takes the update. The model is not scored.
    """
    if simulation.loop is None:
        raise ConfigError("--check is for a custom training loop; give its file with --loop")
    reference, script = loop_reference(simulation.loop)
    config = replace(simulation.config, loop=reference)
    folder = next((s for s in simulation.sites if s.trains and s.name not in config.holdout), None)
    if folder is None:
        raise ConfigError("--check needs a site that trains")
    loop = _OneStepLoop(reference)
    if script is not None:
        loop.folder = script.parent
    reason = _one_round(loop, config, folder, simulation.device)
    if loop.training is not None:
        table = Table("call", "use", title=f"{simulation.loop}, one batch at {folder.name}")
        for call, use in _calls(loop.training).items():
            table.add_row(call, use)
        out_console.print(table)
    if reason:
        raise ConfigError(reason)
    say("the loop is connected: the server takes its update")


class _OneStep(LoopTraining):
    """Ends the script after its first step."""

    def __init__(self, model: SiteModel, loop: CustomLoop, script: ScriptComponents) -> None:
        super().__init__(model, loop, script.criterion)
        self.script, self.passed = script, False

    def loss_terms(self, batch: object, output: Tensor) -> Tensor:
        self.passed = True
        return super().loss_terms(batch, output)

    def step(self, loss: Tensor | None = None) -> None:
        super().step(loss)
        raise ScriptDone


class _OneStepSite(Privacy, Guard):
    """Gives a site the training that ends after a step."""

    def guard(self, model: SiteModel) -> Guard:
        return self

    def training(self, model: SiteModel, script: ScriptComponents, loop: CustomLoop | None) -> _OneStep:
        assert isinstance(loop, _OneStepLoop)
        loop.training = _OneStep(model, loop, script)
        return loop.training


class _OneStepLoop(ScriptLoop):
    """A script that ends after its first step.

    Attributes:
        training: the methods' part, after `medfedaug.client.join`.
    """

    training: _OneStep | None = None

    def train(self, round_: LocalRound) -> None:
        """Let the script train until its first step, or without one to the end of the round."""
        try:
            super().train(round_)
        except MedFedAugError:
            if self.training is None or not self.training.steps:
                raise


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
        raise ScriptDone


def _one_round(loop: _OneStepLoop, config: RunConfig, folder: SiteFolder, device: str) -> str:
    """Run a federation to the end of its first round; return the reason of a failure."""
    trainer = SiteTrainer(config, folder, device, privacy=_OneStepSite())
    trainer.loop = loop
    server = FederationServer(config, execution=Execution(min_sites=1))
    # A federation has two sites: the second has the same images, and only prepares.
    peer = Site(f"{folder.name}_peer", SiteTrainer(replace(config, loop=None), folder, device))
    carrier = _OneRound(Site(folder.name, trainer), peer)
    try:
        run(server, carrier)
    except ScriptDone:
        refused = [str(refusal["reason"]) for entry in server.rounds for refusal in entry.get("refused", ())]
        return next(iter([*carrier.reasons, *refused]), "")
    except MedFedAugError as error:
        return next(iter(carrier.reasons), str(error))
    finally:
        loop.end()
    return ""


def _calls(training: _OneStep) -> dict[str, str]:
    """Describe the use of each call of a script."""
    parts, script = training.parts, training.script
    losses, correcting = (
        [n for n, p in parts.items() if overridden(p, [hook])] for hook in ("loss", "before_step")
    )
    given = [n for n in ("samples", "score", "criterion") if getattr(script, n) is not None]
    network = "the script's own network" if script.network is not None else "the job's network"
    lost = ", without the loss, which the report then lacks" if training.steps and not training.losses else ""
    return {
        "join": f"site {training.folder.name}, methods {', '.join(parts)}; {network}",
        "given to join": ", ".join(given) or "nothing: statistics and scores are of the job's own pipeline",
        "transform": _use(training.transform.used > 0, training.transforming),
        "loss_terms": _use(training.passed, losses),
        "before_step": _needed(correcting),
        "step": ("called" if training.steps else "not called") + lost,
    }


def _use(called: bool, methods: list[str]) -> str:
    return f"{'called' if called else 'not called'}; {_needed(methods)}"


def _needed(methods: list[str]) -> str:
    return f"needed by {', '.join(methods)}" if methods else "no method of the job needs it"
