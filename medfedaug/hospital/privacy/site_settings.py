"""`SiteSettings`: settings that belong to a site and never travel with a job, with its `JobRules`.

They are in ``local/medfedaug.json`` of the site's NVFlare kit, which ``medfedaug site configure`` writes, and
in environment variables, which take precedence.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

from annotated_types import MinLen
from pydantic import BeforeValidator

from medfedaug.config.bundle_reference import AllowedBundle
from medfedaug.config.machine import KIT_STATE, Folder, Machine, read_environment
from medfedaug.config.options import Settings, setting, settings
from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, JobRefused, config_errors, own, withheld
from medfedaug.hospital.privacy.policy import PrivacyPolicy
from medfedaug.utils.files import parse_json

if TYPE_CHECKING:
    import torch

_FILE = re.compile(r"^[/~.\\]|^[A-Za-z]:[\\/]|\.\.[\\/]|://")


@settings
class JobRules(Settings):
    """A site's rules for jobs; JSON in the site's settings.

    Example:
        >>> rules = JobRules(max_rounds=100)
        >>> rules.check("A", RunConfig(rounds=200))
        Traceback (most recent call last):
        medfedaug.errors.JobRefused: site A: job refused: its rounds are 200, and the site's rule \
max_rounds is 100
    """

    TITLE: ClassVar[str] = "jobs: "
    PANEL: ClassVar[str] = "Jobs in which the site takes part"
    OPEN: ClassVar[str] = "the kit's value"

    loops: tuple[Name, ...] = setting(
        (),
        "Training loop that jobs may bring or name; repeatable. FILE.py@SHA-256, as `medfedaug export` "
        "prints it, or the loop of an allowed package; by default none. A loop is code that sees the site's "
        "images.",
        flags=("--allow-loop",),
    )
    max_rounds: int = setting(1000, "Most rounds of a job, repeated ones included.", above=0)
    allow_limit: bool = setting(False, "Let a job choose a part of the cases by its limit.", rare=True)
    max_model_mb: float = setting(
        1024.0, "Largest model, and largest exchange of the methods in a message, in MB.", above=0, rare=True
    )
    secure_only: bool = setting(False, "Take part only in jobs under secure aggregation.")
    min_summed: int = setting(
        3,
        "Fewest sites, this one included, in a sum that the server learns under secure aggregation.",
        at_least=2,
        rare=True,
    )
    known_sites: tuple[Name, ...] | None = setting(
        None,
        "The federation's sites, by the names in their certificates, separated by commas; by default the "
        "sites whose certificates have reached this site.",
        flags=("--known-sites",),
        rare=True,
    )
    min_known_share: float = setting(
        0.66,
        "Smallest share of the known sites that must take part in a sum under secure aggregation, 0 to 1.",
        at_least=0,
        at_most=1,
        rare=True,
    )
    max_sum_sets: int = setting(
        3,
        "Most sets of sites in the sums of one job under secure aggregation: a server that claims that a "
        "site is gone learns about it from the difference. 1 is the safest; a site that misses a round then "
        "ends the job.",
        at_least=1,
        rare=True,
    )
    approve: bool = setting(
        False, "Let a job wait until the site's administrator has approved it (medfedaug site approve)."
    )

    def check(self, site: str, config: RunConfig) -> None:
        """Check a job's configuration, before anything is built for it; values stay at the site."""
        if config.loop is not None and config.loop not in self.loops:
            allowed = ", ".join(self.loops) or "none"
            _refuse(site, f"its training loop is {withheld(config.loop)}", f"loops allows {allowed}")
        if config.rounds > self.max_rounds:
            _refuse(site, f"its rounds are {withheld(config.rounds)}", f"max_rounds is {self.max_rounds}")
        if self.secure_only and not config.secure_aggregation:
            _refuse(site, "its secure_aggregation is false", "secure_only is true")
        if config.limit is not None and not self.allow_limit:
            _refuse(site, f"its limit is {withheld(config.limit)}", "allow_limit is false")
        for name in ("network_args", "loss_args", "methods"):
            for text in _texts(getattr(config, name)):
                if _FILE.search(text):
                    reason = f"its {name} name a file or an address, {withheld(repr(text[:80]))}"
                    _refuse(site, reason, "is that jobs name none")
        self.check_model(site, _megabytes(config, self.max_model_mb))

    def check_trainings(self, site: str, count: int) -> None:
        """Check the number of trainings of a job: a server may repeat a round with other weights."""
        if count > self.max_rounds:
            _refuse(site, "the server asks for another training", f"max_rounds is {self.max_rounds}")

    def check_model(self, site: str, megabytes: float) -> None:
        """Check the size of a network or of the weights in a message."""
        if megabytes > self.max_model_mb:
            _refuse(site, f"its model has {megabytes:.4g} MB", f"max_model_mb is {self.max_model_mb:g}")

    def check_payload(self, site: str, megabytes: float) -> None:
        """Check the size of the methods' exchange in a message."""
        if megabytes > self.max_model_mb:
            reason = f"its methods exchange {megabytes:.4g} MB in a message"
            _refuse(site, reason, f"max_model_mb is {self.max_model_mb:g}")

    def describe(self) -> str:
        """Describe the rules that are not the default in one line, for `doctor`."""
        usual = JobRules().to_dict()
        rules = [f"{name} {value}" for name, value in self.to_dict().items() if value != usual[name]]
        return "; ".join(rules) or "the default rules"


