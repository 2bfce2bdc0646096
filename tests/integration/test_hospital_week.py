"""A hospital's week, with real kits and a real archive: every step's message, and what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import nibabel
import numpy as np
import pytest
import requests
from dicom_files import write_slices
from imports import Site, write_outline
from reboot_parts import Deployment
from rehearsal_processes import left_running
from rehearsed_hospitals import HOSPITALS
from running import TINY_OPTIONS

from medfedaug.data.base import SPLITS

pytest.importorskip("highdicom", reason="pip install 'medfedaug[pacs]'")

OURS, OTHERS = HOSPITALS[:2]
OUTLINES = ("--labels", "seg", "--segments", "lesion=lesion", "--classes", "background,lesion")
CHOSEN = (*OUTLINES, "--label-series", "newest")
DATES = {"first": "20260105", "second": "20260106", "corrected": "20260108"}


class Hospital(Site):
    """A hospital with an archive: its patients are phantoms, whom readers have outlined."""

    def __init__(self, run, orthanc, folder: Path, name: str) -> None:
        folder.mkdir()
        super().__init__(run, folder, ("--dicomweb", orthanc.dicomweb), name)
        self.orthanc = orthanc
        self.files: dict[str, list[Path]] = {}
        self.masks: dict[str, np.ndarray] = {}

    def scan(self, phantom: Path) -> None:
        """Send the volumes of a phantom's site to the archive, as slices."""
        listed = json.loads((phantom / "dataset.json").read_text())
        for number, row in enumerate(row for part in SPLITS for row in listed[part]):
            patient = f"{self.name}-{number:02d}"
            image, label = (nibabel.load(phantom / row[kind]) for kind in ("image", "label"))
            voxels = np.asarray(image.dataobj)
            low, high = float(voxels.min()), float(voxels.max())
            stored = np.rint((voxels - low) / (high - low) * 2000).astype(np.int16)
            self.files[patient] = write_slices(
                self.root / "scanner" / patient,
                stored,
                edges=tuple(map(float, image.header.get_zooms()[:3])),
                change=lambda header, k, patient=patient: setattr(header, "PatientID", patient),
            )
            self.masks[patient] = np.asarray(label.dataobj).astype(np.uint8)
        self.orthanc.put(self.root / "scanner")

    def outline(self, patient: str, mask: np.ndarray, when: str) -> None:
        """A reader outlines a patient."""
        path = self.root / f"{patient}-{when}.dcm"
        self.orthanc.put(write_outline(path, self.files[patient], {"Lesion": mask}, DATES[when], when))

    @property
    def patients(self) -> list[str]:
        return sorted(self.files)

    def modalities(self) -> dict[str, int]:
        """Numbers of the archive's series by modality, of this hospital's patients."""
        counts: dict[str, int] = {}
        query = {"Level": "Series", "Query": {"PatientID": f"{self.name}-*"}, "Expand": True}
        for one in requests.post(f"{self.orthanc.url}/tools/find", json=query, timeout=60).json():
            modality = one["MainDicomTags"]["Modality"]
            counts[modality] = counts.get(modality, 0) + 1
        return counts


def scheduled(system: Deployment, name: str) -> tuple[Path, Mapping]:
    """A job from its export to its results, at all hospitals."""
    job = system.submit(system.export(name, "fedrdn", "--classes", "background,lesion"))
    system.wait(job)
    folder = system.collect(job)
    return folder, json.loads((folder / "results.json").read_text())


def data_hashes(run, hospitals: list[Hospital], root: Path) -> dict[str, str]:
    """Hashes of the sites' files, as the results of a simulation over their folders have them."""
    root.mkdir()
    for one in hospitals:
        (root / one.name).symlink_to(one.out)
    code, _, err = run(
        *("simulate", "--data", root, "--methods", "fedavg", "--out", root.with_name(f"{root.name}_run")),
        *("--engine", "inprocess", "--rounds", 1, "--threads", 1, "--no-report", *TINY_OPTIONS),
    )
    assert code == 0, err
    results = json.loads((root.with_name(f"{root.name}_run") / "results.json").read_text())
    return results["files"]


