"""Choose the statistics for a prediction, from a site, a file or the images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medfedaug.config.bundle_reference import PREDICTS
from medfedaug.errors import ConfigError, first_line
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.statistics import ChannelStatistics, load_statistics


@dataclass(frozen=True)
class Origin:
    """Origin of images: their site, empty if unknown, and the pair of statistics with its source in words.

    Without a pair, the statistics of the images themselves count.
    """

    site: str
    pair: ChannelStatistics | None
    source: str

    @classmethod
    def of(cls, run: FinishedRun, site: str | None, statistics: str | Path | None) -> Origin:
        """Read the origin from a run and a site's name, or from a file of statistics.

        Raises:
            ConfigError: naming the option that gives missing statistics or layers; and for a run with a
                Bundle.
        """
        if run.config.bundle:
            raise ConfigError(f"{run.model}: {PREDICTS}")
        if site is not None and statistics is not None:
            raise ConfigError("--site and --statistics exclude each other: both choose the statistics")
        if statistics is not None and not run.composition.needs_statistics:
            raise ConfigError("--statistics: the run's methods do not normalise with a site's; leave it out")
        if statistics is not None:
            return cls("", _one_pair(Path(statistics), run), str(statistics))
        if site is None:
            return cls("", None, "")
        layers = run.sites_with_layers
        known = {*run.statistics, *layers, *run.record.get("sites", ())}
        known.update(*(round_["sites"] for round_ in run.record["rounds"]))
        if site not in known:
            raise ConfigError(f"{site!r} took no part in the run, whose sites are {', '.join(sorted(known))}")
        if run.composition.personal and site not in layers:
            present = f"has those of {', '.join(layers)}" if layers else "has none"
            raise ConfigError(
                f"the run left layers or weights at its sites, and {run.state} {present}: give --state, the "
                f"folder in which {site} keeps its own, or its kit"
            )
        if run.composition.needs_statistics and site not in run.statistics:
            raise ConfigError(
                f"the run has no statistics of {site}: give --statistics FILE, which `medfedaug statistics "
                f"--intensity {run.composition.intensity} --data DIR --out FILE` makes of its images"
            )
        return cls(site, run.statistics.get(site), f"site {site}")


def _one_pair(path: Path, run: FinishedRun) -> ChannelStatistics:
    try:
        statistics = load_statistics(path, run.composition.intensity)
    except (OSError, ValueError) as error:
        raise ConfigError(first_line(error)) from error
    if len(statistics) > 1:
        raise ConfigError(f"{path}: expected one site, found {', '.join(statistics)}")
    (pair,) = statistics.values()
    if pair.num_channels != run.config.in_channels:
        raise ConfigError(
            f"{path}: has {pair.num_channels} channels; the model expects {run.config.in_channels}"
        )
    return pair
