"""Where server and sites keep what must survive a restart: outside the folder of one job."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["STATE_VARIABLE", "state_folder"]

STATE_VARIABLE = "MEDFEDAUG_STATE"


def state_folder(kit: Path) -> Path:
    """The environment variable ``MEDFEDAUG_STATE``, or ``medfedaug`` in the folder of the NVFlare kit.

    Args:
        kit: the root of NVFlare's workspace.
    """
    return Path(os.environ.get(STATE_VARIABLE) or kit / "medfedaug")
