"""Names of hooks and flags before 0.3 are refused: ignored, they would let more leave a site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from medfedaug.errors import ConfigError
from medfedaug.methods import Aggregator, Method, SiteExchange, SitePart

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
CLASSES = {cls.__name__: cls for cls in (Aggregator, Method, SiteExchange, SitePart)}
NAMES = re.findall(r"^\| `(\w+)\.(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("cls", "name"), [pair for pair in NAMES if pair[0] in CLASSES])
def test_a_class_with_an_old_name_is_refused_in_one_line(cls, name):
    with pytest.raises(ConfigError, match=f"^Own: {name} has another name since 0.3"):
        type("Own", (CLASSES[cls],), {name: True})


def test_the_page_has_every_old_name():
    known = {(cls, name) for cls, result in CLASSES.items() for name in result._old}
    assert {pair for pair in NAMES if pair[0] in CLASSES} == known
