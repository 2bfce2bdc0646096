"""Phantom whose sites outline different structures, some slices, or nothing."""

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medfedaug.data.base import SPLITS
from medfedaug.data.sites import MANIFEST
from medfedaug.errors import ConfigError
from medfedaug.utils.validation import check_choice

TRUTH = "truth"  # folder with the same federation and full outlines, only for measuring
_UNKNOWN = 255


def annotate_apart(
    root: Path,
    *,
    apart: bool = True,
    unlabelled: Sequence[str] = (),
    sparse: float = 1.0,
    measured: bool = False,
) -> dict[str, tuple[str, ...]]:
    """Remove labels from a phantom, and keep the original in the folder `TRUTH`.

    Args:
        root: the folder of `medfedaug.data.phantom.make_phantom`.
        apart: whether each site outlines about half of the structures: the first site the first ones, the
            second the same number from the second one on, and so on in a circle.
        unlabelled: names of sites that outline nothing.
        sparse: share of outlined slices of a training volume, evenly spaced; the others are unknown.
            Validation and test cases are outlined throughout.
        measured: whether test cases keep all structures, so that borrowed ones are scored.

    Returns:
        The structures that each site outlines for training.

    Raises:
        ConfigError: for an argument that makes no sense, before any change.
    """
    folders = sorted(path.parent for path in root.glob("*/dataset.json"))
    lists = {folder.name: json.loads((folder / "dataset.json").read_text()) for folder in folders}
    for name in unlabelled:
        check_choice("unlabelled: site", name, lists)
    structures = list(next(iter(lists.values()))["labels"].items())[1:]
    if apart and len(structures) < 2:
        raise ConfigError(
            "sites that outline different classes need three classes or more, background included"
        )
    count = (len(structures) + 1) // 2 if apart else len(structures)
    labelled = [name for name in lists if name not in unlabelled]
    chosen: dict[str, tuple[str, ...]] = dict.fromkeys(lists, ())
    for folder in folders:
        shutil.copytree(folder, root / TRUTH / folder.name)
        content, outlined = lists[folder.name], list[tuple[str, str]]()
        if folder.name in labelled:
            first = labelled.index(folder.name) if apart else 0
            outlined = sorted(structures[(first + i) % len(structures)] for i in range(count))
        _name_structures(content, outlined, measured=measured)
        chosen[folder.name] = tuple(name for _, name in outlined)
        values = [int(value) for value, _ in outlined]
        if sparse < 1 and outlined:
            content["ignore"] = _UNKNOWN
        for split in SPLITS:
            for row in content[split]:
                if measured and split == "test":
                    row["labelled"] = [name for _, name in structures]
                    continue
                _rewrite(folder, row, values, sparse if split == "training" else 1)
        (folder / "dataset.json").write_text(json.dumps(content, indent=2) + "\n")
    manifest = json.loads((root / MANIFEST).read_text()) | {"labelled": chosen, "sparse": sparse}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return chosen


def _name_structures(content: dict[str, Any], outlined: Sequence[tuple[str, str]], *, measured: bool) -> None:
    """Name a site's structures in its list; a site without any names no class, unless its test cases do."""
    if outlined or measured:
        content["labelled"] = [name for _, name in outlined]
    if not measured:
        labels = content.pop("labels")
        if outlined:
            content["labels"] = {"0": labels["0"], **dict(outlined)}


def _rewrite(folder: Path, row: dict[str, Any], values: Sequence[int], share: float) -> None:
    path = folder / row["label"]
    if not values:
        path.unlink()
        del row["label"]
        return
    import nibabel as nib

    image = nib.Nifti1Image.from_bytes(gzip.decompress(path.read_bytes()))
    label = np.asarray(image.dataobj)
    label = np.where(np.isin(label, values), label, 0).astype(np.uint8)
    slices = label.shape[2]
    kept = np.unique(np.linspace(0, slices - 1, max(1, round(share * slices))).round().astype(int))
    label[:, :, np.setdiff1d(np.arange(slices), kept)] = _UNKNOWN
    rewritten = nib.Nifti1Image(label, image.affine, image.header)
    path.write_bytes(gzip.compress(rewritten.to_bytes(), compresslevel=4, mtime=0))
