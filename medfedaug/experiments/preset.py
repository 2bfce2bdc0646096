"""`Preset`: a protocol with all that it says of data, run and methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# FedFD-A Section 4.1: "parameters are aggregated for the global model with the same process of FedAvg". That
# model is tested at the site that was left out; FedFA+, which tests FedBN there too, does not say which is.
_UNSEEN: dict[str, dict[str, Any]] = {"fedbn": {"unseen": "average"}, "silobn": {"unseen": "average"}}


@dataclass(frozen=True)
class Preset:
    """A protocol of a paper, or what all runs of one's own experiment have in common.

    Args:
        name: the NAME of ``medfedaug benchmark NAME``.
        benchmark: the data set (`medfedaug.data.benchmarks.find_benchmark`).
        source: where the paper describes it; empty for an experiment of one's own.
        config: the fields of `medfedaug.config.run.RunConfig` that it sets; the others keep their defaults,
            but ``intensity``, which is ``"by_method"``: the papers' methods that normalise do so with images
            as stored, and ``max_share`` of a published protocol, which is 1.
        data: options of the data set that differ from their defaults.
        arguments: arguments of methods that differ from their defaults, by method.
        holdout_arguments: the same, for runs that leave a site out.
        protocol: how it is tested, in a few words.
        readings: what was assumed where the paper says nothing or contradicts itself, and what differs from
            it (``notes`` in ``presets.yml``).
        holdout: whether each site is left out in turn unless something else is asked for.
        task: that of the sites' data, where settings follow from it.
        hours: of a run on one core, by measured steps (``benchmarks/step_times.py``), all sites left out.
        follows: the settings that are defaults of the task (`medfedaug.config.run.task_defaults`) and depend
            on the plan of each run.
        whole_site: whether a site that is left out is tested with all its cases, instead of its test cases
            alone.
    """

    name: str
    benchmark: str
    source: str
    config: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    holdout_arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _UNSEEN)
    protocol: str = "test cases of each site"
    readings: tuple[str, ...] = ()
    holdout: bool = False
    whole_site: bool = False
    task: str = ""
    hours: float = 0.0
    follows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # No paper limits a site's share; for an experiment of one's own the default does.
        share = {"max_share": 1.0} if self.source else {}
        object.__setattr__(self, "config", {"intensity": "by_method", **share, **self.config})

    @property
    def schedule(self) -> str:
        """Rounds and what a site does in each, in words."""
        steps, epochs = self.config.get("local_steps", 0), self.config.get("local_epochs", 1)
        local = f"{steps} steps" if steps else f"{epochs} epoch{'s' * (epochs > 1)}"
        return f"{self.config['rounds']} x {local}"

    @property
    def cost(self) -> str:
        """Processor time of a run, in words."""
        return f"{self.hours:g} h" if self.hours >= 1 else f"{60 * self.hours:.0f} min"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults: of the run, of its data and of methods."""
        return {
            **self.config,
            **{f"data {name}": value for name, value in self.data.items()},
            **_flat(self.arguments),
            **{f"{name} (site left out)": value for name, value in _flat(self.holdout_arguments).items()},
        }

    def arguments_of(self, method: str, *, held_out: bool) -> dict[str, Any]:
        """The arguments of a method in a run, where a site is left out or not."""
        more = self.holdout_arguments.get(method, {}) if held_out else {}
        return {**self.arguments.get(method, {}), **more}


def _flat(arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{method}.{name}": value for method, own in arguments.items() for name, value in own.items()}
