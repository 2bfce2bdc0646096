"""`Machine`: settings of a site's machine for prepared images, loading and computing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, WithJsonSchema

from medfedaug.config.options import Settings, setting, settings

__all__ = ["COMPILE", "Folder", "Machine"]

COMPILE = ("auto", "on", "off")


def _folder(value: Any) -> Path | None:
    if value is not None and not isinstance(value, Path) and not (isinstance(value, str) and value):
        raise ValueError("must be text")
    if value is not None and "\0" in str(value):
        raise ValueError("must name a folder without a NUL character")
    return None if value is None else Path(value)


_PATH = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}

Folder = Annotated[Path | None, BeforeValidator(_folder), WithJsonSchema(_PATH)]
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
        2.0,
        "GiB of memory for prepared images; further images stay in files.",
        at_least=0,
        unit="GiB",
        rare=True,
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
    ahead: int = setting(1, "Batches that a thread prepares ahead of the training.", at_least=0, flags=None)

    @property
    def max_bytes(self) -> int:
        """Return the memory for prepared images."""
        return int(self.memory * 2**30)

    def variables(self) -> dict[str, str]:
        """Return the same settings as environment variables for another process of this machine."""
        folder = {"cache": str(self.cache.resolve())} if self.cache else {}
        values = {"memory": str(self.memory), "compile": self.compile, **folder}
        values["deterministic"] = str(self.deterministic).lower()
        return {f"{Machine.VARIABLES}{name.upper()}": value for name, value in values.items()}
