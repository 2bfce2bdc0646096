"""Small data that every test may read and none may change."""

import gc

# PyTorch and MONAI make a million objects that live until the end: no collection looks at them, now or later.
gc.disable()

import base64
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import psutil
import pytest
import reference
import torch
from benchmark_files import OFFICE, write_fedbn, write_site
from finished_runs import FEW, balanced, simulated
from matplotlib.figure import Figure
from orthanc import running_orthanc
from PIL import Image
from running import TINY_NETWORK, command

from medfedaug.analysis import page
from medfedaug.config import bundle_reference as content
from medfedaug.config.run import RunConfig
from medfedaug.data.phantom import make_phantom
from medfedaug.data.preparation.cache import keep_decoded
from medfedaug.data.sites import find_sites
from medfedaug.methods import parse_methods, registry
from medfedaug.metrics.registry import METRICS
from medfedaug.models import networks
from medfedaug.simulate import configure
from medfedaug.utils import plugins

gc.freeze()
gc.enable()
gc.set_threshold(200_000, 20, 100)

pytest_plugins = ["results"]  # runs that tests of the analysis read
_draw_curve = page._svg
_process, _memory = psutil.Process(), {"limit": 0}
_LITTER = 200 * 2**20
"""Bytes by which a process grows before it looks for what nobody uses."""


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Bit-identical results need the same number of threads everywhere, and tests share two cores.

    Of the session, so that it comes before what a module prepares for its tests.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _plain_convolutions():
    """PyTorch's own convolutions: for networks as small as the tests' they need half of oneDNN's time."""
    torch.backends.mkldnn.enabled = False


def _undrawn(drawing: Figure) -> str:
    """A picture without content, as large as the drawing."""
    size = 'width="{}in" height="{}in"'.format(*drawing.get_size_inches())
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" {size}/>'
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


@pytest.fixture(autouse=True, scope="session")
def _curves_on_paper():
    """Curves are made and not drawn, which takes longer than all else of a page; see `drawn`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_svg", _undrawn)
        yield


def _drawing():
    """Curves are drawn, as everywhere but in tests: for those that look at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_svg", _draw_curve)
        yield


drawn = pytest.fixture(_drawing, name="drawn")


@pytest.fixture(autouse=True)
def _memory_as_before():
    """Models that refer to each other in circles wait for a collection, which counts objects and no bytes."""
    yield
    if _process.memory_info().rss > _memory["limit"]:
        gc.collect()
        _memory["limit"] = _process.memory_info().rss + _LITTER


@pytest.fixture(scope="module")
def onednn():
    """oneDNN's convolutions, as processes that a test starts have them: for results equal to the last bit."""
    torch.backends.mkldnn.enabled = True
    yield
    torch.backends.mkldnn.enabled = False


@pytest.fixture(autouse=True, scope="session")
def _decoded_once():
    """Images that many tests read are decoded once, as in `benchmark`; a file that is written anew is not."""
    with keep_decoded(2**28):
        yield


@pytest.fixture(autouse=True)
def _threads_as_before():
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _metrics_as_before():
    """A metric that a Bundle or a record brought along stays known to its process, not to the next test."""
    before = dict(METRICS)
    yield
    METRICS.clear()
    METRICS.update(before)


@pytest.fixture(autouse=True)
def _allowed_as_before(monkeypatch):
    """Keep a site's limits on its process, which last until it ends, from other tests."""
    monkeypatch.setattr(content, "_named", dict(content._named))
    yield
    content.restrict(None)
    plugins.restrict(None)


@pytest.fixture
def run():
    return command


@pytest.fixture(scope="session")
def phantom_dir(tmp_path_factory) -> Path:
    """Three phantom sites of five patients; the third is test only, an unseen site."""
    root = tmp_path_factory.mktemp("phantom") / "data"
    sites = make_phantom(root, sites=3, patients=5, shape=(32, 32, 6), seed=0)
    listing = sites[2] / "dataset.json"
    content = json.loads(listing.read_text())
    content["test"] = content["test"] + content["training"]
    content["training"] = content["validation"] = []
    listing.write_text(json.dumps(content))
    return root


@pytest.fixture(scope="session")
def model(tmp_path_factory, phantom_dir) -> Path:
    """A run over slices that normalises nothing; half of the voxels of site_C are lesion. Tests copy it."""
    out = tmp_path_factory.mktemp("model") / "run"
    return balanced(simulated(phantom_dir, out, "fedavg", *FEW), phantom_dir, "site_C")


@pytest.fixture(scope="session")
def fedbn_model(tmp_path_factory, phantom_dir) -> Path:
    """A run over slices whose norm layers stay at the sites. Tests copy it."""
    return simulated(phantom_dir, tmp_path_factory.mktemp("fedbn_model") / "run", "fedbn", *FEW)


@pytest.fixture(scope="session")
def orthanc(tmp_path_factory):
    """An archive for all tests of a session; each puts in patients and studies of its own."""
    with running_orthanc(tmp_path_factory.mktemp("orthanc")) as archive:
        yield archive


