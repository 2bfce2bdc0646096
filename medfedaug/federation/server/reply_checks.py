"""Checks that a site's reply must pass before the server uses it. An error concerns only that site."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from medfedaug.errors import UpdateRefused
from medfedaug.federation.job_folder import COUNTS
from medfedaug.federation.messages.messages import MASKED, Reply, own_entries, raise_error
from medfedaug.federation.messages.tensor_checks import StateDictValidator, check_tensors
from medfedaug.federation.server.aggregation import Aggregation
from medfedaug.federation.server.outlier_checks import check_payload
from medfedaug.methods.base import Payload, ServerExchange
from medfedaug.metrics.registry import UNITS, score_of
from medfedaug.metrics.segmentation import VOLUME_RATIO
from medfedaug.utils.validation import number_or_none

_LONGEST_NAME = 500
# Of an update, and of a site with more cases than any real one.
_MOST_METRICS, _MOST_SCORES = 1_000, 1_000_000
# Along one axis of an image, and in an exchange whose size the sites decide.
_LONGEST_SIDE, _MOST_NUMBERS = 2**14, 2**26
_MOST_SAMPLES = 2**31


class ReplyChecks:
    """Checks a whole reply before the server adds up any part of it."""

    def __init__(self, network: nn.Module, shared: list[str], aggregation: Aggregation) -> None:
        self.model, self.words = StateDictValidator(network, shared), aggregation.words
        self.once, self.every_round = aggregation.once, aggregation.every_round

    def preparation(self, site: str, reply: Reply) -> None:
        """Check an answer to a request to prepare."""
        raise_error(reply)
        reply.metrics = {**clean_metrics(reply.metrics), COUNTS: accepted_counts(reply.metrics)}
        _check_count(site, reply.num_samples, 0, _MOST_SAMPLES)
        if reply.num_samples:
            _check_payload(site, reply.payload, self.once, reply.num_samples)

    def update(
        self,
        site: str,
        reply: Reply,
        round_: int,
        samples: int | None,
        state: Mapping[str, Tensor],
        *,
        compared: bool = False,
    ) -> dict[str, float]:
        """Check an update of a round, and drop metrics that cannot be recorded.

        Args:
            samples: the number of training samples that the site has reported; ``None`` for a site that does
                not train.
            compared: whether running statistics will be compared with those of other sites.

        Returns:
            The lengths of its steps; none under masks.
        """
        raise_error(reply)
        if samples is None:
            raise UpdateRefused(site, "update", expected="a site that was prepared", got="another")
        _check_entries(site, reply.metrics, _MOST_METRICS)
        reply.metrics = clean_metrics(reply.metrics)
        if reply.round != round_:
            raise UpdateRefused(site, "round", expected=str(round_), got=str(reply.round)[:80])
        _check_count(site, reply.num_samples, 1, samples)
        if self.words is not None:
            _check_masked(site, reply, self.words)
            return {}
        steps = self.model.check(site, reply.weights, state, buffers=round_ > 1 and not compared)
        _check_payload(site, reply.payload, self.every_round, samples)
        return steps

    def scores(self, site: str, reply: Reply, sites: Collection[str]) -> None:
        """Check the scores of one of the sites that were asked."""
        raise_error(reply)
        if site not in sites:
            raise UpdateRefused(site, "scores", expected="a site that was asked", got="another")
        _check_entries(site, reply.metrics, _MOST_SCORES)
        reply.metrics = clean_metrics(reply.metrics, depth=2)  # by metric and case


def accepted_counts(metrics: Any) -> dict[str, int]:
    """Return a site's numbers of patients and studies; empty if they are missing or malformed."""
    counts = metrics.get(COUNTS) if isinstance(metrics, Mapping) else None
    if not isinstance(counts, Mapping):
        return {}
    known = {name: counts.get(name) for name in ("patients", "studies")}
    return {name: value for name, value in known.items() if type(value) is int and 0 < value <= _MOST_SAMPLES}


def clean_metrics(metrics: Any, depth: int = 1) -> dict[str, Any]:
    """Return the metrics that ``results.json`` can hold: finite numbers, short texts, mappings of both.

    Everything else is dropped: no metric is important enough to end a round.
    """
    kept: dict[str, Any] = {}
    entries = islice(metrics.items(), _MOST_SCORES) if isinstance(metrics, Mapping) else ()
    for key, value in entries:
        if not isinstance(key, str) or len(key) > _LONGEST_NAME:
            continue
        # Includes booleans; `isfinite` fails on very large integers.
        number = isinstance(value, int) and abs(value) < 2**63
        number = number or (isinstance(value, float) and math.isfinite(value))
        text = isinstance(value, str) and len(value) <= _LONGEST_NAME
        if value is None or number or text:
            kept[key] = value
        elif depth and isinstance(value, Mapping):
            kept[key] = clean_metrics(value, depth - 1)
    return kept


