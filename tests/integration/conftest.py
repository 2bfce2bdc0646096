"""Settings for all tests of whole federations."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _as_in_other_processes(onednn):
    """Runs in this process are compared with those of other processes to the last bit."""