@pytest.mark.slow
def test_a_week(orthanc, run, tmp_path):
    with Deployment(tmp_path / "work", hospitals=(OURS, OTHERS)) as system:
        system.request_kits()
        system.make_data()
        phantoms, ours, other = (
            system.data,
            *(Hospital(run, orthanc, tmp_path / name, name) for name in (OURS, OTHERS)),
        )
        for one in (ours, other):
            one.scan(phantoms[one.name])
            for patient in one.patients[1:]:
                one.outline(patient, one.masks[patient], "first")
        bare, twice, wrong, leaves = ours.patients[:4]
        other.outline(other.patients[0], other.masks[other.patients[0]], "first")
        ours.outline(twice, np.roll(ours.masks[twice], 2, axis=0), "second")

        # Monday: the import. Two readers of one patient are a choice, and one patient has no outline.
        out = ours.load(ours.patients, *OUTLINES, code=1)
        assert (
            "has 2 outlines, in 2 series, of lesion; choose with --label-series UID, REGEX or newest" in out
        )
        assert "it has no SEG" in out
        assert "16 of 18 studies in" in out
        out = ours.load(ours.patients, *CHOSEN, code=1)
        assert "the newest of 2 outlines, in 2 series, of lesion" in out
        assert "17 of 18 studies in" in out
        assert "classes: 0 background, 1 lesion" in out
        assert "patients: 11 training, 3 validation, 3 test" in out
        assert "fewer than 10 patients in validation, test: with the default policy" in out
        np.testing.assert_array_equal(ours.label(twice), np.roll(ours.masks[twice], 2, axis=0))
        assert "18 of 18 studies in" in other.load(other.patients, *CHOSEN)

        # Tuesday: the kits train together on what was imported.
        system.data = {one.name: one.out for one in (ours, other)}
        system.configure(only_ours=True, forbid_code=True)
        system.start_kits()
        folder, results = scheduled(system, "tuesday")
        assert set(results["test"]["sites"]) == {OURS, OTHERS}
        assert "fedrdn" in system.medfedaug("ledger", system.kit(OURS))

        # Wednesday: the model's predictions are stored, and none of them becomes ground truth.
        before = ours.modalities()
        predict = ("predict", "--model", folder, "--site", OURS, *ours.source, "--store", "--rtstruct")
        predict += ("--data", ours.out, "--studies", ours.root / "studies.csv", "--no-previews")
        code, out, err = run(*predict, "--out", tmp_path / "predicted")
        assert code == 0, err
        assert "stored 36 objects of 18 studies" in " ".join(out.split())
        assert ours.modalities() == {**before, "SEG": before["SEG"] + 18, "RTSTRUCT": 18}
        labels = {patient: ours.label(patient) for patient in ours.patients[1:]}
        for options in ((), ("--refresh",)):
            out = ours.load(ours.patients, *CHOSEN, *options, code=1)
            assert "changed in the archive" not in out
            assert "it has no SEG but 1 series that were left out" in out
            assert "17 of 18 studies in" in out
        for patient, label in labels.items():
            np.testing.assert_array_equal(ours.label(patient), label)
        assert bare not in ours.entries

        # Thursday: a reader corrects an outline, and the next job has other data.
        hashes = data_hashes(run, [ours, other], tmp_path / "before")
        mask = np.roll(ours.masks[wrong], 3, axis=1)
        ours.outline(wrong, mask, "corrected")
        case = ours.entries[wrong]["case"]
        out = ours.load(ours.patients, *CHOSEN, code=1)
        assert f"changed in the archive: {case}: new SEG series" in out
        assert "1 of the studies changed in the archive; --refresh takes them again" in out
        np.testing.assert_array_equal(ours.label(wrong), labels[wrong])
        out = ours.load(ours.patients, *CHOSEN, "--refresh", code=1)
        assert f"refreshed: {case}: version 2; the earlier one is in" in out
        np.testing.assert_array_equal(ours.label(wrong), mask)
        assert ours.rows[case]["version"] == 2
        now = data_hashes(run, [ours, other], tmp_path / "after")
        assert now[OTHERS] == hashes[OTHERS]
        assert now[OURS] != hashes[OURS]
        _, results = scheduled(system, "thursday")
        assert set(results["test"]["sites"]) == {OURS, OTHERS}

        # Friday: a patient withdraws. Nothing of the case is left, and no command takes it again.
        case = ours.entries[leaves]["case"]
        gone = tmp_path / "gone.csv"
        gone.write_text(f"PatientID\n{leaves}\n")
        code, out, err = run("import", "--withdraw", gone, "--out", ours.out)
        assert code == 0, err
        assert "1 case" in out
        assert "1 patient withdrawn" in out
        out = ours.load(ours.patients, *CHOSEN, "--keep-versions", 0, code=1)
        assert f"failed: {case}: the patient was withdrawn" in out
        assert "16 of 18 studies in" in out
        left = [path for root in (ours.out, ours.state) for path in root.rglob("*")]
        assert not [path for path in left if case in path.name or path.parent.name == "previous"]
        code, out, err = run(*predict, "--out", tmp_path / "again")
        assert code == 1
        assert f"{case}: the patient was withdrawn" in " ".join((out + err).split())
        system.stop_kits()
    assert left_running(tmp_path) == []
    events = [*tmp_path.rglob("events.jsonl")]
    assert events
    assert not [path for path in events if f"{OURS}-0" in path.read_text()]
