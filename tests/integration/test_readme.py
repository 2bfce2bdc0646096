"""README: its Python block runs as pasted, and its pasted outputs are what the commands print."""

import ast
import re
import subprocess
import sys
import time

import pytest
from page_blocks import blocks

from medfedaug.config.run import RunConfig
from medfedaug.hospital.privacy.job_log import WAITING, JobEntry, job_hash, summary
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.methods import parse_methods

TEXTS = [block.text for block in blocks("README.md", "text")]


def scores(printed: str) -> dict[str, dict[str, float]]:
    """The Dice of each site, by method, in the lines that the block prints."""
    lines = re.findall(r"^(\w+) (\{.+\})$", printed, re.MULTILINE)
    return {methods: ast.literal_eval(line) for methods, line in lines}


@pytest.mark.slow  # two trainings as they are on the page
def test_the_python_block_runs_as_pasted_and_dice_rises_as_its_output_says(tmp_path):
    (phantom,) = (block.text for block in blocks("README.md", "bash") if "medfedaug phantom" in block.text)
    (code,) = (block.text for block in blocks("README.md", "python"))
    subprocess.run([sys.executable, "-m", *phantom.split()], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    (pasted,) = filter(None, map(scores, TEXTS))
    found = scores(done.stdout)
    assert {name: [*sites] for name, sites in found.items()} == {
        name: [*sites] for name, sites in pasted.items()
    }
    before, after = found.values()
    assert all(after[site] > before[site] + 0.2 for site in before)


def test_the_approval_page_is_what_a_site_prints_of_the_job():
    config = RunConfig(methods=parse_methods("fedrdn"), rounds=50).to_dict()
    page = summary(JobEntry(job_hash(config), config, time.time(), WAITING, {}), SiteSettings())
    (pasted,) = (text for text in TEXTS if text.startswith("Trust"))
    assert [line for line in pasted.splitlines() if line not in page] == []
