"""`print_page`: print a page as PDF with an installed Chromium."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from medfedaug.errors import ConfigError

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 120


def print_page(page: Path, out: Path) -> None:
    """Print a page to a file."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise ConfigError(f"no Chromium is installed: open {page} in a browser and print it to {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="medfedaug-", ignore_cleanup_errors=True) as profile:
        command = [
            *(browser, "--headless", "--disable-gpu", "--no-sandbox", "--no-first-run"),
            *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *(f"--user-data-dir={profile}", "--no-pdf-header-footer", "--disable-dev-shm-usage"),
            *(f"--print-to-pdf={out.resolve()}", page.resolve().as_uri()),
        ]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
            if out.is_file():
                return
    raise ConfigError(f"{browser} did not print {page}: open it in a browser and print it")
