"""Pages of a job that exchanges fingerprints: one at the server, and one at each site."""

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
    content = {"sites": {one.site: one.to_dict() for one in sites}, "missing": dict(missing or {})}
    write_json(folder / FINGERPRINTS, content)


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
    pilot = Pilot.of_results(trained or {})
    found = make_prospect(sites, missing, norm=norm, pilot=pilot)
    write_json(folder / RECORD, found.to_dict())
    lines = list(releases) or ["Each site sent these means once, through its privacy policy and its ledger:"]
    write_prospect(found, folder / PAGE, site=site, releases=lines)


def write_site_page(site: Site, folder: Path) -> Path:
    """Write a site's own page, from the fingerprints that the server sent."""
    folder.mkdir(parents=True, exist_ok=True)
    write_fingerprints(folder, site.prospect)
    own = next((one for one in site.prospect if one.site == site.name), None)
    released = site.trainer.guard.metrics().get("privacy/epsilon")
    noise = (
        "without noise" if own is None or not own.noise else f"with noise of deviation {own.noise:.3g} each"
    )
    spent = "" if released is None else f"; ε of this site's ledger is now {released:.3g}"
    numbers = 0 if own is None else sum(value.numel() for value in own.entries.values())
    named = "" if own is None else scanners_text(own.scanners)
    scanners = f"and named its scanners: {named}" if named else "and named no scanner"
    line = (
        f"This site sent {numbers} means over its training cases, {noise}{spent}, {scanners}. All sites "
        "received them."
    )
    write_pages(folder, site.prospect, config=site.trainer.config, site=site.name, releases=[line])
    return folder / PAGE
