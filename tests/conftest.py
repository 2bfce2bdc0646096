"""Setup of every process of a test run: the process that hands out tests reads nothing but this.

Fixtures are in `shared_fixtures`, which imports PyTorch and MONAI for seconds and half a gigabyte.
"""

from __future__ import annotations

import os

# Two processes give the same bits with the same number of threads alone, and tests share the cores. PyTorch
# reads it when it is imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files that take longest, of which those that start NVFlare mostly wait for its processes.
_LONGEST = ("faults", "nvflare", "plugins", "studies", "enrolment", "broken_kits")
_LONGEST += ("agreement", "reply_checks", "composition", "export")
_LONGEST += ("score_release", "report_images", "client", "printable", "names", "compare", "plan")
_FIRST = {f"test_{name}.py" for name in _LONGEST}


def pytest_configure(config):
    if config.getoption("dist", "no") == "no":  # runs tests, by itself or for the process that hands them out
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_modifyitems(items):
    """Begin with the longest files, lest one of them be left over for a single process at the end."""
    items.sort(key=lambda item: item.path.name not in _FIRST)
