"""Exchange of fingerprints before anything is trained: the site's and the server's half."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
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

_COUNTS = ("cases", "looked_at", "patients", "test_patients")
_MOST = 2**31


class ProspectExchange(SiteExchange):
    """A fingerprint as the site's guard sees it: a mean over patients.

    Without noise it is of a sample of the cases; with noise of all, since the guard averages them itself.

    Args:
        site: the site's folder.
        limit: about so many cases are looked at without noise; ``None`` for all, as with noise.
        least: the fewest patients that a value may be about.
    """

    def __init__(self, site: SiteFolder, limit: int | None = SAMPLE, least: int = 1) -> None:
        self.site, self.chosen = site, sample_cases(site, limit, least)

    def sample(self) -> Sequence[Case]:
        """Return the cases that are looked at."""
        return self.chosen

    def collect(self) -> Payload:
        """See `medfedaug.data.quality.image_fingerprint.fingerprint_of`."""
        found = fingerprint_of(self.site, self.chosen)
        return {name: value.float() for name, value in found.entries.items()}

    def contributions(self, bounds: Bounds) -> Contributions:
        """Numbers of each case as rows that add up to 1: their ranges are public, and need no bounds."""
        classes, channels = len(self.site.classes), self.channels
        kinds = dict.fromkeys(entry_shapes(self.site.task, classes, channels), HISTOGRAM)
        return Contributions(kinds, self._rows())

    @property
    def channels(self) -> int:
        """The number of channels of the first training case."""
        return self.site.load_image(self.site.cases["training"][0]).shape[0]

    def _rows(self) -> Iterator[Payload]:
        for case in self.site.cases["training"]:
            yield {name: as_rows(name, value) for name, value in case_numbers(self.site, case).items()}

    def privatised(self, means: Payload, cases: int) -> Payload:
        """The noisy means."""
        return {
            # Of a row of one number `contiguous` keeps the stride of two, which cannot be hashed as bytes.
            name: from_rows(name, value).float().clone(memory_format=torch.contiguous_format)
            for name, value in means.items()
        }

    def apply(self, payload: Payload) -> None:
        """Do nothing: the others' fingerprints come by another way."""


def noise_of(policy: PrivacyPolicy, payload: Payload, cases: int) -> float:
    r"""Return the deviation of the noise in each number: z times the sensitivity of the guard's mean.

    Both rows of a number get noise of deviation :math:`\sqrt 2 z \Delta`, and half their difference stays.
    """
    if not policy.noise_multiplier or not cases:
        return 0.0
    blocks = sum(1 if name == "shares" else value.numel() for name, value in payload.items())
    most = min(policy.cases_per_patient, cases)
    return policy.noise_multiplier * most * math.sqrt(blocks) / cases


def site_prospect(site: SiteFolder, guard: PrivacyGuard) -> Reply:
    """Answer with the site's fingerprint, through its guard; empty of a site that does not train.

    Counts that the site's policy keeps back are 0, and scanners that it does not name are left out.
    """
    reply = Reply(PROSPECT)
    if not site.trains:
        return reply
    policy = guard.policy
    exchange = ProspectExchange(site, None if policy.noise_multiplier else SAMPLE, policy.min_images)
    guard.observe(PROSPECT, exchange)
    payload = guard.collect(PROSPECT, exchange)
    found = from_means(site, payload, len(exchange.chosen))
    least = 0 if policy.scores != SUMMARY else policy.min_images
    counts = {name: getattr(found, name) for name in _COUNTS}
    reply.payload = namespaced(payload, PROSPECT)
    reply.metrics = {name: count if count >= least else 0 for name, count in counts.items()}
    if scanners := guard.scanners():
        reply.metrics["scanners"] = scanners
    if found.annotated is not None:
        reply.metrics["annotated"] = list(found.annotated)
    reply.metrics["noise"] = noise_of(policy, payload, len(site.cases["training"]))
    reply.num_samples = found.cases
    return reply


