"""Runs that ask for a plan, and fingerprints to make it of."""

import json

import nibabel
import numpy as np
import torch

from medfedaug.config.run import RunConfig


def prints_of(**sites):
    """Fingerprints by site: size and spacing of all its volumes, and how many they are."""
    return {
        name: {
            "extent": torch.tensor([_extent(size, spacing)] * 3, dtype=torch.float32),
            "spacing": torch.tensor([spacing] * 3, dtype=torch.float32),
            "foreground": torch.tensor([0.01]),
            "intensity": torch.tensor([[100.0, 20.0]]),
            "ct": torch.tensor([[-100.0, 300.0, 80.0, 40.0]]),
            "cases": torch.tensor([float(cases)]),
        }
        for name, (size, spacing, cases) in sites.items()
    }


def asked(memory=8.0, given=(), **changes):
    return RunConfig(planning={"memory": memory, "given": list(given)}, **changes)


def _extent(size, spacing):
    return [n * (edge or 1) for n, edge in zip(size, spacing, strict=True)]


def write_volumes(site, size, edges, modality, count):
    """Add training volumes of a protocol to a site's folder: a bright ball in noise."""
    file = site / "dataset.json"
    for name in ("images", "labels"):
        (site / name).mkdir(parents=True, exist_ok=True)
    rows = {"training": [], "validation": [], "test": []}
    content = json.loads(file.read_text()) if file.exists() else rows
    splits = ["training"] * count + [split for split in rows if not content[split] and split != "training"]
    rng, affine = np.random.default_rng(count), np.diag([*edges, 1.0])
    places = [(np.arange(n) + 0.5) * e - n * e / 2 for n, e in zip(size, edges, strict=True)]
    distance = sum(place**2 for place in np.meshgrid(*places, indexing="ij", sparse=True))
    for split in splits:
        inside = distance < (4 + rng.random()) ** 2
        voxels = (
            rng.normal(100, 20, size) + 80 * inside - (1000 if modality == "CT" else 0) * (distance > 400)
        )
        name = f"{split}_{len(content[split])}.nii.gz"
        for folder, values in (("images", voxels.astype(np.int16)), ("labels", inside.astype(np.uint8))):
            nibabel.save(nibabel.Nifti1Image(values, affine), site / folder / name)
        content[split].append({"image": f"images/{name}", "label": f"labels/{name}"})
    content |= {"labels": {"0": "background", "1": "lesion"}, "channel_names": {"0": modality}}
    file.write_text(json.dumps(content))
    return site
