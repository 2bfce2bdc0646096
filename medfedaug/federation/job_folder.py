"""Names and hashes of the files of a job and of a finished run, and names in its record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medfedaug.errors import ConfigError
from medfedaug.utils.files import sha256

JOB_FOLDER = "medfedaug"  # the folder of our files in the run folder of a job
EVENTS = "events.jsonl"  # file of a job's events, one JSON object per line
RESULTS = "results.json"  # settings and scores of a finished run
GLOBAL_MODEL, FINAL_MODEL = "global_model.pt", "final_model.pt"
"""The models of the selected and of the last round."""
STATISTICS = "statistics.json"  # channel statistics of the sites
REPORT = "report.html"  # the page of a run
CARDS = ("model_card.md", "model_card.html")  # the model card, as Markdown and as a page
STATE = "state"  # folder of the state of server and sites
EVALUATION = "evaluation.json"  # scores of an evaluation
COMPARED = "compare.json"  # gains of methods in a comparison
ALIVE = "alive"  # touched by the job's process every `PULSE` seconds
PULSE = 10.0
SESSION = "session.json"  # file of a running job at a site, for its return after a reboot
SPACING = "spacing"  # the name of the summary of voxel edges, and its key in ``results.json``
COUNTS = "counts"  # numbers of a site's patients and studies, in its answer and in ``results.json``
LEVELS = ("low", "median", "high")  # the names of the quantiles of a spacing
HASHES = "sha256"  # the entry of ``results.json`` with the hash of each file that a prediction uses, by name


def server_checkpoint(state_dir: str | Path, name: str = "medfedaug") -> Path:
    """Return the path of the server's checkpoint of the run ``name``, next to the folders of the sites."""
    return Path(state_dir) / "server" / f"{name}.pt"


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a run that a prediction uses, by name."""
    models = [folder / name for name in (GLOBAL_MODEL, FINAL_MODEL)]
    files = [folder / STATISTICS, *models, *(exchange_file(model) for model in models)]
    return {file.name: sha256(file) for file in sorted(files) if file.is_file()}


def check_unchanged(path: Path, record: Mapping[str, Any]) -> None:
    """Check a file of a run against the hash in its record, if any.

    A model under another name, such as a fine-tuned one, has no hash in the record.
    """
    hashes = record.get(HASHES)
    if not isinstance(hashes, Mapping):
        return
    expected, actual = hashes.get(path.name), sha256(path) if path.exists() else None
    exchanges = {exchange_file(Path(model)).name for model in (GLOBAL_MODEL, FINAL_MODEL)}
    if actual != expected and (expected is not None or path.name in exchanges):
        raise ConfigError(
            f"{path}: is not as the run left it ({HASHES} in {RESULTS}): damaged, changed or mixed up. Put "
            f"the original back; if the change is meant, correct or remove {path.name} under {HASHES} there"
        )


def exchange_file(model: Path) -> Path:
    """Return the path of a model's exchange: ``global_exchange.pt`` for ``global_model.pt``."""
    return model.with_name(f"{model.stem.removesuffix('_model')}_exchange{model.suffix}")
