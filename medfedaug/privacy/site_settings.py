"""`SiteSettings`: what belongs to a site and never travels with a job.

They live in ``local/medfedaug.json`` of the site's NVFlare kit, which ``medfedaug site-config`` writes, and
in environment variables, which come first.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, MinLen
from pydantic import BeforeValidator, Strict, WithJsonSchema
from pydantic.dataclasses import dataclass

from medfedaug.config.bundle_reference import AllowedBundle
from medfedaug.config.storage import CACHE_VARIABLE, DEFAULT_MEMORY, MEMORY_VARIABLE, Storage
from medfedaug.config.validated import STRICT, OneLineErrors
from medfedaug.errors import ConfigError
from medfedaug.privacy import JobRules, PrivacyPolicy
from medfedaug.utils.files import parse_json
from medfedaug.utils.validation import check_keys

__all__ = [
    "DATA_VARIABLE",
    "DEVICE_VARIABLE",
    "PROCESSES_VARIABLE",
    "SETTINGS_FILE",
    "STATE_VARIABLE",
    "SiteSettings",
]

DATA_VARIABLE = "MEDFEDAUG_DATA"
"""Environment variable with the folder of the images."""
DEVICE_VARIABLE = "MEDFEDAUG_DEVICE"
"""Environment variable with the device to compute on."""
STATE_VARIABLE = "MEDFEDAUG_STATE"
"""Environment variable with the folder for what must survive a restart."""
PROCESSES_VARIABLE = "MEDFEDAUG_PROCESSES"
"""Environment variable with the number of processes in which a script's loop trains."""
SETTINGS_FILE = "local/medfedaug.json"
"""File of the settings in a site's kit."""

_VARIABLES = {
    "data": DATA_VARIABLE,
    "device": DEVICE_VARIABLE,
    "state": STATE_VARIABLE,
    "memory": MEMORY_VARIABLE,
    "cache": CACHE_VARIABLE,
    "processes": PROCESSES_VARIABLE,
}


def _text(value: Any) -> Any:
    if value is not None and not isinstance(value, Path) and not (isinstance(value, str) and value):
        raise ValueError("must be text")
    return value


def _folder(value: Any) -> Path | None:
    found = _text(value)
    return Path(found) if found else None


def _number(value: Any) -> Any:
    try:  # a variable of the environment is text
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _built_by(cls: Any) -> Callable[[Any], Any]:
    """Build a group of settings from its mapping, whose unknown keys then get the names that are near."""
    return lambda value: value if isinstance(value, cls) else cls.from_dict(value)


def _bundles(value: Any) -> Any:
    built = isinstance(value, Mapping) and all(isinstance(one, AllowedBundle) for one in value.values())
    return value if built else AllowedBundle.from_settings(value)


_BUNDLE = {
    "type": "object",
    "properties": {"folder": {"type": "string"}, "hash": {"type": "string"}},
    "required": ["folder", "hash"],
    "additionalProperties": False,
}

_PATH = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}

Folder = Annotated[Path | None, BeforeValidator(_folder), WithJsonSchema(_PATH)]
Number = Annotated[float, Ge(0), BeforeValidator(_number)]


