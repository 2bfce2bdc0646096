"""Orthanc with its DICOMweb plugin, from Debian: an archive of the tests' own on free ports.

The fixture `orthanc` (in `shared_fixtures`) starts one for a session, with a temporary folder. Where
Orthanc is not installed, tests that ask for it are skipped.
"""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

_PLUGINS = (Path("/usr/share/orthanc/plugins"), Path("/usr/lib/orthanc"))
_AET = "ORTHANC"
_START = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass
class Orthanc:
    """A running archive.

    Args:
        process: its process.
        http: port of DICOMweb and of its own interface.
        dicom: port of DIMSE.
        receive: port to which it sends for the AE title ``MEDFEDAUG``.
    """

    process: subprocess.Popen
    http: int
    dicom: int
    receive: int

    @property
    def url(self) -> str:
        """Root of its own interface."""
        return f"http://127.0.0.1:{self.http}"

    @property
    def dicomweb(self) -> str:
        return f"{self.url}/dicom-web"

    @property
    def dimse(self) -> str:
        return f"{_AET}@127.0.0.1:{self.dicom}"

    def put(self, *paths: Path) -> None:
        """Store files, or all files below folders, by Orthanc's own interface."""
        files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
        with requests.Session() as session:
            for file in files:
                if file.is_file():
                    session.post(
                        f"{self.url}/instances", data=file.read_bytes(), timeout=60
                    ).raise_for_status()

    def read(self, instance: str) -> bytes:
        """The file of an object."""
        return requests.get(f"{self.url}/instances/{instance}/file", timeout=60).content


def find_orthanc() -> tuple[str, Path]:
    """The program and its plugin for DICOMweb; skips the test where one is missing."""
    program = shutil.which("Orthanc") or shutil.which("/usr/sbin/Orthanc")
    plugins = (file for folder in _PLUGINS for file in folder.glob("libOrthancDicomWeb.so*"))
    plugin = next(plugins, None)
    if program is None or plugin is None:
        pytest.skip("needs Orthanc and its DICOMweb plugin: apt-get install orthanc orthanc-dicomweb")
    return program, plugin


@contextmanager
def running_orthanc(folder: Path, **settings: object) -> Iterator[Orthanc]:
    """Start an archive, and stop it at the end.

    Args:
        folder: a new one, for its storage.
        **settings: of Orthanc, in place of those here.
    """
    program, plugin = find_orthanc()
    http, dicom, receive = free_port(), free_port(), free_port()
    content = {
        "Name": "tests",
        "StorageDirectory": str(folder / "storage"),
        "IndexDirectory": str(folder / "index"),
        "Plugins": [str(plugin)],
        "HttpPort": http,
        "HttpServerEnabled": True,
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": False,
        "DicomServerEnabled": True,
        "DicomAet": _AET,
        "DicomPort": dicom,
        "DicomCheckCalledAet": True,
        "DicomAlwaysAllowEcho": True,
        "DicomAlwaysAllowStore": True,
        "DicomAlwaysAllowFind": True,
        "DicomAlwaysAllowGet": True,
        "DicomAlwaysAllowMove": True,
        "UnknownSopClassAccepted": True,
        "DicomModalities": {"medfedaug": ["MEDFEDAUG", "127.0.0.1", receive]},
        "SynchronousCMove": True,
        "StableAge": 1,
        "OverwriteInstances": True,
        "ConcurrentJobs": 4,
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/", "EnableWado": False},
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "orthanc.json"
    file.write_text(json.dumps(content))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, str(file)], stdout=log, stderr=log, cwd=folder)
    try:
        _wait(process, f"http://127.0.0.1:{http}/dicom-web/studies?limit=1", folder / "log")
        yield Orthanc(process, http, dicom, receive)
    finally:
        process.kill()  # it takes seconds to end by itself, and nothing of its folder is needed
        process.wait()


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            requests.get(url, timeout=5)
            return
        except requests.RequestException:
            time.sleep(0.05)
    raise AssertionError(f"Orthanc did not start in {_START:.0f} s: {log.read_text()[-2000:]}")
