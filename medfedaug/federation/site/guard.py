"""`Guard`: stands between a site's methods and their messages; `Privacy` makes one for each opened job."""

from collections.abc import Sequence

from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.script_components import ScriptComponents
from medfedaug.federation.site.script_training import CustomLoop, LoopTraining
from medfedaug.methods.base import Payload, SiteExchange


class Guard:
    """Lets everything pass, for simulations on one machine.

    `medfedaug.hospital.privacy.guard.PrivacyGuard` is that of a site in a real federation.
    """

    adds_noise = False

    def check(self, name: str, exchange: SiteExchange) -> None:
        """Check, before any work, that an exchange is allowed."""

    def observe(self, name: str, exchange: SiteExchange) -> None:
        """Prepare an exchange before the training, on which noise must not depend."""

    def collect(self, name: str, exchange: SiteExchange) -> Payload:
        """Return the payload that the site sends for an exchange, after `observe`."""
        return exchange.collect()

    def counts(self, cases: Sequence[int]) -> dict[str, int]:
        """Return the numbers of patients and studies, from the number of cases of each patient."""
        return {"patients": len(cases), "studies": sum(cases)} if cases else {}

    def metrics(self) -> dict[str, float]:
        """Return numbers about privacy, for each update."""
        return {}

    def training(self, model: SiteModel, script: ScriptComponents, loop: CustomLoop | None) -> LocalTraining:
        """Return the local training: the built-in one, or that of a script."""
        return LocalTraining(model) if loop is None else LoopTraining(model, loop, script.criterion)


class Privacy:
    """Limits of everything that leaves a site: here none, since all is on one machine."""

    min_patients = 1

    def guard(self, model: SiteModel) -> Guard:
        """Return the guard of a site's opened job."""
        return Guard()
