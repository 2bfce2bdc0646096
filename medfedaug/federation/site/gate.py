"""`Gate`: hooks before and after each server request; `Delivery`: the way of an update to the server."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import RunConfig
from medfedaug.errors import MedFedAugError
from medfedaug.federation.composition import masking
from medfedaug.federation.messages.messages import Reply, Request
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.metrics.significance import difference


class Delivery:
    """The way of an update from its training to the server: here as it is."""

    tasks: tuple[str, ...] = ()

    def answer(self, request: Request) -> dict[str, Any]:
        """Return the answer to one of the further requests, for `Reply.masks`."""
        raise NotImplementedError

    def begin(self, request: Request) -> None:
        """Check the request for a training, before it begins."""

    def finish(self, request: Request, reply: Reply) -> None:
        """Change an update into what leaves."""

    def failed(self, task: str, error: Exception) -> None:
        """Forget what a failed request leaves behind."""


class Gate:
    """No-op gate for simulations on one machine.

    `medfedaug.hospital.privacy.guarded_gate.GuardedGate` is that of a site in a real federation.

    Attributes:
        comparison: the comparison of which the admitted configurations are trainings; ``None`` in other jobs.
    """

    comparison: ComparisonConfig | None = None

    def delivery(self, site: str, trainer: SiteTrainer) -> Delivery:
        """Return the way of the site's updates."""
        masks = masking(trainer.config)
        return Delivery() if masks is None else cast(Delivery, masks.MaskedDelivery(site, trainer))

    def admit(self, config: RunConfig, should_stop: Callable[[], bool]) -> None:
        """Admit a configuration before anything is built for it."""

    def opened(self, trainer: SiteTrainer) -> None:
        """Check the opened data and network."""

    def incoming(self, request: Request) -> None:
        """Check a request before its use."""

    def release(self, split: str, scores: Mapping[str, Any], trainer: SiteTrainer) -> dict[str, Any]:
        """Return the part of a model's scores that may leave."""
        return all_scores(scores, trainer.folder.patients(split))

    def compare(
        self, split: str, differences: Sequence[float], unit: str, trainer: SiteTrainer
    ) -> dict[str, Any]:
        """Return the part of a comparison of two models that may leave."""
        return difference(differences, unit)

    def outgoing(self, reply: Reply, trainer: SiteTrainer) -> Reply:
        """Check and record a reply before it is sent."""
        return reply

    def ended(self) -> None:
        """Record that the job has ended for this site."""

    def error_text(self, site: str, task: str, error: Exception, trainer: SiteTrainer) -> str:
        """Describe an error to the server in one line."""
        if isinstance(error, MedFedAugError):
            return str(error)
        return f"site {site}: {cause(error)!r}"[:500]


def all_scores(scores: Mapping[str, Any], patients: Mapping[str, int]) -> dict[str, Any]:
    """Return all scores of a simulation, with the number of the patient of each scored case."""
    known = {case: patients[case] for case in scores.get("cases", {}) if case in patients}
    return {**scores, "patients": known} if known else dict(scores)


def cause(error: BaseException) -> BaseException:
    """Return the cause of MONAI's error on a transform, which does not name the reason."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error
