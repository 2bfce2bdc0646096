"""Caches in memory and in files follow every change of an image and of its use."""

import json
import os
from pathlib import Path

import benchmark_files
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from benchmark_files import write_prostate
from written_volumes import write_dicom

from medfedaug.config.machine import Machine
from medfedaug.data.images import ImageFolder
from medfedaug.data.preparation import cache
from medfedaug.data.preparation.cache import CaseCache, keep_decoded
from medfedaug.data.volumes import VolumeFolder
from medfedaug.research.datasets.benchmarks import open_benchmark
from medfedaug.tasks import ClassificationTask, SegmentationTask


@pytest.mark.all_layers
def test_slices_of_one_patient_have_label_maps_of_their_own(tmp_path, monkeypatch):
    write = benchmark_files.write_volume

    def write_cone(path: Path, voxels: np.ndarray) -> None:
        if "egmentation" in path.name:
            for z in range(voxels.shape[-1]):
                voxels[..., z] = 0
                voxels[2 : 4 + z, 3:6, z] = 1
        write(path, voxels)

    monkeypatch.setattr(benchmark_files, "write_volume", write_cone)
    write_prostate(tmp_path, patients=20, published=True)
    site = open_benchmark("prostate_mri", tmp_path, split="published")[3]
    cases = site.cases["training"]
    with keep_decoded(2**26):
        sizes = [int(site.load_case(case)[1].sum()) for case in (*cases, *cases)]
    assert sizes == [3 * (2 + case.index) for case in (*cases, *cases)]


def kept(folder: Path, task, site, case) -> dict[str, torch.Tensor]:
    """The case that a new process reads from the folder of a site, or prepares."""
    cache = CaseCache(Machine(0, folder))
    stored = cache.get((task.key, *site.identity(case)), lambda: task.prepared(site, case))
    return {name: stored.read(name) for name in ("image", "label")}


def test_a_label_is_the_place_among_the_classes_of_the_run(make_photos, tmp_path):
    site = ImageFolder.open(make_photos("A"))
    case = next(case for case in site.cases["training"] if case.label == "dog")
    places = [
        int(kept(tmp_path / "kept", ClassificationTask(classes, True), site, case)["label"])
        for classes in (("cat", "dog"), ("cat", "cow", "dog"))
    ]
    assert places == [1, 2]


@pytest.mark.all_layers
@pytest.mark.parametrize("kind", ["dicom", "mhd"])
def test_voxels_that_were_written_anew_in_place_are_read_anew(make_site, tmp_path, kind):
    folder = make_site("A", cases=(1, 1, 1))
    listing = json.loads((folder / "dataset.json").read_text())
    voxels = np.random.default_rng(0).integers(0, 500, (4, 16, 16)).astype(np.int16)
    image = folder / ("series" if kind == "dicom" else "image.mhd")

    def write(values: np.ndarray) -> None:
        if kind == "mhd":
            sitk.WriteImage(sitk.GetImageFromArray(values), image)
        else:
            write_dicom(image, sitk.GetImageFromArray(values))

    write(voxels)
    listing["training"][0]["image"] = image.name
    (folder / "dataset.json").write_text(json.dumps(listing))
    site, task = VolumeFolder.open(folder, check=False), SegmentationTask(2)
    case = site.cases["training"][0]
    unchanged = image if kind == "dicom" else folder / "image.mhd"
    status = unchanged.stat()
    with keep_decoded(2**24):
        first, _ = site.load_image(case), kept(tmp_path / "kept", task, site, case)
        write(voxels + 7)
        os.utime(unchanged, ns=(status.st_atime_ns, status.st_mtime_ns))  # a header of the same second
        np.testing.assert_array_equal(site.load_image(case), first + 7)
        seen = kept(tmp_path / "kept", task, site, case)["image"]
        np.testing.assert_array_equal(seen, (first + 7)[..., 1:3].permute(3, 0, 1, 2))


def test_another_version_prepares_images_anew(tmp_path, monkeypatch):
    def make(value: int) -> int:
        stored = CaseCache(Machine(0, tmp_path)).get(("case",), lambda: {"label": torch.tensor([value])})
        return int(stored.read("label"))

    assert [make(1), make(2)] == [1, 1]
    monkeypatch.setattr(cache, "__version__", "9.9.9", raising=False)
    assert make(3) == 3
