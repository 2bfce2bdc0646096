"""Archives that are down, slow, silent, refuse, or send half; and imports that are killed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import nibabel
import numpy as np
import pytest
import requests
from archive_proxy import HALF, SILENT, Fault, proxy_before
from dicom_files import sets, write_slices
from filelock import FileLock
from pydicom.uid import generate_uid

from medfedaug.data.base import SPLITS

COUNT = 5
SECRET = "SECRET-FAIL"


def volume(n):
    return np.random.default_rng(n).integers(-900, 900, (16, 12, 3)).astype(np.int16)


@pytest.fixture(scope="module")
def studies(orthanc, tmp_path_factory):
    """Studies of one patient each, by StudyInstanceUID in the order in which they are asked for."""
    root, uids = tmp_path_factory.mktemp("fail"), []
    for n in range(COUNT):
        uids.append(generate_uid())
        named = sets(PatientID=f"{SECRET}-{n}")
        write_slices(root / str(n), volume(n), study=uids[-1], change=named)
    orthanc.put(root)
    return uids


@pytest.fixture
def proxy(orthanc):
    with proxy_before(orthanc.dicomweb) as started:
        yield started


def arguments(proxy, uids, tmp_path, *more):
    (tmp_path / "studies.csv").write_text("StudyInstanceUID\n" + "\n".join(uids) + "\n")
    options = ("--studies", tmp_path / "studies.csv", "--out", tmp_path / "out/site_A", "--timeout", 10)
    return ("import", "--dicomweb", proxy.url, *options, "--parallel", 1, *more)


def imported(tmp_path):
    """Volumes that are there, by the study that the site's own list says."""
    state = json.loads((tmp_path / "out/site_A.state/studies.json").read_text())
    images = tmp_path / "out/site_A/images"
    return {
        entry["StudyInstanceUID"]: np.asarray(nibabel.load(images / f"{case}.nii.gz").dataobj)
        for case, entry in state["studies"].items()
    }


def assert_whole(tmp_path, uids):
    volumes = imported(tmp_path)
    assert volumes.keys() == {*uids}
    for n, uid in enumerate(uids):
        np.testing.assert_array_equal(volumes[uid], volume(n))
    listed = json.loads((tmp_path / "out/site_A/dataset.json").read_text())
    assert len([row for part in SPLITS for row in listed[part]]) == len(uids)
    assert not [*(tmp_path / "out/site_A.state/fetching").iterdir()]


def failures(text):
    """The lines of failed studies; none of them may name a patient or a UID."""
    assert SECRET not in text
    assert not re.search(r"\d+\.\d+\.\d+\.\d+\.\d+", text), text
    assert "Traceback" not in text
    lines = " ".join(text.split()).split("failed: ")[1:]
    return lines


@pytest.mark.parametrize(("status", "what"), [(429, "/instances"), (500, "/series")])
def test_a_refused_study_costs_itself_in_one_line(run, proxy, studies, tmp_path, status, what):
    # `/instances` refuses to list the objects of a series, `/series` to search for series.
    headers = {"Retry-After": "86400"} if status == 429 else {}
    proxy.faults = [Fault(f"/studies/{studies[1]}/.*{what}|/studies/{studies[1]}{what}", status, headers)]
    code, out, err = run(*arguments(proxy, studies[:3], tmp_path, "--timeout", 2))
    assert code == 1
    (line,) = failures(err)
    failures(out)
    assert str(status) in line
    assert imported(tmp_path).keys() == {studies[0], studies[2]}
    proxy.faults, proxy.asked[:] = [], []
    run.ok(*arguments(proxy, studies[:3], tmp_path))
    assert_whole(tmp_path, studies[:3])
    fetched = {uid for uid in studies for path in proxy.asked if re.search(f"/studies/{uid}/series/", path)}
    assert fetched == {studies[1]}


def test_half_a_series_is_kept_and_the_rest_asked_for_alone(run, proxy, studies, tmp_path):
    listed = requests.get(f"{proxy.url}/studies/{studies[0]}/instances", timeout=60).json()
    *_, broken = sorted(one["00080018"]["Value"][0] for one in listed)
    proxy.faults = [Fault(r"/series/[\d.]+$", HALF), Fault(f"/instances/{broken}$", 500)]
    code, _, err = run(*arguments(proxy, studies[:1], tmp_path))
    assert code == 1
    (line,) = failures(err)
    assert "1 of 3 objects did not come" in line
    (staged,) = (tmp_path / "out/site_A.state/fetching").iterdir()
    assert len([*staged.rglob("*.dcm")]) == 2
    assert not [*staged.rglob("*.part")]
    proxy.faults, proxy.asked[:] = [], []
    assert run(*arguments(proxy, studies[:1], tmp_path))[0] == 0
    assert_whole(tmp_path, studies[:1])
    (fetched,) = [path for path in proxy.asked if re.search(r"/series/[\d.]+(/instances/.*)?$", path)]
    assert fetched.endswith(f"/instances/{broken}")


