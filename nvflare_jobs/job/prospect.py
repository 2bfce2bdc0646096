"""Write the pages of a job that exchanges fingerprints, at the server and at each site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medfedaug.config.run import RunConfig
from medfedaug.config.scanners import scanners_text
from medfedaug.data.quality.image_fingerprint import ImageFingerprint
from medfedaug.federation.composition import Composition
from medfedaug.federation.site.site import Site
from medfedaug.utils.files import write_json

FINGERPRINTS, RECORD, PAGE = "fingerprints.json", "prospect.json", "prospect.html"


def write_fingerprints(
    folder: Path, sites: Sequence[ImageFingerprint], missing: Mapping[str, str] | None = None
) -> None:
    """Write the fingerprints, and the reasons of sites that sent none."""
    fingerprints = {fingerprint.site: fingerprint.to_dict() for fingerprint in sites}
    write_json(folder / FINGERPRINTS, {"sites": fingerprints, "missing": dict(missing or {})})


def write_pages(
    folder: Path,
    sites: Sequence[ImageFingerprint],
    missing: Mapping[str, str] | None = None,
    *,
    config: RunConfig,
    trained: Mapping[str, Mapping[str, Any]] | None = None,
    site: str | None = None,
    releases: Sequence[str] = (),
) -> None:
    """Write page and JSON of a prospect to a folder."""
    # Imported here: matplotlib takes a second, and is needed only now.
    from medfedaug.analysis.pilot import Pilot
    from medfedaug.analysis.prospect import make_prospect
    from medfedaug.analysis.prospect_page import write_prospect
    from medfedaug.models.networks import norm_of

    norm = norm_of(Composition(config).network)
    prospect = make_prospect(sites, missing, norm=norm, pilot=Pilot.of_results(trained or {}))
    write_json(folder / RECORD, prospect.to_dict())
    lines = list(releases) or ["Each site sent these means once, through its privacy policy and its ledger:"]
    write_prospect(prospect, folder / PAGE, site=site, releases=lines)


def write_site_page(site: Site, folder: Path) -> Path:
    """Write a site's page, from the fingerprints that the server sent."""
    folder.mkdir(parents=True, exist_ok=True)
    write_fingerprints(folder, site.prospect)
    noise, numbers, names = "without noise", 0, ""
    for fingerprint in site.prospect:
        if fingerprint.site == site.name:
            noise = f"with noise of deviation {fingerprint.noise:.3g} each" if fingerprint.noise else noise
            numbers = sum(value.numel() for value in fingerprint.entries.values())
            names = scanners_text(fingerprint.scanners)
    epsilon = site.trainer.guard.metrics().get("privacy/epsilon")
    spent = "" if epsilon is None else f"; ε of this site's ledger is now {epsilon:.3g}"
    scanners = f"and named its scanners: {names}" if names else "and named no scanner"
    line = (
        f"This site sent {numbers} means over its training cases, {noise}{spent}, {scanners}. All sites "
        "received them."
    )
    write_pages(folder, site.prospect, config=site.trainer.config, site=site.name, releases=[line])
    return folder / PAGE
