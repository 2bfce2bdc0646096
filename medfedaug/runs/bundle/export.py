"""Write the folder of a bundle."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from medfedaug.errors import ConfigError
from medfedaug.federation.server.output import write_state
from medfedaug.runs.bundle.metadata import TERMS, bundle_metadata, readme
from medfedaug.runs.bundle.network import plain_inference
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.input_statistics import Origin
from medfedaug.utils.files import write_json


def write_bundle(
    run: FinishedRun, out: str | Path, origin: Origin, *, card: Callable[[Path], object]
) -> None:
    """Write a run's model as a MONAI Bundle, which ``python -m monai.bundle run`` needs only MONAI.

    Everything is checked before anything is written, and the whole folder is written or nothing. The bundle
    gets the layers and the pair of the images' origin, if any. ``card`` writes the model card into a folder.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder; choose another one")
    run.check_whole()
    plain = plain_inference(run, origin)
    with _new_folder(out) as work:
        for name in ("configs", "models", "docs"):
            (work / name).mkdir()
        write_state(work / "models/model.pt", plain.weights)
        write_json(work / "configs/inference.json", plain.config)
        write_json(work / "configs/metadata.json", bundle_metadata(run, plain))
        (work / "docs/README.md").write_text(readme(run, plain, origin), encoding="utf-8")
        card(work / "docs")
        (work / "LICENSE").write_text(TERMS, encoding="utf-8")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder, which becomes ``out`` in the end; after an error nothing is left."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.resolve().parent) as unfinished:
        work = Path(unfinished, out.name)  # with the mode of the umask, unlike `unfinished`
        work.mkdir()
        yield work
        os.replace(work, out)
