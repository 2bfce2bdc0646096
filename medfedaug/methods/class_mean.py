"""Mean of the last layer class by class, over the sites that outlined the class."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from medfedaug.errors import ConfigError
from medfedaug.methods.base import Aggregator, Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, RoundMean, ServerContext, SiteContext, SiteUpdate
from medfedaug.methods.exchanges import AggregatorExchange
from medfedaug.models import find_head
from medfedaug.models.entries import trained_entries


class ClassMean(Method):
    """Average the last layer's weights of each class over the sites that outlined it.

    The simplest method for sites that label different classes, and a baseline for the others: with weights
    wₖ of the sites, and ``aₖₙ = 1`` if site k has annotated class n, ::

        Wₙ = (Σₖ wₖ aₖₙ Wₖₙ) / (Σₖ wₖ aₖₙ)

    for the rows Wₙ of the last layer and their biases. The row of a class that no site of a round
    has annotated keeps its previous global value. Everything else is the mean of all sites.

    Exchange, every round: aₖ, (K,), up.

    Deviations:
        No paper: a baseline.
    """

    name = "class_mean"
    tasks = ("segmentation",)
    requires = frozenset({"averaged_parameters"})

    def at_site(self, context: SiteContext) -> SitePart:
        return ClassMeanSite(context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        assert context.task is not None
        return ClassMeanExchange(context.task.num_classes)

    def aggregator(self, context: ServerContext) -> Aggregator:
        assert context.task is not None
        return ClassMeanServer(_rows(context, context.task.num_classes))


def _rows(context: ServerContext, classes: int) -> dict[str, int]:
    """Return the entries of the last layer, each with its axis of classes."""
    layer = find_head(context.network)
    layers = [m for m in layer.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)]
    parameters = {id(value) for value in layers[-1].parameters()} if layers else set()
    transposed = bool(layers) and isinstance(layers[-1], _ConvTransposeNd)
    trained = trained_entries(context.network)
    rows = {name: value for name, value in trained.items() if id(value) in parameters}
    axes = {name: int(transposed and row.ndim > 1) for name, row in rows.items()}
    complete = all(row.shape[axes[name]] == classes for name, row in rows.items())
    if not rows or not complete or {*rows} & context.local_entries:
        raise ConfigError(
            f"class_mean: the last layer of {type(context.network).__name__} has no averaged row for each of "
            f"{classes} classes"
        )
    return axes


class ClassMeanSite(SitePart, SiteExchange):
    """The site's half: its outlined classes."""

    def __init__(self, context: SiteContext) -> None:
        self.every_round = self
        self.context = context

    def collect(self) -> Payload:
        """Return 1 for the background and each class annotated in enough training cases, 0 for others."""
        task, cases_with = self.context.task, self.context.cases_with
        assert task is not None
        # The task of a Bundle names no class, and its sites have annotated everything.
        members = [cases_with(name) for name in task.scored_classes] or [None] * (task.num_classes - 1)
        return {"annotated": self.context.census.flags([None, *members])}

    def apply(self, payload: Payload) -> None:
        """Nothing comes back."""


class ClassMeanExchange(AggregatorExchange):
    """Check of the sites' annotated classes, for the aggregator."""

    def __init__(self, classes: int) -> None:
        self.shapes = {"annotated": (classes,)}

    def check(self, payload: Payload) -> None:
        value = payload["annotated"]
        if not bool(((value == 0) | (value == 1)).all()) or value[0] != 1:
            raise ValueError("annotated must be 0 or 1 for each class, and 1 for the background")


class ClassMeanServer(Aggregator):
    """The server's half: sums of the last layer's rows.

    ``rows`` names its entries, each with its axis of classes.

    Attributes:
        sites: the number of sites of the last round that have annotated each class.
    """

    def __init__(self, rows: dict[str, int]) -> None:
        self.rows = rows
        self.sites: list[int] = []
        self._sums: dict[str, Tensor] = {}
        self._weights: Tensor | float = 0.0
        self._counts: Tensor | float = 0.0

    def accept(self, update: SiteUpdate) -> None:
        """Add the rows of the classes that the site has annotated."""
        annotated = update.payload["annotated"].double()
        for name, axis in self.rows.items():
            row = update.weights[name].double().movedim(axis, -1)
            self._sums[name] = self._sums.get(name, 0.0) + update.weight * annotated * row
        self._weights = self._weights + update.weight * annotated
        self._counts = self._counts + annotated

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Return the mean, with the last layer's rows by class."""
        assert isinstance(self._weights, Tensor)
        assert isinstance(self._counts, Tensor)
        updated = dict(round_.mean)
        for name, axis in self.rows.items():
            mean, before = (s[name].double().movedim(axis, -1) for s in (round_.mean, round_.previous))
            rows = torch.where(self._weights > 0, self._sums[name] / self._weights.clamp_min(1e-300), before)
            # A class that all sites have annotated gets exactly the mean's row.
            rows = torch.where(self._counts == len(round_.weights), mean, rows)
            updated[name] = rows.movedim(-1, axis).to(updated[name].dtype).contiguous()
        self.sites = [int(count) for count in self._counts]
        self._sums, self._weights, self._counts = {}, 0.0, 0.0
        return updated

    def summary(self) -> dict[str, Any]:
        return {"sites": self.sites}