@dataclass(frozen=True, config=STRICT)
class SiteSettings(OneLineErrors):
    """Settings of a site, which no job carries.

    Args:
        data: the folder with the site's images; see `medfedaug.federation.resolve_data_folder`.
        device: ``"cpu"``, ``"cuda"``, ... or ``"auto"``: CUDA where there is one.
        state: the folder for what must survive a restart of the site.
        privacy: the limits of what may leave the site.
        plugins: names of installed packages whose methods and networks a job may use
            (`medfedaug.utils.plugins`).
        bundles: the Bundles that a job may use, by name, each with its folder and the hash of the content
            that was allowed (`medfedaug.config.bundle_reference`).
        memory: GiB of memory for prepared images; the rest of them is kept in files.
        jobs: which jobs the site takes part in.
        simulation: whether the server and all sites are on one machine, so that nothing leaves it and the
            rules for jobs do not hold. Simulations set it; it has no place in a kit.
        cache: the folder of these files, which then serve later jobs too and are never removed; ``None`` for
            a temporary one, which goes with the job.
        processes: processes of the site, one for each GPU, in which a training loop of a script trains
            together (`medfedaug.nvflare_jobs.job.ranks`); the federation's own loop has one.
        save_every: minutes of a round's training after which its state is written to the state folder: after
            a restart the site goes on from there. 0 for never, which repeats the round.

    Example:
        >>> SiteSettings.from_dict({"privacy": {"min_images": 20}}, "medfedaug.json").privacy.min_images
        20
    """

    UNITS: ClassVar[dict[str, str]] = {"memory": "GiB", "save_every": "minutes"}

    data: Folder = None
    device: Annotated[str, BeforeValidator(lambda value: _text(value) or "auto")] = "auto"
    state: Folder = None
    privacy: Annotated[PrivacyPolicy, BeforeValidator(_built_by(PrivacyPolicy))] = field(
        default_factory=PrivacyPolicy
    )
    plugins: Annotated[tuple[Annotated[str, MinLen(1)], ...], Strict(False)] = ()
    bundles: Annotated[
        Mapping[str, AllowedBundle],
        BeforeValidator(_bundles),
        WithJsonSchema({"type": "object", "additionalProperties": _BUNDLE}),
    ] = field(default_factory=dict)
    memory: Number = DEFAULT_MEMORY
    cache: Folder = None
    jobs: Annotated[JobRules, BeforeValidator(_built_by(JobRules))] = field(default_factory=JobRules)
    simulation: bool = False
    save_every: Number = 5.0
    processes: Annotated[int, Ge(1), Strict(False)] = 1

    @property
    def storage(self) -> Storage:
        """Return where the site keeps its prepared images."""
        return Storage(int(self.memory * 2**30), self.cache)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON types."""
        values = {
            **dataclasses.asdict(self),
            "privacy": self.privacy.to_dict(),
            "plugins": list(self.plugins),
            "bundles": {name: bundle.to_dict() for name, bundle in self.bundles.items()},
            "jobs": self.jobs.to_dict(),
        }
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Any, source: object) -> SiteSettings:
        """Settings from JSON; an unknown key is an error, since it would silently do nothing.

        Args:
            values: what the file holds.
            source: where it comes from, for messages.

        Raises:
            ConfigError: naming the source and the key.
        """
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: a JSON object is needed, got {type(values).__name__}")
        check_keys(f"{source}: unknown keys", values, [f.name for f in dataclasses.fields(cls)])
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @classmethod
    def load(
        cls,
        kit: str | Path | None,
        environment: Mapping[str, str] = os.environ,
        content: Mapping[str, Any] | None = None,
    ) -> SiteSettings:
        """The settings of the site whose NVFlare kit is ``kit``.

        A missing file means the defaults. Relative folders in the file are relative to the kit.

        Args:
            kit: the folder that holds ``local`` and ``startup``; ``None`` for the environment alone.
            environment: ``MEDFEDAUG_`` with ``DATA``, ``DEVICE``, ``STATE``, ``MEMORY``, ``CACHE`` and
                ``PROCESSES`` in it come first.
            content: of the file, in place of what it has now.

        Returns:
            Settings; where there is a kit with a ``state`` folder, ``<kit>/medfedaug`` by default.

        Raises:
            ConfigError: naming the file and what is wrong with it.
        """
        settings = cls() if kit is None else cls._from_kit(Path(kit), content)
        given = {name: environment[key] for name, key in _VARIABLES.items() if environment.get(key)}
        # As everywhere, a folder in a variable is relative to the working folder.
        for name in given.keys() - {"device", "memory", "processes"}:
            given[name] = os.path.abspath(given[name])
        if given:
            settings = cls.from_dict({**settings.to_dict(), **given}, "environment")
        return settings

    @classmethod
    def _from_kit(cls, kit: Path, content: Mapping[str, Any] | None) -> SiteSettings:
        file = kit / SETTINGS_FILE
        values: Any = content or {}
        try:
            if content is None:
                values = parse_json(file.read_text())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: not readable as JSON ({error})") from error
        settings = cls.from_dict(values, file)
        return dataclasses.replace(
            settings,
            data=kit / settings.data if settings.data else None,
            cache=kit / settings.cache if settings.cache else None,
            state=kit / (settings.state or "medfedaug"),
        )
