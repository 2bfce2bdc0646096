"""
From a run to a patient
=======================

A finished run predicts new images, without labels, on their own grids.
"""

# %%
# A run, and a new patient
# ------------------------

import json
import shutil

import matplotlib.pyplot as plt
import nibabel
from shell import run, workspace

from medfedaug.data.phantom import make_phantom

here = workspace()
make_phantom(here / "data", sites=2, patients=8, shape=(48, 48, 8))
run(
    "medfedaug simulate --data data --methods fedrdn --rounds 6 --local-epochs 3 --batch-size 4 --lr 0.002 "
    "--engine inprocess --no-pictures --out runs/fedrdn "
    """--network-args '{"features": [8, 16, 32, 64, 64, 8], "norm": "instance"}'"""
)
(here / "new").mkdir()
listed = json.loads((here / "data/site_B/dataset.json").read_text())["test"][0]
shutil.copy(here / "data/site_B" / listed["image"], here / "new/patient.nii.gz")

# %%
# Prediction
# ----------
# ``--site`` says where the image comes from, so that it is normalised with that site's pair. A place that
# took no part leaves it out, and statistics of its own images are used.

run("medfedaug predict --model runs/fedrdn --images new/patient.nii.gz --out predicted --site site_B")
run("find predicted -type f | sort")

# %%
# The label map has the grid and the geometry of the image.

image, found, truth = (
    nibabel.load(here / path)
    for path in ("new/patient.nii.gz", "predicted/patient.nii.gz", f"data/site_B/{listed['label']}")
)
assert (image.affine == found.affine).all()
pixels, lesion, true = image.get_fdata(), found.get_fdata() == 1, truth.get_fdata() == 1
z = true.sum(axis=(0, 1)).argmax()
figure, panel = plt.subplots(figsize=(4, 4), layout="constrained")
panel.imshow(pixels[..., z].T, cmap="gray", origin="lower")
panel.contour(true[..., z].T, levels=[0.5], colors="tab:green")
if lesion[..., z].any():
    panel.contour(lesion[..., z].T, levels=[0.5], colors="tab:orange", linestyles="dashed")
panel.set_title("truth (green) and prediction (orange, dashed)", fontsize=10)
panel.axis("off")

# %%
# What was predicted, with which model, and what was odd about the image:

content = json.loads((here / "predicted/predictions.json").read_text())
print(json.dumps(content["cases"]["patient"], indent=1))

# %%
# For others
# ----------
# The model card says what the model was trained on and how it scored. A MONAI Bundle gives the same label
# maps with MONAI alone.

run("medfedaug bundle runs/fedrdn --out bundle --site site_B")
run("find bundle -type f | sort")

# %%
# Next: DICOM, folders, probabilities and warnings are in :doc:`/use`. A prediction is the output of a
# research tool, and nothing here is a medical device.
