"""``configs/train.json`` of a Bundle: the parts of MONAI's trainer and evaluator, and its metrics."""

import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine
from ignite.exceptions import NotComputableError
from monai.bundle import ConfigComponent, ConfigParser

from medfedaug.config.bundle_reference import AllowedBundle, training_file
from medfedaug.errors import ConfigError, first_line, translated, withheld
from medfedaug.metrics.base import Metric
from medfedaug.metrics.registry import METRICS, add_metric, leaves_by_default
from medfedaug.utils.validation import is_number

TRAINER, EVALUATOR = "SupervisedTrainer", "SupervisedEvaluator"
_ENGINES = {TRAINER: ("train#trainer", "trainer"), EVALUATOR: ("validate#evaluator", "evaluator")}
# Arguments of an engine that change its step; the federation's trainer has its own step.
_UNUSABLE = ("prepare_batch", "iteration_update")
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
_REFERENCE = re.compile(r"@([\w.]+(?:(?:#|::)[\w.]+)*)")


class BundleConfiguration:
    """The training configuration of a Bundle, whose parts are made on request.

    Making one runs the Bundle's expressions: the caller has found it by `bundle_reference.find`. Its trainer
    and data set are never made, nor parts that only they need. ``bundle_root`` is a private copy of the
    allowed content (`AllowedBundle.verified`), and ``device`` the CPU.

    Attributes:
        config: the whole configuration, with macros and relative identifiers resolved.
    """

    # Without `__dict__`, which MONAI's loaders search for transforms to seed: the parser claims to have any
    # attribute.
    __slots__ = ("bundle", "config", "evaluator", "file", "parser", "trainer")

    def __init__(self, bundle: AllowedBundle) -> None:
        folder = bundle.verified()
        self.bundle, self.file = bundle, training_file(folder)
        _importable(folder)
        with translated(Exception, to=lambda error: self.problem(str(self.file.name), first_line(error))):
            values: Any = ConfigParser.load_config_file(str(self.file))
            values["bundle_root"] = str(folder)
            if "device" in values:
                values["device"] = "$torch.device('cpu')"
            self.parser = ConfigParser(values)
            self.parser.parse(True)
        self.config: Any = self.parser.config
        self.trainer = self._engine(TRAINER)
        self.evaluator = self._engine(EVALUATOR)

    def problem(self, key: str, reason: str) -> ConfigError:
        """Build an error that names the Bundle, its file and a key in it."""
        place = key.replace("::", "#")  # as in Bundles' files
        return ConfigError(f"Bundle {self.bundle.name}: {self.file.name}: {place}: {reason}")

    def problems(self, key: str, problem: str = "cannot be made") -> AbstractContextManager[None]:
        """Turn any error of a class or an expression into a `problem`."""
        return translated(Exception, to=lambda error: self.problem(key, f"{problem} ({reason_of(error)})"))

    def _engine(self, kind: str) -> str:
        for identifier in _ENGINES[kind]:
            entry = self.parser.get(identifier)
            if not isinstance(entry, Mapping):
                continue
            target = str(entry.get("_target_"))
            if target not in (kind, f"monai.engines.{kind}"):
                raise self.problem(identifier, f"is {target}; only MONAI's {kind} can be replaced by ours")
            for name in _UNUSABLE:
                if entry.get(name) is not None:
                    raise self.problem(f"{identifier}#{name}", "a custom step is not supported")
            return identifier
        raise self.problem(" or ".join(_ENGINES[kind]), "is missing")

    def raw(self, identifier: str) -> Any:
        """Return the entry of an identifier, if any."""
        return self.parser.get(identifier)

    def follow(self, identifier: str) -> str:
        """Return the target of a reference such as ``@train#dataloader``."""
        seen = set[str]()
        while identifier not in seen:
            seen.add(identifier)
            entry = self.raw(identifier)
            match = _REFERENCE.fullmatch(entry.strip()) if isinstance(entry, str) else None
            if match is None:
                break
            identifier = match[1]
        return identifier

    def find(self, *path: str, required: bool = True) -> str:
        """Return the identifier of a nested argument of an engine, through all references; empty if none."""
        identifier = path[0]
        for name in path[1:]:
            identifier = self.follow(f"{identifier}#{name}")
            if self.raw(identifier) is None:
                if required:
                    raise self.problem(identifier, "is missing")
                return ""
        return identifier

    def make(self, identifier: str) -> Any:
        """Make the part of an identifier by MONAI's parser."""
        with self.problems(identifier):
            return self.parser.get_parsed_content(identifier)

    def component(self, identifier: str, *without: str) -> ConfigComponent:
        """Return a class with its arguments, to be completed by others."""
        entry = self.raw(identifier)
        args = {key: self.make(f"{identifier}#{key}") for key in entry if key not in (*without, "_target_")}
        return ConfigComponent({"_target_": entry["_target_"], **args}, identifier, self.parser.locator)


def reason_of(error: BaseException) -> str:
    """Return kind and first line of the error behind MONAI's, without what may be a patient's."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return withheld(f"{type(error).__name__}: {first_line(error)}")


_root = ""


def _importable(folder: Path) -> None:
    """Let a Bundle's modules be imported, instead of the previous Bundle's modules."""
    global _root
    root = str(folder)
    if _root not in ("", root):
        sys.path[:] = [path for path in sys.path if path != _root]
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(f"{_root}{os.sep}"):
                del sys.modules[name]
    _root = root
    sys.dont_write_bytecode = True  # imports read the hashed source
    if root not in sys.path:
        sys.path.insert(0, root)
        importlib.invalidate_caches()


class BundleMetrics:
    """Computes the metrics of a Bundle's evaluator.

    Names lose the prefix ``val_`` of Bundles. The score of a site is the metric of all cases together, and
    the score of a case the metric of only the case. ``cases`` names these for readers, as ``"patients"``.

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
    identifier = f"{configuration.evaluator}#{_COMPARED}"
    if configuration.raw(identifier) is None:
        return False
    compare = configuration.make(identifier)
    return bool(compare(1.0, 2.0)) and not bool(compare(2.0, 1.0))