def _refuse(site: str, reason: str, rule: str) -> NoReturn:
    raise JobRefused(site, f"{reason}, and the site's rule {rule}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


def _megabytes(config: RunConfig, most: float) -> float:
    """Return the size of a network, before its weights take memory; 0 where it cannot be built."""
    import torch  # the command line reads the rules without it

    from medfedaug.models import build_network

    args = {
        "spatial_dims": config.plan.spatial_dims,
        "image_size": config.plan.patch_size or config.image_size,
        "supervised": config.plan.deep_supervision,
        **config.network_args,
    }

    def build() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            return build_network(
                config.network, in_channels=config.in_channels, out_channels=config.num_classes, **args
            )

    try:
        with torch.device("meta"):
            network = build()
    except Exception:  # some networks compute while they are built
        return _built_up_to(build, most)
    return _size(network)


def _built_up_to(build: Callable[[], torch.nn.Module], most: float) -> float:
    """Return the size of a network in MB, or the size at which its parameters exceed ``most``.

    A parameter is registered before it is filled, and takes memory when it is filled.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    parameters: dict[int, torch.nn.Parameter] = {}
    thread = threading.get_ident()

    def count(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter) -> None:
        if threading.get_ident() == thread:
            parameters[id(parameter)] = parameter
            if megabytes() > most:
                raise MemoryError

    def megabytes() -> float:
        return sum(parameter.nbytes for parameter in parameters.values()) / 1e6

    hook = register_module_parameter_registration_hook(count)
    try:
        return _size(build())
    except Exception:  # other errors are reported when the network is built for use
        return megabytes() if megabytes() > most else 0.0
    finally:
        hook.remove()


def _size(network: torch.nn.Module) -> float:
    result: float = sum(value.nbytes for value in network.state_dict().values()) / 1e6
    return result


SETTINGS_FILE = "local/medfedaug.json"
"""File of the settings in a site's kit."""


def _bundles(value: Any) -> Any:
    if isinstance(value, Mapping) and all(isinstance(bundle, AllowedBundle) for bundle in value.values()):
        return value
    return AllowedBundle.from_settings(value)


Name = Annotated[str, MinLen(1)]


@settings
class Place(Settings):
    """Settings of a site: its images, its device, and its state folder."""

    data: Folder = setting(None, "Folder with the site's images.")
    device: Name = setting("auto", "cpu, cuda, cuda:1, ..., or auto: CUDA if available.")
    state: Folder = setting(
        None, "Folder of the site's state, which must survive a restart; by default KIT/medfedaug."
    )


@settings
class SiteSettings(Machine, Place):
    """Settings of a site and its machine, which no job carries.

    Example:
        >>> SiteSettings.from_dict({"privacy": {"min_images": 20}}, "medfedaug.json").privacy.min_images
        20
    """

    PANEL: ClassVar[str] = "The site"
    OPEN: ClassVar[str] = "the kit's value"
    VARIABLES: ClassVar[str] = ""  #: `load` reads variables, after a kit's file

    privacy: PrivacyPolicy = setting(PrivacyPolicy, "The limits of what may leave the site.", flags=None)
    plugins: tuple[Name, ...] = setting(
        (),
        "Installed package whose methods and networks jobs may use, besides the allowed ones; repeatable.",
        flags=("--allow-plugin",),
    )
    bundles: Annotated[Mapping[str, AllowedBundle], BeforeValidator(_bundles)] = setting(
        dict,
        "The Bundles that a job may use, by name, each with its folder and the hash of its allowed content "
        "(`medfedaug.config.bundle_reference`).",
        flags=None,
    )
    jobs: JobRules = setting(JobRules, "The jobs that the site takes part in.", flags=None)
    simulation: bool = setting(
        False,
        "Suspend all rules for jobs, since the server and all sites are on one machine. Simulations set it; "
        "it must not be in a kit.",
        flags=None,
    )
    processes: int = setting(
        1,
        "Processes, one for each GPU, in which a training loop of a script trains together; the built-in "
        "loop has one.",
        at_least=1,
        rare=True,
    )

    @classmethod
    def from_dict(cls, values: Any, source: object = "") -> SiteSettings:
        """Read settings from JSON; an error names the source."""
        with config_errors(str(source), ConfigError):
            settings = super().from_dict(values)
            settings.privacy.check_everything_is_private()
            return settings

    @classmethod
    def load(
        cls,
        kit: str | Path | None,
        environment: Mapping[str, str] = os.environ,
        content: Mapping[str, Any] | None = None,
    ) -> SiteSettings:
        """Load the settings of a site from its NVFlare kit and the environment, or only the latter.

        A missing file means the defaults. Relative folders in the file are relative to the kit, and ``state``
        is ``<kit>/medfedaug`` by default. Variables such as ``MEDFEDAUG_DATA``, ``MEDFEDAUG_`` and the name
        of a setting with an option, take precedence. ``content`` replaces the file's.
        """
        settings = cls() if kit is None else cls._from_kit(Path(kit), content)
        if values := read_environment(cls, environment):
            settings = cls.from_dict({**settings.to_dict(), **values}, "environment")
        return settings

    @classmethod
    def _from_kit(cls, kit: Path, content: Mapping[str, Any] | None) -> SiteSettings:
        file = kit / SETTINGS_FILE
        if content is None:
            content = {}
            with config_errors(f"{own(file)}: not readable as JSON"), suppress(FileNotFoundError):
                content = parse_json(file.read_text())
        settings = cls.from_dict(content, file)
        if settings.simulation and any((kit / name).exists() for name in _KIT_FILES):
            raise ConfigError(f"{file}: simulation is true, and in a kit it suspends all rules; take it out")
        return dataclasses.replace(
            settings,
            data=kit / settings.data if settings.data else None,
            cache=kit / settings.cache if settings.cache else None,
            state=kit / (settings.state or KIT_STATE),
        )


_KIT_FILES = ("startup/fed_client.json", "startup/fed_server.json")
