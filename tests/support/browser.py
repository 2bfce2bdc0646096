"""A page as Chromium shows it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from running import TINY_NETWORK

from medfedaug.analysis import write_report
from medfedaug.data.sites import find_sites
from medfedaug.simulate import configure, simulate

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# A window cannot be as narrow as a phone, a frame can. What the page looks like in it once it is loaded is
# left where --dump-dom shows it.
FRAME = """<!DOCTYPE html><html style="color-scheme: light dark"><body style="margin: 0">
<iframe style="border: 0; width: %dpx; height: 844px" srcdoc="%s"></iframe>
<script>
addEventListener("load", () => {
  const inside = document.querySelector("iframe").contentWindow, page = inside.document;
  const images = [...page.images], style = element => inside.getComputedStyle(element);
  const beyond = [...page.querySelectorAll("body *")].filter(
    e => e.getBoundingClientRect().right > inside.innerWidth + 0.5 && !e.closest(".wide, pre"));
  document.documentElement.dataset.probe = JSON.stringify({
    width: inside.innerWidth,
    scroll: page.documentElement.scrollWidth,
    beyond: beyond.map(e => e.tagName),
    tables: [...page.querySelectorAll("table")].filter(
      e => e.getBoundingClientRect().right > inside.innerWidth + 0.5).length,
    spilled: [...page.querySelectorAll("td, th")].filter(e => e.scrollWidth > e.clientWidth + 1)
      .map(e => e.textContent),
    images: images.map(i => [i.complete && i.naturalWidth > 0, i.currentSrc.slice(0, 15)]),
    loaded: inside.performance.getEntriesByType("resource").map(e => e.name)
      .filter(name => !name.startsWith("data:")),
    background: style(page.body).backgroundColor,
    inverted: images.map(i => style(i).filter !== "none"),
    last: [...page.querySelectorAll("h2")].map(e => e.textContent).pop(),
  });
});
</script></body></html>
"""


def browse(page: Path, folder: Path, width: int, *more: str) -> tuple[str, list[str]]:
    """The document after loading, and what the console said."""
    profile = folder / f"profile{len(list(folder.iterdir()))}"  # a new one, or two browsers would be one
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={profile}", f"--window-size={width},844", "--enable-logging=stderr"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-dev-shm-usage", "--dump-dom"),
        *(*more, page.resolve().as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probe(page: Path, folder: Path, width: int, *more: str) -> dict:
    """What `FRAME` finds in the page."""
    framed = folder / f"framed-{page.name}"
    framed.write_text(FRAME % (width, html.escape(page.read_text())))
    document, console = browse(framed, folder, 1200, *more)
    assert not console
    match = re.search(r'data-probe="([^"]*)"', document)
    assert match is not None, "the page did not load"
    return json.loads(html.unescape(match[1]))


@pytest.fixture(scope="module")
def page(phantom_dir, drawn_in_module, tmp_path_factory):
    """A page with everything: two methods, long names, images, γ, a site that failed, an unseen one."""
    folder = tmp_path_factory.mktemp("page")
    config = configure(
        find_sites(phantom_dir),
        methods=({"name": "fedrdn", "args": {}}, {"name": "fedfa", "args": {}}),
        **TINY_NETWORK,
        rounds=1,
        batch_size=4,
    )
    results = dict(simulate(phantom_dir, folder / "run", config, engine="inprocess", device="cpu"))
    results["rounds"][0]["missing"] = [
        {"site": "site_D", "task": "train", "reason": "site site_D: " + "/a/very/long/path" * 12}
    ]
    (folder / "run" / "results.json").write_text(json.dumps(results))
    results["config"]["methods"] = [{"name": "fedavg", "args": {}}]
    (folder / "fedavg").mkdir()
    (folder / "fedavg" / "results.json").write_text(json.dumps(results))
    return write_report(
        [folder / "run", folder / "fedavg"], folder / "report.html", data=phantom_dir, device="cpu"
    )
