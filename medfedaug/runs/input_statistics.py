"""Choose the statistics of images that are to be predicted, from a site, a file or the images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medfedaug.config.bundle_reference import PREDICTS
from medfedaug.errors import ConfigError, first_line
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.statistics import ChannelStatistics, load_statistics, other_statistics


@dataclass(frozen=True)
class Origin:
    """Origin of images: their site, and the pair of statistics where it is known.

    Args:
        site: its name; empty where nobody knows it.
        pair: its statistics; ``None`` for those of the images given.
        source: what the pair is of, in words.
    """

    site: str
    pair: ChannelStatistics | None
    source: str

    @classmethod
    def of(cls, run: FinishedRun, site: str | None, statistics: str | Path | None) -> Origin:
        """Read the origin from a run and a site's name, or from a file of statistics.

        Raises:
            ConfigError: where what the run's methods need is not there, with what to give; and for a run
                with a Bundle.
        """
        if run.config.bundle:
            raise ConfigError(f"{run.model}: {PREDICTS}")
        normalises = run.composition.needs_statistics
        names = ", ".join(method.name for method in run.composition.methods)
        if site is not None and statistics is not None:
            raise ConfigError(
                "--site and --statistics exclude each other: both say whose statistics are used"
            )
        if statistics is not None:
            if not normalises:
                raise ConfigError(
                    f"--statistics: the run's methods ({names}) do not normalise with a site's statistics; "
                    "leave it out"
                )
            return cls("", _one_pair(Path(statistics), run), str(statistics))
        if site is None:
            return cls("", None, "")
        layers = run.sites_with_layers
        known = {*run.statistics, *layers, *run.record.get("sites", ())}.union(
            *(round_["sites"] for round_ in run.record["rounds"])
        )
        if site not in known:
            raise ConfigError(f"{site!r} took no part in the run, whose sites are {', '.join(sorted(known))}")
        if run.composition.personal and site not in layers:
            there = f"has those of {', '.join(layers)}" if layers else "has none"
            raise ConfigError(
                f"the run left layers or weights at its sites, and {run.state} {there}: give --state, the "
                f"folder in which {site} keeps its own, or its kit"
            )
        if normalises and site not in run.statistics:
            raise ConfigError(
                f"the run has no statistics of {site}: give --statistics FILE, which `medfedaug statistics "
                f"--intensity {run.composition.intensity} --data DIR --out FILE` makes of its images"
            )
        return cls(site, run.statistics.get(site), f"site {site}")


def _one_pair(path: Path, run: FinishedRun) -> ChannelStatistics:
    try:
        found = load_statistics(path)
        other_statistics(path, run.composition.intensity)
    except (ValueError, OSError) as error:
        raise ConfigError(
            first_line(error) if isinstance(error, ValueError) else f"{path}: {error}"
        ) from error
    if len(found) > 1:
        raise ConfigError(f"{path}: has the statistics of {', '.join(found)}, and one site was expected")
    (pair,) = found.values()
    if pair.num_channels != run.config.in_channels:
        raise ConfigError(
            f"{path}: of {pair.num_channels} channels, and the model takes {run.config.in_channels}"
        )
    return pair
