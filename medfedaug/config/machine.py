"""`Machine`: settings of a site's machine for prepared images, loading and computing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from medfedaug.config.options import Settings, hints_of, kinds_of, read_text, setting, settings

COMPILE = ("auto", "on", "off")

DATA_VARIABLE = "MEDFEDAUG_DATA"
"""Environment variable with the folder of the images."""
DEVICE_VARIABLE = "MEDFEDAUG_DEVICE"
"""Environment variable with the device."""
STATE_VARIABLE = "MEDFEDAUG_STATE"
"""Environment variable with the state folder, which must survive a restart."""
KIT_STATE = "medfedaug"
"""The state folder in a site's kit, unless a setting names another."""


def _folder(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("must name a folder without a NUL character")
    return Path(value)


Folder = Annotated[Path | None, BeforeValidator(_folder)]
"""A path, or text, or nothing."""


@settings
class Machine(Settings):
    """Settings of a site's machine for prepared images and for computing. No job carries them.

    Raises:
        ConfigError: for impossible values.
    """

    PANEL: ClassVar[str] = "How the run is carried out"
    VARIABLES: ClassVar[str] = "MEDFEDAUG_"

    memory: float = setting(
        2.0, "GiB of memory for prepared images; further images stay in files.", at_least=0, rare=True
    )
    cache: Folder = setting(
        None,
        "Folder of prepared images, which later jobs reuse; by default a temporary one. Nothing removes "
        "its files.",
        rare=True,
    )
    compile: str = setting(
        "auto",
        "Compile the network for training and inference with torch.compile. auto: on CUDA only. on: on a CPU "
        "too. off: never.",
        choices=COMPILE,
        rare=True,
    )
    deterministic: bool = setting(
        False,
        "Use operations that give the same bits each time on one GPU. They are slower; a run stops where "
        "PyTorch has none.",
        rare=True,
    )

    @property
    def max_bytes(self) -> int:
        """Return the memory for prepared images."""
        return int(self.memory * 2**30)

    @classmethod
    def from_environment(cls) -> Machine:
        """Return the settings of this machine's environment variables."""
        return Machine.from_dict(read_environment(Machine, os.environ))

    def variables(self) -> dict[str, str]:
        """Return the same settings as environment variables for another process of this machine."""
        folder = {"cache": str(self.cache.resolve())} if self.cache else {}
        values = {"memory": str(self.memory), "compile": self.compile, **folder}
        values["deterministic"] = str(self.deterministic).lower()
        return {f"{Machine.VARIABLES}{name.upper()}": value for name, value in values.items()}


def read_environment(cls: type, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a class that environment variables give, such as ``MEDFEDAUG_MEMORY``."""
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(cls):
        text = environment.get(f"{Machine.VARIABLES}{entry.name.upper()}")
        if text and entry.metadata["flags"] is not None:
            # A folder in a variable is relative to the working folder.
            folder = Path in kinds_of(hints_of(cls)[entry.name])
            values[entry.name] = os.path.abspath(text) if folder else read_text(cls, entry.name, text)
    return values
