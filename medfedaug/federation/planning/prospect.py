"""Exchange of fingerprints before any training: the site's and the server's half."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch

from medfedaug.config.run import RunConfig
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.quality.image_fingerprint import (
    SAMPLE,
    ImageFingerprint,
    as_rows,
    case_numbers,
    entry_shapes,
    fingerprint_of,
    from_means,
    from_rows,
    sample_cases,
)
from medfedaug.errors import RunFailed, UpdateRefused
from medfedaug.federation.messages.messages import PROSPECT, Reply, Request, namespaced, own_entries
from medfedaug.federation.messages.privacy_guard import PrivacyGuard
from medfedaug.federation.messages.refusal import raise_error, refusal
from medfedaug.federation.messages.tensor_checks import check_tensors
from medfedaug.methods.base import HISTOGRAM, Bounds, Contributions, Payload, Shapes, SiteExchange
from medfedaug.privacy.policy import SUMMARY, PrivacyPolicy
from medfedaug.utils.validation import is_number

_COUNTS = ("cases", "looked_at", "patients", "test_patients")
_MOST = 2**31


class ProspectExchange(SiteExchange):
    """Exchange of a fingerprint, a mean over patients: of about ``limit`` cases, or with noise of all."""

    def __init__(self, site: SiteFolder, limit: int | None = SAMPLE, least: int = 1) -> None:
        self.site, self.chosen = site, sample_cases(site, limit, least)

    def sample(self) -> Sequence[Case]:
        """Return the sampled cases."""
        return self.chosen

    def collect(self) -> Payload:
        """See `medfedaug.data.quality.image_fingerprint.fingerprint_of`."""
        fingerprint = fingerprint_of(self.site, self.chosen)
        return {name: value.float() for name, value in fingerprint.entries.items()}

    def contributions(self, bounds: Bounds) -> Contributions:
        """Return the numbers of each case as rows that add up to 1, which need no bounds."""
        classes, channels = len(self.site.classes), self.channels
        kinds = dict.fromkeys(entry_shapes(self.site.task, classes, channels), HISTOGRAM)
        rows = (
            {name: as_rows(name, value) for name, value in case_numbers(self.site, case).items()}
            for case in self.site.cases["training"]
        )
        return Contributions(kinds, rows)

    @property
    def channels(self) -> int:
        """The number of channels of the first training case."""
        return self.site.load_image(self.site.cases["training"][0]).shape[0]

    def privatised(self, means: Payload, cases: int) -> Payload:
        """Return the noisy means."""
        return {
            # For a single number `contiguous` keeps a stride that prevents hashing as bytes.
            name: from_rows(name, value).float().clone(memory_format=torch.contiguous_format)
            for name, value in means.items()
        }

    def apply(self, payload: Payload) -> None:
        """Do nothing: the others' fingerprints arrive in a later request."""


def noise_of(policy: PrivacyPolicy, payload: Payload, cases: int) -> float:
    r"""Return the deviation of the noise in each number: z times the sensitivity of the guard's mean.

    Both rows of a number get noise of deviation :math:`\sqrt 2 z \Delta`; half of their difference is used.
    """
    if not policy.noise_multiplier or not cases:
        return 0.0
    blocks = sum(1 if name == "shares" else value.numel() for name, value in payload.items())
    most = min(policy.cases_per_patient, cases)
    return policy.noise_multiplier * most * math.sqrt(blocks) / cases


def site_prospect(site: SiteFolder, guard: PrivacyGuard) -> Reply:
    """Answer with the site's fingerprint, through its guard; empty from a site that does not train.

    Withheld counts are 0, and scanners are listed only if the policy names them.
    """
    reply = Reply(PROSPECT)
    if not site.trains:
        return reply
    policy = guard.policy
    exchange = ProspectExchange(site, None if policy.noise_multiplier else SAMPLE, policy.min_images)
    guard.observe(PROSPECT, exchange)
    payload = guard.collect(PROSPECT, exchange)
    fingerprint = from_means(site, payload, len(exchange.chosen))
    least = 0 if policy.scores != SUMMARY else policy.min_images
    counts = {name: getattr(fingerprint, name) for name in _COUNTS}
    reply.payload = namespaced(payload, PROSPECT)
    reply.metrics = {name: count if count >= least else 0 for name, count in counts.items()}
    if scanners := guard.scanners():
        reply.metrics["scanners"] = scanners
    if fingerprint.annotated is not None:
        reply.metrics["annotated"] = list(fingerprint.annotated)
    reply.metrics["noise"] = noise_of(policy, payload, len(site.cases["training"]))
    reply.num_samples = fingerprint.cases
    return reply


