"""Repeat each test that draws random numbers of the operating system, which no seed fixes.

    python tests/support/chance.py                    # each a thousand times, as far as a minute goes
    python tests/support/chance.py --seconds 600 tests/privacy

A first pass runs the tests once and notes those in which a module of `SOURCES` draws. A second pass repeats
these. It prints for each its number of repetitions, and exits with 1 where one failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCES = {
    "medfedaug/federation/secure/history.py": ("federation/secure",),
    "medfedaug/federation/secure/keys.py": ("federation/secure",),
    "medfedaug/federation/secure/masks.py": ("federation/secure",),
    "medfedaug/federation/secure/sharing.py": ("federation/secure",),
    "medfedaug/federation/site/dp_sgd.py": (
        *("federation/site/test_dp_sgd.py", "federation/site/test_dp_sgd_audit.py"),
        "federation/site/test_dp_sgd_hostile.py",
    ),
    "medfedaug/federation/messages/privacy_guard.py": ("federation/messages/test_privacy_guard.py",),
    "medfedaug/federation/site/samples.py": ("federation/site/test_local_training.py",),
    "medfedaug/methods/dp_fedavg.py": ("methods/test_dp_fedavg.py",),
    "medfedaug/privacy/pseudonyms.py": ("privacy/test_pseudonyms.py",),
    "medfedaug/privacy/score_release.py": ("privacy/test_score_release.py",),
    "medfedaug/utils/files.py": ("utils/test_files.py",),
    "medfedaug/utils/secure_random.py": ("federation/secure", "methods/test_dp_fedavg.py"),
}
"""Modules that draw from the operating system, and the tests of what they draw."""

_DRAWS = re.compile(
    r"\bsecrets\.\w+\(|\bos\.urandom\b|\bSystemRandom\b|\bsecret_normal\(|\bdefault_rng\(\)|\bRandomState\(\)"
)
_PACKAGES = ("medfedaug", "models", "nvflare_jobs", "transforms")


def drawing_modules() -> set[str]:
    """Find the modules of the package that draw from the operating system; identities (uuid) aside."""
    paths = (path for package in _PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT)) for path in paths if _DRAWS.search(path.read_text(encoding="utf-8"))}


class Recorder:
    """Notes the tests in which a module of `SOURCES` draws, and their seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.drew: set[str] = set()
        self._now, self._draw = "", os.urandom
        os.urandom = random._urandom = self._spy  # type: ignore[attr-defined]

    def _spy(self, count: int) -> bytes:
        frame = sys._getframe(1)
        while frame is not None and self._now not in self.drew:
            if any(frame.f_code.co_filename.endswith(name) for name in SOURCES):
                self.drew.add(self._now)
            frame = frame.f_back  # type: ignore[assignment]
        return self._draw(count)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = item.nodeid
        result = yield
        self._now = ""
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration


class Repeater:
    """Runs each test many times.

    Args:
        times: by test.
    """

    def __init__(self, times: dict[str, int]) -> None:
        self.times, self.ran, self.failed = times, Counter[str](), Counter[str]()
        self._most: dict[tuple[str, str], int] = {}
        for name, number in times.items():
            path, _, function = name.partition("::")
            key = path, function.partition("[")[0]
            self._most[key] = max(self._most.get(key, 0), number)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        path = str(Path(metafunc.definition.path).relative_to(ROOT))
        number = self._most.get((path, metafunc.function.__name__), 0)
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(number))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[0]
        self.ran[name] += report.when == "call"
        self.failed[name] += report.failed


def main() -> None:
    """Record, repeat, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("paths", nargs="*", help="tests; by default those of SOURCES")
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="about so long for each test")
    options = parser.parse_args()
    os.chdir(ROOT)
    known = dict.fromkeys(f"tests/{name}" for names in SOURCES.values() for name in names)
    recorder = Recorder()
    pytest.main(["-q", "--no-header", *(options.paths or known)], plugins=[recorder])
    times = {
        name: max(2, min(options.times, int(options.seconds / max(recorder.seconds[name], 1e-3))))
        for name in sorted(recorder.drew & recorder.seconds.keys())
    }
    repeater, started = Repeater(times), time.monotonic()
    files = dict.fromkeys(name.partition("::")[0] for name in times)
    if times:
        pytest.main(["-q", "--no-header", "-p", "no:terminalreporter", *files], plugins=[repeater])
    for name, number in repeater.ran.items():  # those that ran, where it is interrupted too
        print(f"{name}: {number} times")
    for name, number in (+repeater.failed).items():
        print(f"FAILED by chance: {name}: {number} times")
    print(
        f"{len(repeater.ran)} tests, {time.monotonic() - started:.0f} s, {repeater.failed.total()} failures"
    )
    sys.exit(bool(+repeater.failed))


if __name__ == "__main__":
    main()
