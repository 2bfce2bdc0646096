"""The papers' protocols by name (``presets.yml``): data, network, rounds, optimiser, source.

>>> PRESETS["office_caltech_10"].config["rounds"], PRESETS["fedrdn_office_caltech_10"].config["rounds"]
(400, 100)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import yaml

from medfedaug.utils.validation import check_choice

# FedFD-A Section 4.1: "parameters are aggregated for the global model with the same process of FedAvg". That
# model is tested at the held-out site; FedFA+ tests FedBN there too and does not name the model.
_UNSEEN: dict[str, dict[str, Any]] = {"fedbn": {"unseen": "average"}, "silobn": {"unseen": "average"}}


@dataclass(frozen=True)
class Preset:
    """A protocol of a paper, or the common settings of an experiment on own data."""

    name: str
    benchmark: str
    source: str  # its section in the paper; empty for an experiment on own data
    # Fields of `medfedaug.config.run.RunConfig`. The others keep their defaults, except `intensity`, which is
    # "by_method", since the papers' methods normalise images as stored, and `max_share` of a published
    # protocol, which is 1.
    config: Mapping[str, Any]
    # Options of the data set that differ from their defaults.
    data: Mapping[str, Any] = field(default_factory=dict)
    # Arguments of methods that differ from their defaults, by method.
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # The same, for runs that leave a site out.
    holdout_arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _UNSEEN)
    protocol: str = "test cases of each site"  # the test, in a few words
    # Assumptions where the paper is silent or contradicts itself, and differences from it (`notes` in
    # `presets.yml`).
    readings: tuple[str, ...] = ()
    holdout: bool = False  # whether each site is left out in turn by default
    whole_site: bool = False  # whether a held-out site is tested with all its cases instead of its test cases
    hours: float = 0.0  # of a run on one core, from measured steps, with all sites left out

    def __post_init__(self) -> None:
        # No paper limits a site's share; for an experiment of one's own the default does.
        share = {"max_share": 1.0} if self.source else {}
        object.__setattr__(self, "config", {"intensity": "by_method", **share, **self.config})

    @property
    def schedule(self) -> str:
        """Describe the rounds and a site's work in each."""
        steps, epochs = self.config.get("local_steps", 0), self.config.get("local_epochs", 1)
        local = f"{steps} steps" if steps else f"{epochs} epoch{'s' * (epochs > 1)}"
        return f"{self.config['rounds']} x {local}"

    @property
    def cost(self) -> str:
        """Describe the processor time of a run."""
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
        """Return the arguments of a method in a run with or without a held-out site."""
        more = self.holdout_arguments.get(method, {}) if held_out else {}
        return {**self.arguments.get(method, {}), **more}


def _flat(arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{method}.{name}": value for method, args in arguments.items() for name, value in args.items()}


def _read() -> dict[str, Preset]:
    content = yaml.safe_load((resources.files(__package__) / "presets.yml").read_text(encoding="utf-8"))
    presets = {}
    for name, entry in content["presets"].items():
        readings = tuple(content["notes"][note] for note in entry.get("readings", ()))
        presets[name] = Preset(name=name, **{**entry, "readings": readings})
    return presets


PRESETS = _read()


def find_preset(name: str) -> Preset:
    """Return the preset of a name."""
    check_choice("benchmark", name, PRESETS)
    return PRESETS[name]
