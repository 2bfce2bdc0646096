"""The blocks of code on the pages, and the same commands on small data with few rounds."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from running import TINY_AXES, TINY_NETWORK, TINY_OPTIONS, command

import medfedaug as mfa

ROOT = Path(__file__).resolve().parents[2]
REMARK = re.compile(r"<!-- (?P<kind>no block is run|not run|run by):? (?P<text>.+?) -->")
NOTHING = {"kind": "", "text": ""}
QUICK = {
    "simulate": ("--engine", "inprocess", "--device", "cpu", "--rounds", "1", "--no-report"),
    "benchmark": ("--seeds", "1", "--no-pictures"),
    "phantom": ("--patients", "3"),
    "predict": ("--device", "cpu"),
    "evaluate": ("--device", "cpu"),
}
"""Options that a command is given besides those of its page."""
FEWER = {"--seeds", "--folds", "--rounds"}
"""Options of a page that take the most time, and are left out above `MANY`."""
MANY = 3
OWN_NETWORK = ("--network", "--network-args", "--bundle", "--loop")
UNDONE = (["site", "doctor", "hospital-a"], ["init", "hospital-a"])
"""Commands that end with 1: a hospital's data are not here, and nobody answers the question."""
SHORT = {"rounds": 1, "engine": "inprocess", "device": "cpu", "report": False, **TINY_NETWORK}
"""Settings that `mfa.simulate` is given besides those of its page."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Args:
        language: behind its fence.
        text: the code.
        line: of the page.
        kind: ``"not run"`` or ``"run by"`` where the page's source says so before the block, and
            ``"no block is run"`` where it says so of the whole page; else empty.
        remark: the reason, or the test that runs it.
    """

    language: str
    text: str
    line: int
    kind: str = ""
    remark: str = ""


def blocks(page: Path | str, *languages: str, section: str = "") -> Iterator[Block]:
    """Return the blocks of a page; of some languages alone, or of a section, where they are named."""
    before = whole = NOTHING
    title = heading = ""
    for token in MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type == "fence":
            language = token.info.strip()
            if (not languages or language in languages) and (not section or section == title):
                state = before if before["kind"] else whole
                yield Block(language, token.content, token.map[0] + 1, state["kind"], state["text"])
        elif token.type == "heading_open":
            heading = token.tag
        elif token.type == "inline" and heading:
            title, heading = (token.content if heading == "h2" else title), ""
        remark = REMARK.search(token.content) if token.type == "html_block" else None
        before = remark.groupdict() if remark else NOTHING
        whole = before if before["kind"] == "no block is run" else whole


def commands(text: str) -> Iterator[list[str]]:
    """Return the words of each line of a shell, with continued lines joined and without remarks."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def quick(words: Sequence[str]) -> list[str]:
    """Return a command of ours with less to compute."""
    kept = list(words)
    for option in FEWER & set(kept):
        place = kept.index(option)
        if int(kept[place + 1]) > MANY:
            del kept[place : place + 2]
    own = set(OWN_NETWORK) & set(kept)
    if kept[0] == "benchmark":
        kept = [word for word in kept if not word.startswith(("rounds=", "network="))]
        if "--set" not in kept:
            kept.append("--set")
        place = kept.index("--set") + 1
        kept[place:place] = ["rounds=1", *(() if own else TINY_AXES)]
    elif kept[0] in ("simulate", "plan") and not own:
        kept += TINY_OPTIONS
    return [*kept, *QUICK.get(kept[0], ())]


def run_shell(text: str, patch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Run the lines of a shell in this process and folder; returns our commands with their output."""
    done = []
    for words in commands(text):
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            patch.setenv(*words.pop(0).split("=", 1))
        words = [name for word in words for name in (sorted(glob(word)) or [word])]
        if words[0] == "medfedaug":
            code, out, err = command(*quick(words[1:]))
            assert code == 0 or words[1:] in UNDONE, (words, out[-800:], err[-800:])
            done.append((words[1:], out))
        elif words[:2] == ["pip", "install"]:
            if Path(words[2]).is_dir():  # other packages are those of this environment
                options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", "site-packages")
                subprocess.run([sys.executable, "-m", *words, *options], check=True)
                patch.syspath_prepend(str(Path("site-packages").resolve()))
        else:
            subprocess.run(words, check=True)
    return done


def run_python(text: str, names: dict[str, object], patch: pytest.MonkeyPatch) -> None:
    """Run Python in this process and folder, with short runs of `mfa.simulate`."""
    simulate = mfa.simulate
    with patch.context() as short:
        short.setattr(mfa, "simulate", lambda *args, **more: simulate(*args, **{**more, **SHORT}))
        exec(compile(text, "page", "exec"), names)


def shell(page: Path | str, section: str = "") -> str:
    """Return the lines of a page, or of a section, that run."""
    return "\n".join(block.text for block in blocks(page, "bash", section=section) if not block.kind)


def carry_out(page: Path | str, patch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Run all blocks of a page that its source does not except; returns our commands with their output."""
    done: list[tuple[list[str], str]] = []
    names: dict[str, object] = {}
    for block in blocks(page, "bash", "python"):
        if block.kind:
            continue
        if block.language == "bash":
            done += run_shell(block.text, patch)
        else:
            run_python(block.text, names, patch)
    return done
