"""From DICOM to a trained model: flat memory, and no identity on the way."""

import gzip

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
