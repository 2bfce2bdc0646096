"""Pages about a finished run: their commands run, and their example is what they write."""

import json
import shutil
from pathlib import Path

from page_blocks import blocks, carry_out
from written_series import series
from written_volumes import load_volume

from medfedaug.data.io.formats import read_header
from medfedaug.data.phantom import make_phantom
from medfedaug.statistics import load_statistics

PAGES = ("use", "dicom", "bundle", "card")


def kinds(content: dict) -> dict:
    """The keys, and what kind of value each has."""
    return {key: kinds(value) if isinstance(value, dict) else type(value) for key, value in content.items()}


def test_the_commands_run(tmp_path, monkeypatch):
    """In the order of the pages, with sites whose voxels are kept."""
    monkeypatch.chdir(tmp_path)
    make_phantom("data", sites=2, patients=3, shape=(32, 32, 6), seed=0)
    files = sorted(Path("data/site_B/images").iterdir())
    for folder, names in {"new": ["patient", "other"], "archive": ["a", "b", "c"]}.items():
        Path(folder).mkdir()
        for name, file in zip(names, files, strict=False):
            shutil.copy(file, f"{folder}/{name}.nii.gz")
    image = load_volume(files[0]).numpy()[0]
    series(Path("series"), (image * 1000).astype("int16"), read_header(files[0]).affine, "1.2.3")
    done = [step for page in PAGES for step in carry_out(f"docs/{page}.md", monkeypatch)]
    commands = {"simulate", "predict", "bundle", "statistics", "report"}
    assert {words[0] for words, _ in done} == commands
    assert len(done) == 10
    pages = {path.parent.name: json.loads(path.read_text()) for path in Path().glob("*/predictions.json")}
    assert set(pages) == {"one", "all", "first", "later", "seg"}
    assert Path("seg/series.dcm").exists()
    assert pages["later"]["statistics"]["mean"] == pages["first"]["statistics"]["mean"]
    assert pages["first"]["statistics"]["of"] == "the 3 images given"
    pairs = [
        json.loads(Path(name, "configs/inference.json").read_text()) for name in ("bundle", "bundle-new")
    ]
    used, own = (load_statistics(name) for name in ("runs/fedrdn/statistics.json", "own.json"))
    assert [pair["mean"] for pair in pairs] == [used["site_A"].mean.tolist(), own["site_B"].mean.tolist()]
    _, example = (block.text for block in blocks("docs/use.md", "json"))
    confidence = pages["one"]["cases"]["patient"]["confidence"]
    assert set(confidence) <= {"lesion"}
    confidence.setdefault("lesion", 0.5)  # after one round nothing may be found
    assert kinds(json.loads(example)) == kinds(pages["one"])
