"""What the tutorials share: a folder of their own, and commands as a terminal runs them."""

import atexit
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import psutil

_here = Path()


def workspace() -> Path:
    """A new folder, in which commands run. At the end it is removed, with all that was started in it."""
    global _here
    folder = tempfile.TemporaryDirectory(prefix="medfedaug-tutorial-")
    _here, home = Path(folder.name), Path(folder.name) / ".home"
    home.mkdir()
    # MONAI says of every reader that it has no decoder for GPUs.
    warnings.filterwarnings("ignore", message="NvImgCodec")
    # A private home folder, since NVFlare keeps settings there; by it its processes are found again.
    os.environ |= {"HOME": str(home), "COLUMNS": "110", "PATH": _path(), "OMP_NUM_THREADS": "1"}

    def leave() -> None:
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("HOME") == str(home):
                    process.kill()
            except (psutil.Error, OSError):
                continue
        folder.cleanup()

    atexit.register(leave)
    return _here


def _path() -> str:
    ours, path = str(Path(sys.executable).parent), os.environ["PATH"]
    return path if ours in path.split(os.pathsep) else f"{ours}{os.pathsep}{path}"


def run(command: str) -> str:
    """Run a command, print it with what it says, and return what it printed to standard output.

    Raises:
        CalledProcessError: when it fails.
    """
    print(f"$ {command}")
    done = subprocess.run(
        command, shell=True, text=True, stdin=subprocess.DEVNULL, capture_output=True, cwd=_here
    )
    # The folder has another name each time.
    print(done.stdout.rstrip().replace(str(_here), "…"))
    if done.returncode:
        print(done.stderr.rstrip())
    done.check_returncode()
    return done.stdout
