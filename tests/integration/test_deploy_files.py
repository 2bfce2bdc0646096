"""Files of `deploy/` for other machines: image, compose files, service."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage of the Dockerfile, with their arguments."""
    stages_by_name: dict[str, list[tuple[str, str]]] = {}
    for entry in DockerfileParser(str(DEPLOY), cache_content=True).structure:
        if entry["instruction"] == "FROM":
            stages_by_name[entry["value"].split(" AS ")[1]] = []
        elif stages_by_name and entry["instruction"] != "COMMENT":
            list(stages_by_name.values())[-1].append((entry["instruction"], entry["value"]))
    return stages_by_name


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
