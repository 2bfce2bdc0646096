"""`MonaiClient`: a site as MONAI's engine-neutral `ClientAlgo`, for engines that are written for it."""

from __future__ import annotations

from typing import Any

from monai.fl.client import ClientAlgo
from monai.fl.utils.constants import ExtraItems, WeightType
from monai.fl.utils.exchange_object import ExchangeObject

from medfedaug.federation.messages.messages import Reply
from medfedaug.federation.site.trainer import SiteTrainer

__all__ = ["MonaiClient"]


class MonaiClient(ClientAlgo):
    """Translates the calls of MONAI's `ClientAlgo` to those of a `SiteTrainer`.

    The order of calls is ``initialize`` and ``get_data_stats`` once, then ``train``, ``get_weights`` and
    ``evaluate`` in every round. `ExchangeObject.weights` holds the shared entries of the state dict, and
    `ExchangeObject.statistics` the methods' exchange: under ``"once"`` what was exchanged before training,
    under ``"payload"`` what travels in every round.

    It is the trainer alone. What a site checks, counts and enters in its ledger is
    `medfedaug.federation.site.site.Site`'s, which the engines of this package use.

    Args:
        trainer: the site's.

    Example:
        An engine of one's own trains one round::

            client = MonaiClient(SiteTrainer(config, "data/site_A"))
            client.initialize({ExtraItems.CLIENT_NAME: "site_A"})
            client.train(ExchangeObject(weights=global_weights), {"round": 1})
            update = client.get_weights()
    """

    def __init__(self, trainer: SiteTrainer) -> None:
        self.trainer = trainer
        self._update: Reply | None = None

    def initialize(self, extra: dict[str, Any] | None = None) -> None:
        """Open the site's data and build the network.

        Args:
            extra: ``{ExtraItems.CLIENT_NAME: the site's name}``.
        """
        self.trainer.open(str((extra or {}).get(ExtraItems.CLIENT_NAME, self.trainer.name)))

    def get_data_stats(self, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """Return the number of samples, and what the methods exchange before training."""
        found = self.trainer.prepare()
        return ExchangeObject(
            statistics={"payload": found.payload, "num_samples": found.num_samples, **found.metrics}
        )

    def train(self, data: ExchangeObject, extra: dict[str, Any] | None = None) -> None:
        """Train for one round.

        Args:
            data: the global model and the methods' exchange; empty for the model that was received before.
            extra: ``{"round": r}``, and under ``"should_stop"`` a function that is called before every step.
        """
        extra = extra or {}
        round_, received = int(extra.get("round", 1)), data.statistics or {}
        self.trainer.start_round(
            round_, data.weights or {}, payload=received.get("payload"), once=received.get("once")
        )
        self._update = self.trainer.train(round_, extra.get("should_stop"))

    def get_weights(self, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """Return the update of the last round.

        Raises:
            ValueError: before the first round.
        """
        if self._update is None:
            raise ValueError("expected a trained model; call train() first")
        return ExchangeObject(
            weights=self._update.weights,
            weight_type=WeightType.WEIGHTS,
            metrics={**self._update.metrics, "samples": self._update.num_samples},
            statistics={"payload": self._update.payload},
        )

    def evaluate(self, data: ExchangeObject, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """Score the global model.

        Args:
            data: the global model; empty for the model that was received before.
            extra: ``"split"``, ``"validation"`` or ``"test"``; ``"round"``, that the model is the result of;
                ``"full"``, whether all metrics are computed, by default for the test only.
        """
        extra, received = extra or {}, data.statistics or {}
        self.trainer.receive(data.weights or {}, received.get("payload"), received.get("once"))
        found = self.trainer.evaluate_round(
            str(extra.get("split", "test")), int(extra.get("round", 0)), full=extra.get("full")
        )
        return ExchangeObject(metrics=found)

    def abort(self, extra: dict[str, Any] | None = None) -> None:
        """Stop training after the current step; nothing of the round is kept."""
        self.trainer.abort()
