"""Kits as `site configure --forbid-code` leaves them."""

from pathlib import Path

import pytest
from rehearsed_hospitals import HOSPITALS, SERVER

from medfedaug.nvflare_jobs.kit.kit import Kit, open_kit


def _configured(folder: Path) -> Kit:
    found = open_kit(folder)
    found.write(found.plan(forbid=True))
    return found


@pytest.fixture
def kit(kits) -> Kit:
    return _configured(kits / HOSPITALS[0])


@pytest.fixture
def server(kits) -> Kit:
    return _configured(kits / SERVER)
