"""Write the folder of a bundle: inference, weights, metadata, README and licence."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from medfedaug._version import __version__, installed_versions
from medfedaug.federation.server.output import write_state
from medfedaug.runs.bundle.network import PlainInference, plain_inference
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.utils.files import check_empty, write_json


def write_bundle(
    run: FinishedRun,
    out: str | Path,
    origin: Origin,
    *,
    card: Callable[[Path], object],
    thresholds: Mapping[str, float] | None = None,
) -> None:
    """Write a run's model as a MONAI Bundle, which ``python -m monai.bundle run`` needs only MONAI.

    Everything is checked before anything is written, and the whole folder is written or nothing. The bundle
    gets the layers and the pair of the images' origin, if any. ``card`` writes the model card into a folder.
    The metadata get the ``thresholds`` of a calibration, by structure.
    """
    out = Path(out)
    check_empty(out)
    run.check_whole()
    plain = plain_inference(run, origin)
    calibrated = {"calibrated_thresholds": dict(thresholds)} if thresholds else {}
    with _new_folder(out) as work:
        for name in ("configs", "models", "docs"):
            (work / name).mkdir()
        write_state(work / "models/model.pt", plain.weights)
        write_json(work / "configs/inference.json", plain.config)
        write_json(work / "configs/metadata.json", {**bundle_metadata(run, plain), **calibrated})
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


_SCHEMA_URL = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
)
_VERSION = "1.0.0"
_PACKAGES = ("nibabel", "pytorch-ignite", "fire", "pillow", "einops")  # the last for MONAI's attention
_NOT_STATED = "Not stated: fill in before you share this bundle."
TERMS = """\
The weights in models/ were trained by the sites of a federation, which decide the terms of their use. No
terms were given when this bundle was made: put them here before you share it.

The configuration files in configs/ were written by medfedaug and may be used under the Apache License
2.0, https://www.apache.org/licenses/LICENSE-2.0.
"""
_RUN = """\
It needs MONAI and no medfedaug:

```bash
pip install 'monai[fire,ignite,nibabel,pillow]'
python -m monai.bundle run --bundle_root BUNDLE --config_file BUNDLE/configs/inference.json \\
    --meta_file BUNDLE/configs/metadata.json --dataset_dir IMAGES --output_dir PREDICTIONS
```

It takes all files in `IMAGES` that match `{pattern}` (`--pattern`), and writes a label map for each,
{format}, on the grid of its file. The classes are {classes}. If each channel of an image has its own file,
give `--images` a list of lists of files, in the order of the channels: {channels}.
"""
_PAIR = """\
Images are normalised with the mean and the standard deviation of each channel at {place}: `mean` and `std`
in `configs/inference.json`. MONAI cannot compute those of another place before it predicts. To use the
model elsewhere, compute that place's pair from its images, without labels, and put it there, or on the
command line: `--mean '[0.21]' --std '[0.17]'`. The pair has means over images: of each image's mean, and of
each image's standard deviation, at the point of the preprocessing where `NormalizeIntensityd` stands.
`medfedaug statistics` computes them for images that no plan resamples.
"""
_VERIFY = """\
```bash
pip install 'monai[fire]'
python -m monai.bundle verify_net_in_out network_def --meta_file BUNDLE/configs/metadata.json \\
    --config_file BUNDLE/configs/inference.json
```

`python -m monai.bundle verify_metadata` fetches MONAI's schema and compares `configs/metadata.json` with it.
"""


def bundle_metadata(run: FinishedRun, plain: PlainInference) -> dict[str, Any]:
    """Return ``configs/metadata.json``."""
    config = run.config
    labels = {str(index): name for index, name in enumerate(config.classes)}
    names = config.channel_names or [f"channel {index}" for index in range(config.in_channels)]
    # Sizes that the network takes: the tried one, or its multiples.
    shape = [size if plain.fixed_size else f"{size}*n" for size in plain.example.shape[2:]]
    patches = config.plan.patch_size is not None
    tensor = {"type": "image", "spatial_shape": shape, "dtype": "float32", "is_patch_data": patches}
    normalised = plain.pair is not None or run.composition.intensity == "raw"
    mean = run.record.get("test", {}).get("mean", {})
    return {
        "schema": _SCHEMA_URL,
        "version": _VERSION,
        "changelog": {_VERSION: f"made by medfedaug {__version__} of the run {run.record['run']}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").split("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": installed_versions(_PACKAGES),
        **dict.fromkeys(("name", "task"), f"Segmentation of {', '.join(config.classes[1:])}"),
        "description": (
            f"{config.network}, trained by a federation of {len(run.record.get('sites', ()))} sites that "
            f"shared no images, with {', '.join(method['name'] for method in config.methods)}."
        ),
        "authors": _NOT_STATED,
        "copyright": _NOT_STATED,
        "data_type": "PNG, JPEG, TIFF or BMP" if _photographs(plain) else "nibabel",
        "image_classes": ", ".join(names),
        "label_classes": "a label map has the number of each class: "
        + ", ".join(f"{index}: {name}" for index, name in labels.items()),
        "pred_classes": "the logits of the classes, in the order of their numbers",
        "eval_metrics": {name: value for name, value in mean.items() if value is not None},
        "intended_use": "Research. It is not a medical device: no diagnosis and no treatment may rest on it.",
        "network_data_format": {
            "inputs": {
                "image": {
                    "format": "magnitude",
                    "num_channels": config.in_channels,
                    "value_range": [] if normalised else [0, 1],
                    "channel_def": {str(index): name for index, name in enumerate(names)},
                    **tensor,
                }
            },
            "outputs": {
                "pred": {
                    "format": "segmentation",
                    "num_channels": config.num_classes,
                    "value_range": [],
                    "channel_def": labels,
                    **tensor,
                }
            },
        },
    }


def _photographs(plain: PlainInference) -> bool:
    return bool(plain.config["pattern"] == "*.png")


def readme(run: FinishedRun, plain: PlainInference, origin: Origin) -> str:
    """Return ``docs/README.md``: run, normalisation and verification."""
    config = run.config
    usage = _RUN.format(
        pattern=plain.config["pattern"],
        format="PNG" if _photographs(plain) else "NIfTI",
        classes=", ".join(f"{index}: {name}" for index, name in enumerate(config.classes)),
        channels=", ".join(config.channel_names) or "the order of the training",
    )
    parts = [
        f"# Segmentation of {', '.join(config.classes[1:])}",
        "Research only: this is not a medical device. The [model card](model_card.md) has its training data, "
        "scores and the limits of its test. `medfedaug predict` gives the same label maps.",
        *("## Run", usage),
    ]
    if plain.pair is not None:
        place = "a site of the federation" if origin.site else "the place that it was made for"
        parts += ["## Expected intensities", _PAIR.format(place=place)]
    parts += ["## Verify", _VERIFY]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