@pytest.fixture(scope="session")
def tiny_config():
    """A run that takes seconds: `tiny_config("fedrdn,fedfa", rounds=2)`."""

    def make(methods: str = "fedavg", **changes) -> RunConfig:
        settings = changes.pop("settings", None)
        values = {**TINY_NETWORK, "rounds": 2, "batch_size": 4, **changes}
        return RunConfig(methods=tuple(parse_methods(methods, settings)), **values)

    return make


@pytest.fixture
def make_photos(tmp_path):
    """Write a site of small photographs of cats and dogs: `make_photos("A", per_class=5)`."""

    def make(name: str, per_class: int = 5, size: int = 40) -> Path:
        folder = tmp_path / "photos" / name
        rng = np.random.default_rng(sum(name.encode()))
        for label in ("cat", "dog"):
            (folder / label).mkdir(parents=True)
            for index in range(per_class):
                pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / label / f"{index}.png")
        return folder

    return make


@pytest.fixture
def photo_config(make_photos, tmp_path):
    """A classification run over three sites of small photographs: `photo_config("fraug", rounds=2)`."""
    for name in "ABC":
        make_photos(name, per_class=5)

    def make(methods: str = "fedavg", settings=None, **changes) -> RunConfig:
        values = {"network": "lenet5", "rounds": 2, "batch_size": 3, **changes}
        sites = find_sites(tmp_path / "photos")
        return configure(sites, methods=tuple(parse_methods(methods, settings)), **values)

    return make


@pytest.fixture
def federate(make_photos, tmp_path, monkeypatch):
    """A run of `reference.Federation`: `federate("scaffold", plan=[("A", "B"), ("A",)], rounds=2)`.

    ``sizes`` are the photographs of each class by site: of five, three train. ``folder`` has sites that are
    there already, in place of them.
    """
    for name, network in reference.NETWORKS.items():
        monkeypatch.setitem(networks._NETWORKS, name, network)
    monkeypatch.setitem(registry._BUILT_IN, reference.Recorder.name, reference.Recorder)

    def run(
        methods, plan=None, sizes=None, settings=None, states=None, folder=None, **changes
    ) -> reference.Federation:
        sizes = sizes or {"A": 5, "B": 10, "C": 15}
        for name, per_class in sizes.items():
            if folder is None and not (tmp_path / "photos" / name).exists():
                make_photos(name, per_class, size=8)
        folder = folder or tmp_path / "photos"
        values = {
            "network": "reference_convolutional",
            "rounds": 3,
            "batch_size": 6,
            "learning_rate": 0.05,
            "max_share": 1.0,  # the papers' means are by samples
            **changes,
        }
        chosen = tuple(parse_methods(f"{reference.Recorder.name},{methods}", settings))
        config = configure(find_sites(folder), methods=chosen, **values)
        with reference.Draws():
            return reference.Federation(config, folder, list(sizes), plan, states)

    return run


@pytest.fixture
def make_site(tmp_path):
    """Write a site of random volumes: `make_site("A", channels=2, shape=(16, 16, 4))`."""

    def make(
        name: str, channels: int = 1, shape=(16, 16, 4), cases=(2, 1, 1), root: Path | None = None
    ) -> Path:
        return write_site((root or tmp_path / "data") / name, channels, shape, cases)

    return make


@pytest.fixture
def make_pictures(tmp_path):
    """Write a site of small photographs with label images: `make_pictures("A", channels=3, bits=8)`."""

    def make(
        name: str,
        channels: int = 3,
        size=(24, 20),
        cases=(2, 1, 1),
        constant: int | None = None,
        bits: int = 8,
    ) -> Path:
        folder = tmp_path / "pictures" / name
        rng = np.random.default_rng(sum(name.encode()))
        content: dict = {"labels": {"0": "background", "1": "lesion"}}
        for kind in ("images", "labels"):
            (folder / kind).mkdir(parents=True)
        index = 0
        for split, count in zip(("training", "validation", "test"), cases, strict=True):
            content[split] = []
            for _ in range(count):
                dtype = np.uint8 if bits == 8 else np.uint16
                pixels = rng.integers(0, 2**bits, (size[1], size[0], channels)).astype(dtype)
                if constant is not None:
                    pixels[..., constant] = 0
                Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(
                    folder / f"images/{index}.png"
                )
                label = np.zeros((size[1], size[0]), np.uint8)
                label[3:9, 4:12] = 1
                Image.fromarray(label).save(folder / f"labels/{index}.png")
                content[split].append({"image": f"images/{index}.png", "label": f"labels/{index}.png"})
                index += 1
        (folder / "dataset.json").write_text(json.dumps(content))
        return folder

    return make