class Prospecting:
    """Gathers fingerprints at the server, and tells each site those of all."""

    def __init__(self, config: RunConfig, run: str) -> None:
        self.config, self.run = config, run
        self.sites: dict[str, ImageFingerprint] = {}
        self.missing: dict[str, str] = {}
        self._lock = threading.Lock()  # sites answer in threads of their own

    @property
    def shapes(self) -> Shapes:
        """The shapes of what a site sends."""
        return entry_shapes(self.config.task, len(self.config.classes), self.config.in_channels)

    def request(self) -> Request:
        """Ask a site for its fingerprint."""
        return Request(PROSPECT, run=self.run)

    def accept(self, site: str, reply: Reply) -> bool:
        """Take in a fingerprint; one of a site that does not train is empty.

        Returns:
            Whether it could be used.
        """

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
        """Check that there is something to compare."""
        if len(self.sites) < 2:
            reasons = "; ".join(reason for _, reason in sorted(self.missing.items()))
            raise RunFailed(
                f"a prospect needs two sites or more, got {len(self.sites)}: {reasons or 'no answer'}"
            )

    def telling(self) -> Request:
        """Tell the sites all fingerprints."""
        once: Payload = {}
        for site, found in self.sites.items():
            entries = {name: value.float() for name, value in found.entries.items()}
            counts = [float(getattr(found, name)) for name in (*_COUNTS, "noise")]
            entries["counts"] = torch.tensor(counts, dtype=torch.float64)
            entries["tells"] = torch.from_numpy(found.annotated_mask).double()
            once.update({f"{PROSPECT}/{name}/{site}": value for name, value in entries.items()})
        scanners = {site: dict(found.scanners) for site, found in self.sites.items() if found.scanners}
        return Request(PROSPECT, run=self.run, once=once, scanners=scanners)

    def accept_receipt(self, site: str, reply: Reply) -> bool:
        """Accept that a site has received them."""
        return not reply.error


def received(config: RunConfig, request: Request) -> list[ImageFingerprint]:
    """The fingerprints that the server tells, checked as the server checks them."""
    by_site: dict[str, Payload] = {}
    for key, value in own_entries(request.once, PROSPECT).items():
        name, _, site = key.partition("/")
        by_site.setdefault(site, {})[name] = value
    shapes: dict[str, Any] = entry_shapes(config.task, len(config.classes), config.in_channels)
    found = []
    for site, payload in sorted(by_site.items()):
        more = {"counts": (len(_COUNTS) + 1,), "tells": (len(config.classes) - 1,)}
        check_tensors(site, payload, {**shapes, **more})
        tells = payload.pop("tells") > 0
        *counts, noise = payload.pop("counts").tolist()
        metrics = {name: int(count) for name, count in zip(_COUNTS, counts, strict=True)}
        described = {**metrics, "noise": noise, "scanners": request.scanners.get(site, {})}
        if not bool(tells.all()):
            described["annotated"] = list(compress(config.classes[1:], tells.tolist()))
        found.append(_fingerprint(site, config, payload, described))
    return found


def _fingerprint(
    site: str, config: RunConfig, payload: Payload, metrics: Mapping[str, Any]
) -> ImageFingerprint:
    """Put together what another one sent."""
    noise = metrics.get("noise")
    if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not 0 <= noise < math.inf:
        raise UpdateRefused(site, f"{PROSPECT}/noise", expected="a deviation", got="another value")
    described = {
        **{name: metrics.get(name) for name in _COUNTS},
        **{"site": site, "task": config.task, "channels": config.in_channels, "classes": config.classes},
        "noise": float(noise),
        "scanners": metrics.get("scanners", {}),
        "annotated": metrics.get("annotated"),
        "entries": {name: value.double().flatten().tolist() for name, value in payload.items()},
    }
    try:
        found = ImageFingerprint.from_dict(described)
    except (ValueError, TypeError) as error:
        raise UpdateRefused(site, PROSPECT, expected="numbers of a fingerprint", got="others") from error
    if max(getattr(found, name) for name in _COUNTS) > _MOST:
        raise UpdateRefused(site, PROSPECT, expected=f"at most {_MOST} cases", got="more")
    return found
