"""Setup of every process of a test run: the process that hands out tests reads nothing but this.

Fixtures are in `shared_fixtures`, which imports PyTorch and MONAI for seconds and half a gigabyte.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# Two processes give the same bits with the same number of threads alone, and tests share the cores. PyTorch
# reads it when it is imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files that take longest, of which those that start NVFlare mostly wait for its processes.
_LONGEST = ("faults", "nvflare", "plugins", "studies", "enrolment", "broken_kits")
_LONGEST += ("agreement", "reply_checks", "composition", "export")
_LONGEST += ("score_release", "report_images", "client", "printable", "names", "compare", "plan")
_FIRST = {f"test_{name}.py" for name in _LONGEST}


_TESTS = Path(__file__).parent
_LAYERS = [name for name in ("hospital", "research") if not (_TESTS.parent / "medfedaug" / name).is_dir()]


def _above_the_core() -> re.Pattern[str]:
    """The words in a test that runs with all layers only: their modules, and helpers that import them."""
    layers = r"medfedaug\.(hospital|research|nvflare_jobs)\b"
    helpers = [f.stem for f in (_TESTS / "support").glob("*.py") if re.search(layers, f.read_text("utf-8"))]
    helpers.remove("shared_fixtures")
    return re.compile(rf"{layers}|^(?:from|import) (?:{'|'.join(helpers)})\b", re.MULTILINE)


def pytest_ignore_collect(collection_path):
    """Leave out, in a copy of the core, files of tests that need another layer (`make test-core`)."""
    if _LAYERS and collection_path.name.startswith("test_"):
        return _above_the_core().search(collection_path.read_text("utf-8")) is not None or None
    return None


def pytest_configure(config):
    if config.getoption("dist", "no") == "no":  # runs tests, by itself or for the process that hands them out
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_modifyitems(items):
    """Begin with the longest files, lest one of them be left over for a single process at the end."""
    items.sort(key=lambda item: item.path.name not in _FIRST)
