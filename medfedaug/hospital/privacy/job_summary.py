"""The page of a job for a site's administrator: what it computes, and what leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from medfedaug.config.comparison import REFERENCE, ComparisonConfig
from medfedaug.config.run import RunConfig
from medfedaug.errors import JobRefused, MedFedAugError
from medfedaug.hospital.privacy.job_log import JobEntry
from medfedaug.hospital.privacy.policy import OPEN_PROMISE
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.methods.base import ServerExchange


def _submitters(entry: JobEntry) -> list[str]:
    """Return who submitted the jobs, and whether a certificate or only the server says so."""
    lines = []
    for origin in entry.origins.values():
        who = ", ".join(filter(None, (origin.organisation, origin.role)))
        proof = "by certificate" if origin.signed else "as the server says"
        lines.append(f"submitted {proof}: {origin.submitter or 'unknown'}" + (f" ({who})" if who else ""))
    return list(dict.fromkeys(lines))


def summary(entry: JobEntry, settings: SiteSettings) -> list[str]:
    """Return the page of a job at a site, in lines of text.

    The server's half of each method, built here, defines the values that may leave.
    """
    # Imported here, since a list of jobs needs no PyTorch.
    from medfedaug.federation.messages.messages import num_bytes, packed
    from medfedaug.federation.server.server import FederationServer

    policy = settings.privacy
    lines = [
        f"job {entry.hash}",
        *_submitters(entry),
        f"purpose: {entry.run.get('purpose') or 'none given'}",
        "",
        "What runs",
    ]
    try:
        compared = ComparisonConfig.from_dict(entry.config) if entry.compares else None
        configs = [*compared.configs().values()] if compared else [RunConfig.from_dict(entry.config)]
        # The seeds of a method have the same server, but for the initial weights.
        servers = [FederationServer(config) for config in configs[:: compared.seeds if compared else 1]]
    except MedFedAugError as error:
        return [*lines, f"  nothing: it cannot run here ({error})"]
    config, server = configs[0], servers[0]
    lines += [f"  {line}" for line in _runs(config, compared)]
    weights = {key: server.state[key] for key in server.reply_checks.model.shapes}
    sent = num_bytes(packed(weights, config.wire)) / 1e6
    if policy.epsilon is None:
        lines += ["", "Trust", f"  {OPEN_PROMISE}."]
    lines += ["", f"What leaves this site, each number of {policy.min_images} patients or more"]
    if config.planning:
        lines += [
            "  once: the fingerprint of the training volumes; the plan that is made of it is a job of its own"
        ]
    times = "once" if config.rounds == 1 else f"{config.rounds} times"
    if compared:
        lines += [f"  in each of {len(configs)} trainings:"]
    once, every_round = (
        dict.fromkeys(line for of in servers for line in _exchanged(getattr(of.aggregation, name)))
        for name in ("once", "every_round")
    )
    entries = counted(len(server.reply_checks.model.shapes), "entry", "entries")
    return [
        *lines,
        "  once: numbers of cases, patients and studies, and how images are scaled",
        "  once: voxel sizes of the training volumes, as 10 %, 50 % and 90 % quantiles of two digits",
        "  once: names of the classes with enough annotated training patients, where labelled names some",
        *(f"  once: {line}" for line in once),
        *(
            ["  the server learns only sums of weights and statistics over sites"]
            if server.aggregation.words is not None
            else []
        ),
        f"  {times}: the weights that training changes, {sent:.4g} MB, of {entries}",
        f"  {times}: number of samples, validation score, whole seconds",
        *(f"  {times}: {line}" for line in every_round),
        *(_of_comparison(compared) if compared else ["  once, at the end: the scores of the test cases"]),
        "",
        "What this kit withholds, by its policy and rules",
        *dict.fromkeys(f"  {line}" for of in servers for line in withheld_here(of.config, settings)),
        "",
        "Settings that are not the default",
        *(f"  {line}" for line in changed_settings(config)),
    ]


def _of_comparison(compared: ComparisonConfig) -> Iterator[str]:
    stages = ", ".join(map(str, compared.stages()))
    yield (
        f"  after the rounds {stages} at most: the validation score of the best model, and its mean "
        f"difference from that of {REFERENCE}, with standard error, interval and p"
    )
    yield "  no score of a test case"


def withheld_here(config: RunConfig, settings: SiteSettings) -> Iterator[str]:
    """Yield what a site with these settings withholds from a job, a line each."""
    from medfedaug.federation.composition import check_counted

    policy = settings.privacy
    try:
        settings.jobs.check("this kit", config)
        check_counted(config)
        if config.loop is not None and policy.sgd_noise_multiplier:
            raise JobRefused("this kit", "nothing bounds what one case changes in its training loop")
    except MedFedAugError as error:
        yield f"everything, since it refuses the job: {error}"
        return
    yield f"each number, scores included, of fewer than {policy.min_images} patients (min_images)"
    yield "the training's losses, scores of single cases and classes, distances, names of cases and files"
    if policy.epsilon is not None:
        yield (
            f"whatever would exceed ε = {policy.epsilon:g} of a patient over all jobs, and whatever noise "
            "cannot hide: times, voxel sizes, differences of scores, messages about images"
        )
        yield "everything, where a method changes the training or sends statistics, and noise cannot hide it"


def changed_settings(config: RunConfig) -> list[str]:
    """Return a line for each setting of a job that is not the default."""
    usual = type(config)().to_dict()
    return [f"{name}: {json.dumps(v)}" for name, v in config.to_dict().items() if v != usual[name]]


def _runs(config: RunConfig, compared: ComparisonConfig | None = None) -> list[str]:
    local, unit = (config.local_steps, "step") if config.local_steps else (config.local_epochs, "epoch")
    methods = [
        method["name"] + (f" {json.dumps(method['args'])}" if method.get("args") else "")
        for method in config.methods
    ]
    # Quoted, so that foreign names cannot pass for words of this page.
    classes = ", ".join(json.dumps(name, ensure_ascii=False) for name in config.classes)
    return [
        f"{config.task} of {classes}, with {counted(config.in_channels, 'channel')}",
        f"network: {config.network}" + (" (a Bundle, which is code of this site)" if config.bundle else ""),
        *([f"training loop: {config.loop}, CODE THAT SEES THE IMAGES"] if config.loop else []),
        f"methods: {', '.join(methods)}"
        if compared is None
        else f"a comparison of {', '.join(compared.order)}: {counted(compared.seeds, 'training')} of each",
        f"training: {counted(config.rounds, 'round')} of {counted(local, unit)}, "
        f"{counted(config.batch_size, 'sample')} a step",
        f"cases: {'all' if config.limit is None else f'at most {config.limit} of each split'}",
    ]


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
