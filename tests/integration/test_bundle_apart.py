"""A bundle in processes that have MONAI and not this package, as its README says."""

import os
import re
import shlex
import subprocess
import sys

import nibabel
import numpy as np
import pytest
from finished_runs import FEW, balanced, simulated
from running import command

ALONE = """
import sys
# What MONAI does not need cannot be imported.
sys.modules.update(dict.fromkeys(["medfedaug", "nvflare", "typer", "SimpleITK", "pydicom"]))
"""


def bash_lines(text: str, start: str) -> list[str]:
    """The commands of a text's blocks that begin with some words, one line each."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(start)]


@pytest.mark.slow
def test_a_process_without_this_package_runs_it_as_the_readme_says(phantom_dir, tmp_path):
    fedrdn = balanced(simulated(phantom_dir, tmp_path / "run", "fedrdn", *FEW), phantom_dir, "site_A")
    (tmp_path / "sitecustomize.py").write_text(ALONE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    bundle, images = tmp_path / "bundle", tmp_path / "images"
    code, _, err = command("bundle", fedrdn, "--out", bundle, "--site", "site_A")
    assert code == 0, err
    images.mkdir()
    for case in sorted((phantom_dir / "site_A").rglob("images*/*.nii.gz"))[:2]:
        (images / case.name).symlink_to(case)
    given = {"BUNDLE": bundle, "IMAGES": images, "PREDICTIONS": tmp_path / "predictions"}
    readme = (bundle / "docs/README.md").read_text()
    lines = bash_lines(readme, "python -m monai.bundle")
    assert [line.split()[3] for line in lines] == ["run", "verify_net_in_out"]
    for line in lines:
        words = line
        for name, path in given.items():
            words = re.sub(rf"\b{name}\b", str(path), words)
        done = subprocess.run(
            [sys.executable, *shlex.split(words)[1:]],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    predicted = tmp_path / "predicted"
    options = ("--model", fedrdn, "--images", images, "--out", predicted)
    assert command("predict", *options, "--site", "site_A", "--device", "cpu")[0] == 0
    for case in images.iterdir():
        label, wanted = (nibabel.load(folder / case.name) for folder in (given["PREDICTIONS"], predicted))
        assert np.array_equal(np.asarray(label.dataobj), np.asarray(wanted.dataobj))
        assert len(np.unique(label.dataobj)) == 2