def test_a_silent_archive_is_given_up_after_three_studies(run, proxy, studies, tmp_path):
    assert run(*arguments(proxy, studies[:1], tmp_path))[0] == 0
    proxy.faults, proxy.asked[:] = [Fault(r"/series/", SILENT)], []
    code, out, err = run(*arguments(proxy, studies, tmp_path, "--timeout", 0.7))
    assert code != 0
    assert failures(out + err) == []
    assert "run the same command again to continue" in " ".join(err.split())
    queried = {uid for uid in studies for path in proxy.asked if f"/studies/{uid}/series/" in path}
    assert queried == {*studies[1:4]}
    proxy.faults = []
    run.ok(*arguments(proxy, studies, tmp_path))
    assert_whole(tmp_path, studies)


def test_an_archive_that_never_answers_is_given_up_at_the_first_study(run, proxy, studies, tmp_path):
    proxy.faults = [Fault("", SILENT)]
    code, _, err = run(*arguments(proxy, studies, tmp_path, "--timeout", 0.2))
    assert code != 0
    assert "does not answer in time" in " ".join(err.split())
    assert len({*proxy.asked}) == 1


def test_objects_of_a_failed_study_go_with_its_patient(run, proxy, studies, tmp_path):
    listed = requests.get(f"{proxy.url}/studies/{studies[1]}/instances", timeout=60).json()
    *_, broken = sorted(one["00080018"]["Value"][0] for one in listed)
    proxy.faults = [Fault(f"/studies/{studies[1]}/series/[\\d.]+$", 500), Fault(f"/instances/{broken}$", 500)]
    assert run(*arguments(proxy, studies[:2], tmp_path))[0] == 1
    state = tmp_path / "out/site_A.state"
    assert len([*state.rglob("*.dcm")]) == 2
    (tmp_path / "gone.csv").write_text(f"PatientID\n{SECRET}-1\n")
    output = run.ok("import", "--withdraw", tmp_path / "gone.csv", "--out", tmp_path / "out/site_A")
    assert "0 cases" in output
    assert [*state.rglob("*.dcm")] == []
    proxy.faults = []
    code, _, err = run(*arguments(proxy, studies[:2], tmp_path))
    assert code == 1
    assert "withdrawn" in err
    assert imported(tmp_path).keys() == {studies[0]}


def test_a_dimse_archive_that_is_silent_is_given_up(run, tmp_path):
    (tmp_path / "studies.csv").write_text("PatientID\n1\n2\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"PACS@127.0.0.1:{silent.getsockname()[1]}"
        options = ("--studies", tmp_path / "studies.csv", "--out", tmp_path / "site", "--timeout", 0.3)
        code, _, err = run("import", "--dimse", address, *options)
    assert code != 0
    assert "cannot be reached" in err
    assert len(err.strip().splitlines()) == 1


def test_objects_of_a_series_that_did_not_come_are_asked_for_until_the_archive_is_silent(
    run, proxy, studies, tmp_path
):
    proxy.faults = [Fault(r"/series/[\d.]+$", 500), Fault("/instances/", SILENT)]
    code, _, err = run(*arguments(proxy, studies[:1], tmp_path, "--timeout", 0.7))
    assert code == 1
    assert "3 of 3 objects did not come" in failures(err)[0]
    assert len({path for path in proxy.asked if re.search("/instances/.", path)}) == 1


def test_two_imports_do_not_write_to_one_folder(run, proxy, studies, tmp_path):
    with FileLock(tmp_path / "out/site_A.state/import.lock"):
        code, _, err = run(*arguments(proxy, studies[:1], tmp_path))
    assert code != 0
    assert "another import writes to it" in " ".join(err.split())
    assert run(*arguments(proxy, studies[:1], tmp_path))[0] == 0


@pytest.mark.slow
def test_a_killed_import_goes_on_without_loss(run, proxy, studies, tmp_path):
    objects = 4
    # No answer but single objects, each late: so the process is killed in the middle of a study.
    proxy.faults = [Fault(r"/series/[\d.]+$", 500), Fault(r"/instances/[\d.]+$", 0.4)]
    call = arguments(proxy, studies, tmp_path, "--timeout", 20)
    process = subprocess.Popen(
        [sys.executable, "-m", "medfedaug", *map(str, call)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    fetching = tmp_path / "out/site_A.state/fetching"
    images = tmp_path / "out/site_A/images"

    def came():
        # By `os.walk`, which passes over folders that go in the meantime.
        names = [name for folder in (images, fetching) for _, _, files in os.walk(folder) for name in files]
        return sum(3 * name.endswith(".nii.gz") + name.endswith(".dcm") for name in names)

    end = time.monotonic() + 120
    while came() < objects and time.monotonic() < end:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = came()
    assert objects <= before < 3 * COUNT
    assert not (tmp_path / "out/site_A/dataset.json").exists()
    proxy.faults, proxy.asked[:] = [], []
    run.ok(*call)
    assert_whole(tmp_path, studies)
