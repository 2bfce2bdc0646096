"""A bundle in an environment with MONAI alone, as its README says."""

import os
import re
import shlex
import subprocess
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from finished_runs import balanced
from packaging.requirements import Requirement
from running import TINY_NETWORK, command

from medfedaug.data.sites import find_sites
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure, simulate

EXTRAS = {"fire", "ignite", "nibabel", "pillow", "jsonschema"}


def bash_lines(text: str, start: str) -> list[str]:
    """The commands of a text's blocks that begin with some words, one line each."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(start)]


@pytest.fixture(scope="module")
def federations(phantom_dir, tmp_path_factory) -> Path:
    """A folder with ``data``, ``runs/fedavg`` and ``runs/fedrdn``."""
    root = tmp_path_factory.mktemp("use")
    (root / "data").symlink_to(phantom_dir)
    torch.set_num_threads(1)
    for name in ("fedavg", "fedrdn"):
        config = configure(
            find_sites(phantom_dir),
            methods=tuple(parse_methods(name, None)),
            **TINY_NETWORK,
            rounds=1,
            batch_size=4,
            limit=1,
        )
        simulate(phantom_dir, root / "runs" / name, config, engine="inprocess", device="cpu", report=False)
        balanced(root / "runs" / name, root / "data", "site_A")
    return root


def installed_closure(names: set[str]) -> set[str]:
    """The installed packages that some packages need."""
    closure: set[str] = set()
    pending = [("monai", EXTRAS), *((name, set()) for name in names)]
    while pending:
        name, extras = pending.pop()
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:  # of another platform
            continue
        key = re.sub("[-_.]+", "-", name).lower()
        if key in closure and not extras:
            continue
        closure.add(key)
        for text in needed:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                pending.append((requirement.name, set(requirement.extras)))
    return closure


def environment_with_monai_alone(folder: Path) -> Path:
    """A new environment with links to MONAI and what it needs, and nothing else; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in installed_closure({"setuptools"}):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            source, target = Path(str(distribution(name).locate_file(top))), packages / top
            if source.exists() and not target.exists():
                target.symlink_to(source)
    return folder / "bin/python"


@pytest.mark.slow
def test_a_fresh_environment_with_monai_alone_runs_it_as_the_readme_says(federations, tmp_path):
    python = environment_with_monai_alone(tmp_path / "venv")
    there = "import importlib.util as u; print([n for n in %s if u.find_spec(n)])"
    others = ["medfedaug", "nvflare", "typer", "SimpleITK", "monai", "ignite", "fire"]
    shown = subprocess.run([python, "-I", "-c", there % others], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "['monai', 'ignite', 'fire']"

    bundle, images = tmp_path / "bundle", tmp_path / "images"
    code, _, err = command("bundle", federations / "runs/fedrdn", "--out", bundle, "--site", "site_A")
    assert code == 0, err
    images.mkdir()
    for case in sorted((federations / "data/site_A").rglob("images*/*.nii.gz"))[:2]:
        (images / case.name).symlink_to(case)
    given = {"BUNDLE": bundle, "IMAGES": images, "PREDICTIONS": tmp_path / "predictions"}
    readme = (bundle / "docs/README.md").read_text()
    lines = bash_lines(readme, "python -m monai.bundle")
    assert [line.split()[3] for line in lines] == ["run", "verify_net_in_out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
    for line in lines:
        words = line
        for name, path in given.items():
            words = re.sub(rf"\b{name}\b", str(path), words)
        done = subprocess.run(
            [python, *shlex.split(words)[1:]], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-3000:]

    predicted = tmp_path / "predicted"
    options = ("--model", federations / "runs/fedrdn", "--images", images, "--out", predicted)
    assert command("predict", *options, "--site", "site_A", "--device", "cpu")[0] == 0
    for case in images.iterdir():
        label, wanted = (nibabel.load(folder / case.name) for folder in (given["PREDICTIONS"], predicted))
        assert np.array_equal(np.asarray(label.dataobj), np.asarray(wanted.dataobj))
        assert len(np.unique(label.dataobj)) == 2
