"""The metrics of a Bundle's evaluator, case by case and over a site."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from ignite.engine import Engine
from ignite.exceptions import NotComputableError

from medfedaug.config.bundle_reference import AllowedBundle
from medfedaug.metrics.base import Metric
from medfedaug.metrics.registry import METRICS, add_metric, leaves_by_default
from medfedaug.tasks.bundle.parser import BundleConfiguration
from medfedaug.utils.validation import is_number

_KEY, _MORE, _COMPARED = "key_val_metric", "additional_metrics", "metric_cmp_fn"
# By the names of MONAI's and ignite's classes. The server refuses scores above the largest value.
_LOWER_IS_BETTER = (
    *("HausdorffDistance", "SurfaceDistance", "MeanSquaredError", "MeanAbsoluteError", "MAE", "MSE"),
    *("RootMeanSquaredError", "MeanPairwiseDistance"),
)
_SHARES = (
    *("MeanDice", "MeanIoUHandler", "Accuracy", "ROCAUC", "AveragePrecision", "ConfusionMatrix"),
    *("PanopticQuality", "Precision", "Recall", "Fbeta", "IoU", "mIoU", "TopKCategoricalAccuracy"),
)
_LARGEST = 1e5


class BundleMetrics:
    """Computes the metrics of a Bundle's evaluator.

    Names lose the prefix ``val_`` of Bundles. The score of a site is the metric of all cases together, and
    the score of a case the metric of only the case.

    Args:
        configuration: the Bundle's configuration.
        cases: unit of the cases, for readers: ``"patients"`` or ``"images"``.

    Attributes:
        names: the metrics, the key metric first.
    """

    def __init__(self, configuration: BundleConfiguration, cases: str) -> None:
        self.bundle: AllowedBundle = configuration.bundle
        self.evaluator = configuration.evaluator
        self._paths: dict[str, str] = {}
        for argument in (_KEY, _MORE):
            if argument == _MORE and configuration.raw(f"{self.evaluator}#{_MORE}") is None:
                continue
            identifier = configuration.find(self.evaluator, argument)
            metrics = configuration.raw(identifier)
            if not isinstance(metrics, Mapping) or not metrics:
                raise configuration.problem(identifier, "must name a metric")
            for name in metrics:
                self._paths.setdefault(str(name).removeprefix("val_"), f"{identifier}#{name}")
        self.names = tuple(self._paths)
        for name, identifier in self._paths.items():
            content = configuration.raw(configuration.follow(identifier))
            kind = str(content.get("_target_")).rpartition(".")[2] if isinstance(content, Mapping) else ""
            lower = kind in _LOWER_IS_BETTER or (name == self.names[0] and _smaller_wins(configuration))
            largest = 1.0 if kind in _SHARES else _LARGEST
            title = name.replace("_", " ").capitalize()
            leaves = leaves_by_default(largest)
            known = METRICS.get(name) or Metric(name, title, not lower, largest, cases=cases, leaves=leaves)
            if known.higher_is_better == lower or not add_metric(known):
                raise configuration.problem(identifier, f"{name} has another direction elsewhere: rename it")

    def score(self, cases: Iterable[tuple[str, Any]], full: bool) -> dict[str, Any]:
        """Return the scores of a site, as `medfedaug.tasks.base.Task.evaluate`."""
        names = self.names if full else self.names[:1]
        whole, alone = (_Scorer(self._made(names)) for _ in range(2))
        by_case: dict[str, dict[str, float | None]] = {name: {} for name in names}

        def scored() -> Iterator[list[Any]]:
            for case, item in cases:
                for name, value in alone.run([[item]]).items():
                    by_case[name][case] = value
                yield [item]

        values = whole.run(scored())
        return {
            **{name: values.get(name) for name in names},
            "cases": by_case[names[0]],
            **({"case_metrics": {name: by_case[name] for name in names[1:]}} if full else {}),
        }

    def _made(self, names: Iterable[str]) -> dict[str, Any]:
        """Make new metrics: a metric keeps its cases."""
        configuration = BundleConfiguration(self.bundle)
        return {name: configuration.make(self._paths[name]) for name in names}


class _Scorer:
    """An engine of ignite that only feeds its metrics."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.engine, self.names = Engine(lambda engine, batch: batch), list(metrics)
        for name, metric in metrics.items():
            metric.attach(self.engine, name)

    def run(self, batches: Iterable[list[Any]]) -> dict[str, float | None]:
        """Return the value of each metric over some batches, if any."""
        self.engine.state.metrics = {}
        try:
            self.engine.run(batches, max_epochs=1)
        except NotComputableError:
            return dict.fromkeys(self.names)
        details = getattr(self.engine.state, "metric_details", {})
        return {name: _number(self.engine.state.metrics.get(name), details.get(name)) for name in self.names}


def _number(value: Any, details: Any) -> float | None:
    """Return a number; ``None`` also if MONAI reports 0 since no case had a score."""
    if isinstance(details, torch.Tensor) and details.numel() and bool(torch.isnan(details).all()):
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if is_number(value) else None


def _smaller_wins(configuration: BundleConfiguration) -> bool:
    """Return whether the evaluator prefers a smaller key metric."""
    identifier = f"{configuration.evaluator}#{_COMPARED}"
    if configuration.raw(identifier) is None:
        return False
    compare = configuration.make(identifier)
    return bool(compare(1.0, 2.0)) and not bool(compare(2.0, 1.0))
