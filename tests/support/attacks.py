"""Jobs without code that try to run a command, or to write files, where they are started."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Component = dict[str, Any]


def command(mark: Path) -> Component:
    """What NVFlare's builder passes on as it is, and a component may build: a file appears at ``mark``."""
    return {"path": "os.system", "args": {"command": f"touch '{mark}'"}, "config_type": "dict"}


def persistor(mark: Path) -> Component:
    """NVFlare's persistor builds what it is given as its model; a module of ours once imported it."""
    path = "medfedaug.nvflare_jobs.persistor.PTFileModelPersistor"
    return {"path": path, "args": {"model": command(mark)}}


def persistor_of_nvflare(mark: Path) -> Component:
    return {
        "path": "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor",
        "args": {"model": command(mark)},
    }


def function(mark: Path) -> Component:
    """NVFlare calls whatever the path leads to, and functions of ours write files."""
    return {
        "path": "medfedaug.data.phantom.make_phantom",
        "args": {"out_dir": str(mark), "sites": 1, "patients": 3, "shape": [16, 16, 2]},
    }


def launcher(mark: Path) -> Component:
    return {"path": "medfedaug.nvflare_jobs.kit.launcher.RestartingLauncher", "args": {}}


def below(mark: Path) -> Component:
    """A path that begins like an entry of the list."""
    return {
        "path": "medfedaug.nvflare_jobs.job.executor.SiteExecutor.execute",
        "args": {"config": command(mark)},
    }


def executor(mark: Path) -> Component:
    return {"path": "medfedaug.nvflare_jobs.job.executor.SiteExecutor", "args": {"config": command(mark)}}


def controller(mark: Path) -> Component:
    return {
        "path": "medfedaug.nvflare_jobs.job.controller.FederationController",
        "args": {"config": command(mark)},
    }


def nested(mark: Path) -> Component:
    """NVFlare builds arguments that look like components."""
    inner = {key: value for key, value in command(mark).items() if key != "config_type"}
    return {"path": "medfedaug.nvflare_jobs.job.executor.SiteExecutor", "args": {"config": inner}}


def attributes(mark: Path) -> Component:
    """The arguments that NVFlare takes in place of all others, and does not look at."""
    values = {"class_attributes": {"config": command(mark)}}
    return {"path": "medfedaug.nvflare_jobs.job.executor.SiteExecutor", "args": values}


ATTACKS: dict[str, Callable[[Path], Component]] = {
    attack.__name__: attack
    for attack in (
        *(persistor, persistor_of_nvflare, function, launcher, below),
        *(executor, controller, nested, attributes),
    )
}

REASON = r"is not in allow_list|is not a package|unknown keys"
"""The class is not allowed, or no module is where the path leads, or the class refuses its arguments."""


def spoil(job: Path, out: Path, side: str, component: Component) -> Path:
    """A copy of a job with one component more at ``side``, ``"client"`` or ``"server"``."""
    shutil.copytree(job, out)
    file = out / f"app/config/config_fed_{side}.json"
    content = json.loads(file.read_text())
    content["components"].append({"id": "extra", **component})
    file.write_text(json.dumps(content))
    meta = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps({**meta, "name": out.name}))
    return out
