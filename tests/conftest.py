"""Setup of every process of a test run: the process that hands out tests reads nothing but this.

Fixtures are in `shared_fixtures`, which imports PyTorch and MONAI for seconds and half a gigabyte.
"""

import os
import re
from pathlib import Path

# Two processes give the same bits with the same number of threads alone, and tests share the cores. PyTorch
# reads it when it is imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files that take longest, of which those that start NVFlare mostly wait for its processes.
_LONGEST = ("faults", "nvflare", "plugins", "studies", "enrolment")
_LONGEST += ("agreement", "reply_checks", "composition", "export")
_LONGEST += ("score_release", "report_images", "client", "printable", "names", "compare", "plan")
_FIRST = {f"test_{name}.py" for name in _LONGEST}


_TESTS = Path(__file__).parent
_LAYERS = [name for name in ("hospital", "research") if not (_TESTS.parent / "medfedaug" / name).is_dir()]


def _above_the_core() -> re.Pattern[str]:
    """Match a file that imports another layer, by itself or by a helper."""
    found, before = re.compile(r"medfedaug\.(hospital|research|nvflare_jobs)\b"), set[str]()
    texts = {file.stem: file.read_text("utf-8") for file in (_TESTS / "support").glob("*.py")}
    del texts["shared_fixtures"]  # imports them where a test asks for it
    while helpers := {name for name, text in texts.items() if found.search(text)} - before:
        before |= helpers
        found = re.compile(rf"{found.pattern}|^(?:from|import) (?:{'|'.join(helpers)})\b", re.MULTILINE)
    return found


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
    if _LAYERS:
        items[:] = [item for item in items if item.get_closest_marker("all_layers") is None]