class Prospecting:
    """Gathers fingerprints at the server, and sends every site the full set."""

    def __init__(self, config: RunConfig, run: str) -> None:
        self.config, self.run = config, run
        self.sites: dict[str, ImageFingerprint] = {}
        self.missing: dict[str, str] = {}
        self._lock = threading.Lock()  # sites answer in separate threads

    @property
    def shapes(self) -> Shapes:
        """The shapes of a site's payload."""
        return entry_shapes(self.config.task, len(self.config.classes), self.config.in_channels)

    def request(self) -> Request:
        """Ask a site for its fingerprint."""
        return Request(PROSPECT, run=self.run)

    def accept(self, site: str, reply: Reply) -> bool:
        """Accept a fingerprint, empty from a site that does not train; return whether it could be used."""

        def use() -> None:
            raise_error(reply)
            if not reply.payload:
                raise UpdateRefused(site, PROSPECT, expected="a fingerprint", got="none: it does not train")
            payload = own_entries(reply.payload, PROSPECT)
            if len(payload) != len(reply.payload):
                raise UpdateRefused(site, PROSPECT, expected="entries of a fingerprint", got="others")
            check_tensors(site, payload, self.shapes)
            self.sites[site] = _fingerprint(site, self.config, payload, reply.metrics)

        with self._lock:
            reason = refusal(site, use)
            if reason is not None:
                self.missing[site] = reason
            return reason is None

    def finish(self) -> None:
        """Check that at least two sites sent a fingerprint."""
        if len(self.sites) < 2:
            reasons = "; ".join(reason for _, reason in sorted(self.missing.items()))
            raise RunFailed(
                f"a prospect needs two sites or more, got {len(self.sites)}: {reasons or 'no answer'}"
            )

    def full_set(self) -> Request:
        """Send the sites all fingerprints."""
        once: Payload = {}
        for site, fingerprint in self.sites.items():
            entries = {name: value.float() for name, value in fingerprint.entries.items()}
            counts = [float(getattr(fingerprint, name)) for name in (*_COUNTS, "noise")]
            entries["counts"] = torch.tensor(counts, dtype=torch.float64)
            entries["tells"] = torch.from_numpy(fingerprint.annotated_mask).double()
            once.update({f"{PROSPECT}/{name}/{site}": value for name, value in entries.items()})
        scanners = {
            site: dict(fingerprint.scanners)
            for site, fingerprint in self.sites.items()
            if fingerprint.scanners
        }
        return Request(PROSPECT, run=self.run, once=once, scanners=scanners)


def received(config: RunConfig, request: Request) -> list[ImageFingerprint]:
    """Return the fingerprints in the server's request, with the server's checks."""
    by_site: dict[str, Payload] = {}
    for key, value in own_entries(request.once, PROSPECT).items():
        name, _, site = key.partition("/")
        by_site.setdefault(site, {})[name] = value
    shapes: dict[str, Any] = entry_shapes(config.task, len(config.classes), config.in_channels)
    fingerprints = []
    for site, payload in sorted(by_site.items()):
        more = {"counts": (len(_COUNTS) + 1,), "tells": (len(config.classes) - 1,)}
        check_tensors(site, payload, {**shapes, **more})
        tells = payload.pop("tells") > 0
        *counts, noise = payload.pop("counts").tolist()
        metrics = {name: int(count) for name, count in zip(_COUNTS, counts, strict=True)}
        numbers = {**metrics, "noise": noise, "scanners": request.scanners.get(site, {})}
        if not bool(tells.all()):
            numbers["annotated"] = list(compress(config.classes[1:], tells.tolist()))
        fingerprints.append(_fingerprint(site, config, payload, numbers))
    return fingerprints


def _fingerprint(
    site: str, config: RunConfig, payload: Payload, metrics: Mapping[str, Any]
) -> ImageFingerprint:
    """Build a fingerprint from a message."""
    noise: Any = metrics.get("noise")
    if not is_number(noise) or noise < 0:
        raise UpdateRefused(site, f"{PROSPECT}/noise", expected="a deviation", got="another value")
    values = {
        **{name: metrics.get(name) for name in _COUNTS},
        **{"site": site, "task": config.task, "channels": config.in_channels, "classes": config.classes},
        "noise": float(noise),
        "scanners": metrics.get("scanners", {}),
        "annotated": metrics.get("annotated"),
        "entries": {name: value.double().flatten().tolist() for name, value in payload.items()},
    }
    try:
        fingerprint = ImageFingerprint.from_dict(values)
    except (ValueError, TypeError) as error:
        raise UpdateRefused(site, PROSPECT, expected="numbers of a fingerprint", got="others") from error
    if max(getattr(fingerprint, name) for name in _COUNTS) > _MOST:
        raise UpdateRefused(site, PROSPECT, expected=f"at most {_MOST} cases", got="more")
    return fingerprint
