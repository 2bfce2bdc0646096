"""MONAI application package (MAP): the sources of an application around a Bundle, for MONAI Deploy."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from medfedaug._version import __version__
from medfedaug.data.io.dicom_identity import ModelIdentity
from medfedaug.data.io.dicom_segmentation import Segments
from medfedaug.data.io.segment_codes import SegmentCodes
from medfedaug.errors import ConfigError
from medfedaug.utils.files import write_json
from medfedaug.utils.versions import software_versions

_SDK = "4.0.0"
_PACKAGES = ("monai-deploy-app-sdk", "monai", "torch", "numpy", "pydicom", "highdicom", "nibabel")
_CONFIG = """%YAML 1.2
# Resources that the application asks for; monai-deploy package reads them.
application:
  title: medfedaug segmentation
  version: {version}
  inputFormats: ["file"]
  outputFormats: ["file"]
resources:
  cpu: 1
  gpu: 1
  memory: 4Gi
  gpuMemory: 4Gi
"""
_README = """# MONAI application

`app` takes a folder with a DICOM series and writes a DICOM SEG. It runs the pre-processing, inference and
post-processing of the MONAI Bundle in `model` (`app/bundle_inference.py`).

    pip install -r app/requirements.txt
    python app -i SERIES -o OUT -m model
    monai-deploy package app -m model -c app/app.yaml -t {name}:{version} --platform x86_64

`app/bundle_inference.py` is tested on a CPU: its label maps are those of `medfedaug predict`. `app/app.py`,
the packaging and the container were NOT run, since monai-deploy-app-sdk {sdk} needs CUDA's runtime. Compare
a SEG of the application with one of `medfedaug predict` before use.

`app/series.json` selects the series: by default the first primary MR, CT or PT of a study. A series has one
file a slice; multi-frame files are not taken.
"""
_SERIES = {
    "selections": [
        {"name": name, "conditions": {"Modality": name, "ImageType": ["PRIMARY"]}}
        for name in ("MR", "CT", "PT")
    ]
}


def write_application(
    out: Path, bundle: Path, classes: Sequence[str], sha256: str, codes: Mapping[str, SegmentCodes]
) -> None:
    """Write the sources of an application, the whole folder or nothing."""
    sources = resources.files("medfedaug.runs.bundle")
    files = {
        "app/app.py": (sources / "map_app.txt").read_text(encoding="utf-8"),
        "app/__main__.py": "from app import BundleApplication\n\nBundleApplication().run()\n",
        "app/bundle_inference.py": (sources / "map_inference.py").read_text(encoding="utf-8"),
        "app/app.yaml": _CONFIG.format(version=__version__),
        "app/requirements.txt": _requirements(),
        "README.md": _README.format(name=out.name.lower(), version=__version__, sdk=_SDK),
    }
    with new_folder(out) as work:
        shutil.copytree(bundle, work / "model/bundle")
        (work / "app").mkdir()
        for name, text in files.items():
            (work / name).write_text(text, encoding="utf-8")
        write_json(work / "app/series.json", _SERIES)
        write_json(work / "app/segments.json", _segments(classes, sha256, codes))


def check_new_folder(out: Path) -> None:
    """Check that a folder does not exist, or is empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder; choose another one")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder, which becomes ``out`` in the end; after an error nothing is left."""
    check_new_folder(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.resolve().parent))
    work = unfinished / out.name  # with the mode of the umask, unlike `unfinished`
    try:
        work.mkdir()
        yield work
        os.replace(work, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _requirements() -> str:
    known = {**software_versions(), "monai-deploy-app-sdk": _SDK}
    pins = (f"{name}=={known[name].split('+')[0]}" if name in known else name for name in _PACKAGES)
    return "".join(f"{pin}\n" for pin in pins)


def _segments(classes: Sequence[str], sha256: str, codes: Mapping[str, SegmentCodes]) -> dict[str, object]:
    described = Segments(tuple(classes), ModelIdentity(sha256), codes)
    names = enumerate(classes[1:], start=1)
    segments = [{"label": name[:64], **asdict(described.codes_of(number))} for number, name in names]
    return {"version": __version__, "model": sha256, "segments": segments}