@pytest.fixture
def make_regions(make_pictures):
    """Write a site of photographs of three classes, a cup in a disc: `make_regions("A", 5)`.

    Each disc is elsewhere. Some discs are at the edge of the photograph, and some have no cup.
    """

    def make(name: str, training: int, size: int = 32) -> Path:
        folder = make_pictures(name, size=(size, size), cases=(training, 1, 1))
        rng = np.random.default_rng(training)
        for file in sorted(folder.glob("labels/*")):
            label = np.zeros((size, size), np.uint8)
            top, left = (rng.random(2) * (size - 8)).astype(int)
            label[top : top + 9, left : left + 11] = 1
            if rng.random() < 0.8:
                label[top + 2 : top + 7, left + 4 : left + 10] = 2
            Image.fromarray(label).save(file)
        content = json.loads((folder / "dataset.json").read_text())
        content["labels"] = {"0": "background", "1": "disc", "2": "cup"}
        (folder / "dataset.json").write_text(json.dumps(content))
        return folder

    return make


@pytest.fixture(scope="session")
def office(tmp_path_factory) -> Path:
    """Office-Caltech 10 with 14 small pictures a site, as FedBN publishes it."""
    root = tmp_path_factory.mktemp("files") / "office_caltech_10"
    write_fedbn(root, "office_caltech_10", OFFICE, train=11, test=3)
    return root


@pytest.fixture
def faults(monkeypatch, tmp_path):
    """Plan faults of sites in NVFlare's simulator: `faults([site, task, round, fault, seconds], ...)`."""

    def plan(*planned):
        marks = tmp_path / "marks"
        shutil.rmtree(marks, ignore_errors=True)
        marks.mkdir()
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "faults"))
        monkeypatch.setenv("MEDFEDAUG_FAULTS", json.dumps(planned))
        monkeypatch.setenv("MEDFEDAUG_FAULT_MARKS", str(marks))

    return plan


@pytest.fixture(scope="session")
def provisioned(tmp_path_factory) -> Path:
    """The kits of the four hospitals, as NVFlare makes them from the project file that is shipped."""
    project = resources.files("medfedaug.nvflare_jobs.provisioning") / "project.yml"
    work = tmp_path_factory.mktemp("kits")
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", str(project), "-w", "kits"]
    # A home of its own: the command leaves files there.
    subprocess.run(command, check=True, cwd=work, env={**os.environ, "HOME": str(work)}, capture_output=True)
    return work / "kits" / "medfedaug" / "prod_00"


@pytest.fixture(scope="session")
def _python(tmp_path_factory) -> str:
    """A folder whose python3 is the tests' own."""
    program = tmp_path_factory.mktemp("python") / "python3"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return str(program.parent)


@cache
def _trouble_of(program: str | None) -> str:
    from medfedaug.nvflare_jobs.kit import kit_process

    return kit_process.python_trouble()


@pytest.fixture
def own_python(_python, monkeypatch) -> None:
    """Put the tests' own Python first on the PATH, as the scripts of a kit find it.

    Checks of a kit ask each python3 once, which takes a process.
    """
    from medfedaug.nvflare_jobs.kit import startup

    monkeypatch.setenv("PATH", _python, prepend=os.pathsep)
    monkeypatch.setattr(startup, "python_trouble", lambda: _trouble_of(shutil.which("python3")))


@pytest.fixture
def kits(provisioned, own_python, tmp_path) -> Path:
    """Copies of the kits, whose scripts run the tests' own Python."""
    return Path(shutil.copytree(provisioned, tmp_path / "kits"))


@pytest.fixture(scope="session")
def thirty_cases(tmp_path_factory) -> Path:
    """The data of a hospital with ten cases of each split, which many tests read with `doctor`."""
    return write_site(tmp_path_factory.mktemp("thirty") / "hospital-a", cases=(10, 10, 10))


@pytest.fixture
def ready_kit(kits, thirty_cases) -> Path:
    """The kit of a hospital that is ready for a job."""
    from medfedaug.nvflare_jobs.kit.kit import open_kit

    kit = open_kit(kits / "hospital-a")
    kit.write(kit.plan({"data": thirty_cases, "device": "cpu"}, forbid=True))
    return kit.path


@pytest.fixture
def own_data(ready_kit, thirty_cases, tmp_path) -> Path:
    """A copy of the kit's data that a test may change, which the kit names from then on."""
    from medfedaug.hospital.privacy.site_settings import SETTINGS_FILE

    copy = Path(shutil.copytree(thirty_cases, tmp_path / "data/hospital-a"))
    settings = ready_kit / SETTINGS_FILE
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "data": str(copy)}))
    return copy


class _FullDisk(io.FileIO):
    def write(self, _):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def full_disk(monkeypatch):
    """No file that is opened from now on takes a byte, as on a full disk."""
    opened = os.fdopen

    def fdopen(descriptor, mode):
        return io.BufferedWriter(_FullDisk(descriptor, "w")) if mode == "wb" else opened(descriptor, mode)

    monkeypatch.setattr(os, "fdopen", fdopen)