def accepted_scores(
    metrics: Mapping[str, Any], names: Sequence[str], classes: Sequence[str]
) -> dict[str, Any]:
    """Return a site's test scores in the form of ``results.json``."""
    notes = {key: metrics[key] for key in ("note", "unit") if isinstance(metrics.get(key), str)}
    by_class, by_metric = _mapping(metrics.get("classes")), _mapping(metrics.get("case_metrics"))
    scores: dict[str, Any] = {**notes, names[0]: None, **_scores(metrics, names)}
    if scores.get("unit", UNITS[0]) not in UNITS:
        del scores["unit"]
    if is_count(metrics.get("scored_cases")):
        scores["scored_cases"] = metrics["scored_cases"]
    if by_class:
        scores["classes"] = {
            name: _class_scores(_mapping(by_class[name]), names) for name in classes if name in by_class
        }
    scores["cases"] = _by_case(names[0], metrics.get("cases"))
    # Patients are numbered; a case without a number counts as a patient.
    numbers = _mapping(metrics.get("patients"))
    if patients := {case: numbers[case] for case in scores["cases"] if is_count(numbers.get(case))}:
        scores["patients"] = patients
    if by_case := _mapping(metrics.get("case_classes")):
        scores["case_classes"] = {
            name: _by_case(names[0], by_case[name]) for name in classes if name in by_case
        }
    if by_metric:
        scores["case_metrics"] = {
            name: _by_case(name, by_metric[name]) for name in names if name in by_metric
        }
    return scores


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _scores(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    known: dict[str, Any] = {name: score_of(name, values[name]) for name in names if name in values}
    return known | {name: values[name] for name in ("missed", "undivided") if is_count(values.get(name))}


def _class_scores(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    ends = {
        f"{name}_{end}": score_of(name, values[f"{name}_{end}"])
        for name in names
        for end in ("low", "high")
        if f"{name}_{end}" in values
    }
    ratio = number_or_none(values.get(VOLUME_RATIO))
    if ratio is not None and ratio >= 0:
        ends[VOLUME_RATIO] = ratio
    return _scores(values, names) | ends


def is_count(value: Any) -> bool:
    """Return whether a value is a non-negative integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _by_case(name: str, scores: Any) -> dict[str, float | None]:
    return {case: score_of(name, value) for case, value in _mapping(scores).items()}


def _check_masked(site: str, reply: Reply, size: int) -> None:
    """Check an update under masks, whose values cannot be checked."""
    words = reply.masks.get(MASKED)
    sound = isinstance(words, Tensor) and words.dtype == torch.int64 and tuple(words.shape) == (size,)
    if reply.weights or reply.payload or len(reply.masks) != 1 or not sound:
        raise UpdateRefused(site, MASKED, expected=f"{size} masked numbers of 64 bits only", got="others")


def _check_count(site: str, count: Any, least: int, most: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= most:
        raise UpdateRefused(site, "num_samples", expected=f"{least} to {most}", got=str(count)[:80])


def _check_entries(site: str, metrics: Any, most: int) -> None:
    """Check the number of all entries, at any depth; stop at the first one too many."""
    count, pending = 0, [metrics]
    while pending:
        entry = pending.pop()
        for value in entry.values() if isinstance(entry, Mapping) else ():
            count += 1
            if count > most:
                raise UpdateRefused(site, "metrics", expected=f"up to {most} entries", got="more")
            if isinstance(value, Mapping):
                pending.append(value)


def _check_payload(
    site: str, payload: Payload, exchanges: Mapping[str, ServerExchange], samples: int
) -> None:
    shapes: dict[str, tuple[int | None, ...]] = {}
    for name, exchange in exchanges.items():
        shapes.update({f"{name}/{key}": shape for key, shape in exchange.shapes.items()})
    check_tensors(site, payload, shapes)
    for key, shape in shapes.items():
        _check_size(site, key, tuple(payload[key].shape), shape, samples)
    for name, exchange in exchanges.items():
        check_payload(site, name, exchange, own_entries(payload, name))


def _check_size(
    site: str, key: str, shape: tuple[int, ...], expected: tuple[int | None, ...], samples: int
) -> None:
    """Limit the lengths that the sites decide, so that the server has memory for all."""
    for axis, (length, wanted) in enumerate(zip(shape, expected, strict=True)):
        most = _LONGEST_SIDE if axis else samples
        if wanted is None and length > most:
            what = f"up to {most} {'along an axis' if axis else 'rows, one for each sample'}"
            raise UpdateRefused(site, key, expected=what, got=str(length))
    if None in expected and math.prod(shape) > _MOST_NUMBERS:
        raise UpdateRefused(site, key, expected=f"up to {_MOST_NUMBERS} numbers", got=str(math.prod(shape)))
