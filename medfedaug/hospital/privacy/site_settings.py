"""`SiteSettings`: settings that belong to a site and never travel with a job.

They are in ``local/medfedaug.json`` of the site's NVFlare kit, which ``medfedaug site configure`` writes, and
in environment variables, which take precedence.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen
from pydantic import BeforeValidator

from medfedaug.config.bundle_reference import AllowedBundle
from medfedaug.config.machine import KIT_STATE, Folder, Machine, read_environment
from medfedaug.config.options import Settings, setting, settings
from medfedaug.errors import ConfigError
from medfedaug.hospital.privacy.job_policy import JobRules
from medfedaug.hospital.privacy.policy import PrivacyPolicy
from medfedaug.utils.files import parse_json

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
    VARIABLES: ClassVar[str] = ""  # `load` reads variables, after a kit's file

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
        try:
            settings = super().from_dict(values)
            settings.privacy.check_everything_is_private()
            return settings
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

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
        try:
            values = parse_json(file.read_text()) if content is None else content
        except FileNotFoundError:
            values = {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: not readable as JSON ({error})") from error
        settings = cls.from_dict(values, file)
        if settings.simulation and any((kit / name).exists() for name in _KIT_FILES):
            raise ConfigError(f"{file}: simulation is true, and in a kit it suspends all rules; take it out")
        return dataclasses.replace(
            settings,
            data=kit / settings.data if settings.data else None,
            cache=kit / settings.cache if settings.cache else None,
            state=kit / (settings.state or KIT_STATE),
        )


_KIT_FILES = ("startup/fed_client.json", "startup/fed_server.json")
