"""The report in a real browser: at the width of a phone, in light and dark, without a network."""

import pytest
from browser import CHROMIUM, browse, probe
from browser import page as page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: apt-get install chromium")


@pytest.mark.parametrize("width", [360, 390, 1100])
def test_nothing_is_wider_than_the_window(page, tmp_path, width):
    layout = probe(page, tmp_path, width)
    assert layout["width"] == width
    assert layout["scroll"] <= width
    assert layout["beyond"] == []
    assert layout["spilled"] == []
    assert layout["last"] == "Configuration"


def test_every_image_is_shown_and_nothing_is_fetched(page, tmp_path):
    layout = probe(page, tmp_path, 390)
    assert len(layout["images"]) >= 6
    assert all(shown and source.startswith("data:image/") for shown, source in layout["images"])
    assert layout["loaded"] == []


def test_dark_is_dark_and_leaves_pictures_of_patients_as_they_are(page, tmp_path):
    light = probe(page, tmp_path, 390, "--blink-settings=preferredColorScheme=1")
    dark = probe(page, tmp_path, 390, "--blink-settings=preferredColorScheme=0")
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] == "rgb(23, 23, 26)"
    assert not any(light["inverted"])
    photos = [source.startswith("data:image/jpeg") for _, source in dark["images"]]
    assert any(photos)
    assert dark["inverted"] == [not photo for photo in photos]


def test_the_page_as_it_is_says_nothing_on_the_console(page, tmp_path):
    document, console = browse(page, tmp_path, 390)
    assert console == []
    assert "Worst and best case of each site" in document
