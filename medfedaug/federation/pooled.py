"""Engine without a federation: all images in one place, validation and test by site."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from medfedaug.config.run import derive_seed
from medfedaug.federation.in_process import InProcessCarrier, InProcessEngine, run_in_process
from medfedaug.federation.messages.messages import TRAIN, VALIDATE, Reply, Request
from medfedaug.federation.protocol import Accept
from medfedaug.federation.server.server import FederationServer
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.sampling import ConcatenatedDataset


class PooledCarrier(InProcessCarrier):
    """Carrier that lets one site train on all images, and uses its update for every site.

    The mean of equal models is the same model bit for bit.
    """

    travels = False

    def __init__(
        self,
        server: FederationServer,
        trainers: Mapping[str, SiteTrainer],
        checkpoint: Path | None = None,
    ) -> None:
        super().__init__(server, trainers, checkpoint)
        for trainer in trainers.values():
            trainer.training_dataset = self.dataset

    def dataset(self, seed: int) -> Dataset[Any]:
        """Return the training images of all sites, each with its site's transforms."""
        for name, trainer in sorted(self.trainers.items()):
            if trainer.samples is None:  # no request yet in a resumed run
                trainer.take_plan(self.server.planning.planned())
                trainer.open(name)
        training = [trainer for _, trainer in sorted(self.trainers.items()) if trainer.trains]
        return ConcatenatedDataset(
            [trainer.own_dataset(derive_seed(seed, trainer.name)) for trainer in training]
        )

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Let one site train; all others only score the model on their validation cases."""
        if request.task != TRAIN:
            return super().ask(request, sites, needed, accept)
        update = Reply(TRAIN, request.round)
        for name in sites:
            if name == sites[0]:
                update = self.sites[name].answer(request)
                accept(name, replace(update))
            else:
                scored = self._validation(name, request)
                metrics = {**update.metrics, **scored.metrics}
                error, samples = update.error or scored.error, self.server.sites[name]
                accept(name, replace(update, num_samples=samples, metrics=metrics, error=error))
        return {}

    def _validation(self, name: str, request: Request) -> Reply:
        """Return a site's validation score of the previous round's model, if due."""
        if not self.server.config.validates(request.round - 1):
            return Reply(VALIDATE)
        reply = self.sites[name].answer(replace(request, task=VALIDATE, round=request.round - 1))
        metric = self.server.record.metric
        return replace(reply, metrics={f"val_{metric}": reply.metrics.get(metric)})


run_pooled = partial(run_in_process, carrier=PooledCarrier)
"""Train on the images of all sites together; see `run_in_process`."""


class PooledEngine(InProcessEngine):
    """Engine of runs whose method pools all images, independent of ``--engine``."""

    name = "pooled"
    travels = False
    keeps_time = False
    carrier = PooledCarrier
