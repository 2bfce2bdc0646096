"""From DICOM to a trained model: flat memory, and no identity on the way."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dicom_files import write_slices
from hospitals import Deployment, Hospital
from label_objects import write_segmentation
from planted import plant, values
from running import TINY_OPTIONS

pytestmark = pytest.mark.slow

TRAINING = (
    *("--methods", "fedrdn,fedfa", "--engine", "inprocess", "--rounds", 2, "--local-epochs", 1),
    *(*TINY_OPTIONS, "--device", "cpu", "--threads", 1, "--no-pictures"),
)


def test_no_planted_tag_is_in_jobs_ledgers_and_pages(run, tiny_config, tmp_path):
    rng = np.random.default_rng(0)
    for site in ("site_A", "site_B"):
        names = []
        for number in range(5):
            names.append(f"PLANT02-{site}-{number}")

            def change(header, k, name=names[-1]):
                plant(header)
                header.PatientID = name

            voxels = rng.integers(0, 900, (32, 32, 6)).astype(np.int16)
            mask = np.zeros(voxels.shape, np.uint8)
            mask[8:20, 8:20, 1:5] = 1
            folder = tmp_path / "in" / site / str(number)
            write_segmentation(folder / "seg.dcm", write_slices(folder, voxels, change=change), mask)
        (tmp_path / f"{site}.csv").write_text("PatientID\n" + "\n".join(names) + "\n")
        code, _, err = run(
            *("import", "--folder", tmp_path / "in" / site, "--studies", tmp_path / f"{site}.csv"),
            *("--labels", "seg", "--out", tmp_path / "data" / site, "--state", tmp_path / "own" / site),
        )
        assert code == 0, err
    code, out, err = run("simulate", "--data", tmp_path / "data", "--out", tmp_path / "made/run", *TRAINING)
    assert code == 0, err
    exported = ("export", "--methods", "fedrdn,fedfa", "--out", tmp_path / "made/job", *TINY_OPTIONS)
    job = run(*exported)
    assert job[0] == 0, job
    policy = {"privacy": {"min_images": 3}, "jobs": {"allow_limit": True}}
    sites = [
        Hospital(tmp_path / "made/kits" / name, tmp_path / "data" / name, **policy)
        for name in ("site_A", "site_B")
    ]
    Deployment(sites).run(tiny_config("fedrdn,fedfa", rounds=2))
    ledger = run("site", "ledger", sites[0].kit, "--every")
    assert "fedfa" in ledger[1]
    page = run("report", tmp_path / "made/run", "--out", tmp_path / "made/report.html")
    texts = [(name, text.encode()) for name, text in (("said", out), ("err", err))]
    texts += [("commands", str(one).encode()) for one in (job, ledger, page)]
    for path in [*(tmp_path / "made").rglob("*"), *(tmp_path / "data").rglob("*")]:
        texts.append((str(path), str(path.relative_to(tmp_path)).encode()))
        if path.is_file():
            content = path.read_bytes()
            texts.append((str(path), gzip.decompress(content) if path.suffix == ".gz" else content))
    assert (tmp_path / "made/run/report.html").is_file()
    assert [*(tmp_path / "made/kits").rglob("ledger.sqlite")]
    leaks = {(value, name) for name, text in texts for value in values() if value.encode() in text}
    assert sorted(leaks) == []


_MEASURED = """
from pathlib import Path
from medfedaug.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
# Of this program alone: the one that started it counts in what getrusage says.
(line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
print(line.split()[1])
"""


@pytest.mark.slow  # fifty studies
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_fifty_studies_in_one_call_take_the_memory_of_ten(orthanc, tmp_path):
    shape, per_study = (192, 192, 20), 192 * 192 * 20 * 4 / 2**20  # MiB of float32
    rng = np.random.default_rng(0)
    for number in range(50):
        voxels = rng.integers(0, 900, shape).astype(np.int16)
        called = lambda header, k, n=number: setattr(header, "PatientID", f"FIFTY-{n}")  # noqa: E731
        write_slices(tmp_path / f"in/{number}", voxels, change=called)
    orthanc.put(tmp_path / "in")
    peaks = {}
    for count in (10, 50):
        names = "\n".join(f"FIFTY-{n}" for n in range(count))
        (tmp_path / f"{count}.csv").write_text(f"PatientID\n{names}\n")
        out = tmp_path / f"out{count}/site"
        given = (
            "import",
            "--dicomweb",
            orthanc.dicomweb,
            "--studies",
            tmp_path / f"{count}.csv",
            "--out",
            out,
        )
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED, *map(str, given)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        assert len([*(out / "images").iterdir()]) == count
        assert not [*(tmp_path / f"out{count}/site.state/fetching").iterdir()]
        peaks[count] = int(done.stdout.split()[-1]) / 2**10
    # Forty more studies would be 40 volumes, if they were kept; the headers of their slices are a few MiB.
    assert peaks[50] - peaks[10] < 10 * per_study, peaks
