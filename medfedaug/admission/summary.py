"""One page about a job for the administrator of a site: what runs, what leaves, how often."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from medfedaug.admission.book import JobEntry
from medfedaug.config import RunConfig
from medfedaug.errors import MedFedAugError
from medfedaug.federation.messages import num_bytes
from medfedaug.federation.server import FederationServer
from medfedaug.methods.base import ServerExchange

__all__ = ["summary"]


def summary(entry: JobEntry) -> list[str]:
    """The page of a job, in lines of text.

    What leaves is read off what the server's half of each method would accept.
    """
    lines = [f"job {entry.hash}", "", "What runs"]
    try:
        config = RunConfig.from_dict(entry.config)
        server = FederationServer(config)
    except MedFedAugError as error:
        return [*lines, f"  nothing: it cannot run here ({error})"]
    lines += [f"  {line}" for line in _runs(config)]
    sent = num_bytes({key: server.state[key] for key in server.acceptance.model.shapes}) / 1e6
    lines += ["", "What leaves this site"]
    if config.planning:
        lines += [
            "  once: the fingerprint of the training volumes; the plan that is made of it is a job of its own"
        ]
    lines += ["  once: the numbers of cases, and how images are scaled"]
    lines += [
        "  once: the edges of the training volumes' voxels, as 10 %, 50 % and 90 % quantiles of two digits, "
        "where this kit's privacy policy allows a summary of them (min_images, no noise)"
    ]
    lines += [f"  once: {line}" for line in _exchanged(server.aggregation.once)]
    if config.secure_aggregation:
        lines += ["  under secure aggregation: of weights and statistics the server learns sums alone"]
    lines += [
        f"  {config.rounds} times: the weights that training changes, {sent:.4g} MB, of "
        f"{len(server.acceptance.model.shapes)} entries",
        f"  {config.rounds} times: number of samples, training loss, validation score, seconds",
    ]
    lines += [f"  {config.rounds} times: {line}" for line in _exchanged(server.aggregation.every_round)]
    lines += ["  once, at the end: the scores of the test cases"]
    lines += ["", "What leaves it in a job of these settings that scores finished models and trains none"]
    lines += [
        "  the scores of each model, and their differences, as far as this kit's settings allow (--scores)",
        "  models that this site trained for itself, if this kit's settings allow it (--lend-models)",
        "  An approval is for both kinds of job.",
    ]
    defaults = RunConfig().to_dict()
    changed = {name: value for name, value in config.to_dict().items() if value != defaults[name]}
    lines += ["", "Settings that are not the default"]
    return [*lines, *(f"  {name}: {json.dumps(value)}" for name, value in changed.items())]


def _runs(config: RunConfig) -> list[str]:
    steps = f"{config.local_steps} steps" if config.local_steps else f"{config.local_epochs} epochs"
    methods = [
        method["name"] + (f" {json.dumps(method['args'])}" if method.get("args") else "")
        for method in config.methods
    ]
    return [
        f"{config.task} of {_quoted(config.classes)}, with {config.in_channels} channels",
        f"network: {config.network}" + (" (a Bundle, which is code of this site)" if config.bundle else ""),
        *([f"training loop: {config.loop}, CODE THAT SEES THE IMAGES"] if config.loop else []),
        f"methods: {', '.join(methods)}",
        f"training: {config.rounds} rounds of {steps}, {config.batch_size} samples a step",
        f"cases: {'all' if config.limit is None else f'at most {config.limit} of each split'}",
    ]


def _quoted(names: Sequence[str]) -> str:
    """Names of others, in quotes: none of them can pass for words of this page."""
    return ", ".join(json.dumps(name, ensure_ascii=False) for name in names)


def _exchanged(exchanges: Mapping[str, ServerExchange]) -> list[str]:
    lines = []
    for name, exchange in exchanges.items():
        shapes = [
            f"{key} ({' x '.join('any' if n is None else str(n) for n in shape) or '1'})"
            for key, shape in exchange.shapes.items()
        ]
        more = f" and {len(shapes) - 6} more" if len(shapes) > 6 else ""
        lines.append(f"{name}: {', '.join(shapes[:6])}{more}")
    return lines
