"""Files of `deploy/` for other machines: image, compose files, service, kits for other launchers, wheels."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from tried_versions import pins, tried

from medfedaug.nvflare_jobs.kit.kit import open_kit

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SITE = "hospital-a"


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage of the Dockerfile, with their arguments."""
    stages_by_name: dict[str, list[tuple[str, str]]] = {}
    for entry in DockerfileParser(str(DEPLOY), cache_content=True).structure:
        if entry["instruction"] == "FROM":
            stages_by_name[entry["value"].split(" AS ")[1]] = []
        elif stages_by_name and entry["instruction"] != "COMMENT":
            list(stages_by_name.values())[-1].append((entry["instruction"], entry["value"]))
    return stages_by_name


# ------------------------------------------------------------------ image


def test_the_image_has_the_versions_that_were_tried():
    torch = {name: re.findall(r"torch==([\d.]+\d)", str(stages()[name])) for name in ("cpu", "cuda")}
    by_build = {row["PyTorch"].split(", ")[1].split()[0]: row["PyTorch"].split(",")[0] for row in tried()[:2]}
    assert torch == {"cpu": [by_build["CPU"]], "cuda": [by_build["CUDA"]]}
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(rf"^ARG PYTHON={re.escape(tried()[0]['Python'])}\.\d+-slim-\w+$", text, re.M)
    newest = tried()[0]
    pinned = pins("deploy/constraints.txt")
    for name in ("MONAI", "NumPy", "nibabel", "NVFlare"):
        assert f"{pinned[name.lower()]}.".startswith(f"{newest[name]}."), name


def test_constraints_pin_every_requirement_of_the_package_within_its_bounds():
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    bounds = [Requirement(text) for text in re.findall(r'^    "(.+?)"', listed[1], re.M)]
    pinned = pins("deploy/constraints.txt")
    assert len(bounds) > 10
    for bound in bounds:
        if bound.name != "torch":  # whose builds differ by stage
            assert bound.specifier.contains(pinned[bound.name.lower()]), bound


def test_the_image_runs_as_nobody_in_particular_and_copies_what_exists():
    by_stage = stages()
    for name in ("cpu", "cuda"):
        users = [value for instruction, value in by_stage[name] if instruction == "USER"]
        assert users == ["10001"], "the last user of the image"
        assert [entry for entry in by_stage[name] if entry[0] != "CMD"][-1] == ("USER", "10001")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for instruction, value in (entry for entries in by_stage.values() for entry in entries):
        assert instruction != "ADD"
        if instruction == "COPY" and "--from" not in value:
            *sources, _ = [part for part in value.split() if not part.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, f"{source} does not reach the engine"


def test_compose_files_use_stages_of_the_image_and_let_no_service_have_more_than_it_needs():
    files = {path.name: yaml.safe_load(path.read_text()) for path in DEPLOY.glob("compose.*.yml")}
    assert len(files) == 4
    for name, content in files.items():
        for service in content["services"].values():
            assert service["build"]["target"] in stages()
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
            if name == "compose.gpu.yml":
                continue  # an addition to another file
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["user"].startswith("${KIT_UID:?")
    site = files["compose.site.yml"]["services"]["site"]
    assert any(volume.endswith(":/data:ro") for volume in site["volumes"])
    for service in (site, files["compose.server.yml"]["services"]["server"]):
        for part in ("startup", "local"):
            assert f"${{KIT}}/{part}:/kit/{part}:ro" in service["volumes"]
    assert "ports" not in site, "nobody connects to a hospital"


# ------------------------------------------------------------------ service


def test_the_service_is_one_that_systemd_can_read(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd is not installed")
    unit = (DEPLOY / "medfedaug@.service").read_text()
    # Paths of the page, which this machine does not have.
    script = shutil.copy(DEPLOY / "start-kit", tmp_path)
    unit = unit.replace("/opt/medfedaug/bin/start-kit", str(script))
    path = tmp_path / "medfedaug@.service"
    path.write_text(unit)
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert not [line for line in done.stderr.splitlines() if "medfedaug@" in line]


# ------------------------------------------------------------------ other launchers


@pytest.mark.slow  # processes of NVFlare
@pytest.mark.parametrize(
    ("runtime", "launcher"),
    [
        ("docker", "ClientDockerJobLauncher"),
        ("k8s", "ClientK8sJobLauncher"),
        ("slurm", "ClientSlurmJobLauncher"),
    ],
)
def test_a_kit_that_is_prepared_and_then_configured_keeps_both(kits, tmp_path, run, runtime, launcher):
    """`deploy prepare` throws away what `site configure` wrote before it; afterwards, each keeps its own."""
    settings = yaml.safe_load((DEPLOY / "prepare" / f"{runtime}.yaml").read_text())
    config, prepared = tmp_path / "config.yaml", tmp_path / "prepared"
    config.write_text(yaml.safe_dump(settings))
    assert run("site", "configure", kits / SITE, "--only-medfedaug", "--forbid-code")[0] == 0
    subprocess.run(
        [
            sys.executable,
            "-m",
            "nvflare.cli",
            "deploy",
            "prepare",
            kits / SITE,
            "--config",
            config,
            "--output",
            prepared,
        ],
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
    )
    kit = open_kit(prepared)
    assert kit.lacking_components(), "as the page says: configure after this"
    (path,) = kit.launchers()
    assert path.endswith(launcher)

    code, _, err = run("site", "configure", prepared, "--only-medfedaug", "--forbid-code")
    assert code == 0, err
    assert kit.launchers() == [path]
    assert not kit.lacking_components()
    resources = json.loads((prepared / "local/resources.json").read_text())
    assert "medfedaug.nvflare_jobs.job.executor.SiteExecutor" in resources["class_allow_list"]
    assert len(resources["class_allow_list"]) < 10, "NVFlare's other classes are gone"
    _, printed, _ = run("site", "doctor", prepared, "--offline")
    assert "not ours" in re.sub(r"[\s│]+", " ", printed)


# ------------------------------------------------------------------ wheels


def wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel that pip can install."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "here = True\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow  # pip, in processes
def test_pip_installs_the_wheels_of_a_wheelhouse_and_refuses_one_that_was_exchanged(tmp_path):
    house = tmp_path / "house"
    house.mkdir()
    path = wheel(house, "carried", "1.0")
    script = [sys.executable, DEPLOY / "wheelhouse.py", house]
    assert "1 wheels" in subprocess.run(script, capture_output=True, text=True, check=True).stdout
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", house]
    install += ["--require-hashes", "-r", house / "requirements.txt", "--target"]
    subprocess.run([*install, tmp_path / "there"], check=True, capture_output=True)
    assert (tmp_path / "there/carried.py").is_file()
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=house, check=True, capture_output=True)

    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more.py", "")
    done = subprocess.run([*install, tmp_path / "elsewhere"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "elsewhere/carried.py").exists()

    wheel(house, "carried", "2.0")
    assert "two versions of carried" in subprocess.run(script, capture_output=True, text=True).stderr
    (house / "carried-2.0-py3-none-any.whl").unlink()
    (house / "other-1.0.tar.gz").touch()
    assert "not a wheel" in subprocess.run(script, capture_output=True, text=True).stderr


# ------------------------------------------------------------------ pages
