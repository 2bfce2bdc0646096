"""
From a PACS, and back
=====================

Six studies of two hospitals in an archive become a federation, and the result returns to the archive beside
the image. The archive here is `Orthanc <https://www.orthanc-server.com>`_ with its DICOMweb plugin
(``apt-get install orthanc orthanc-dicomweb``); a hospital names its own with ``--dicomweb`` or ``--dimse``.
Where Orthanc is missing, this page is shown without what the commands say.
"""

# %%
# An archive with six studies
# ---------------------------
# Each has an MR series and a DICOM SEG in which somebody drew the lesion. ``archive.py`` beside this script
# makes them of the phantom.

import json

import matplotlib.pyplot as plt
from archive import start_archive, store_study
from shell import run, workspace

from medfedaug.data.phantom import make_phantom

here = workspace()
pacs = start_archive(here / "pacs")
for site in make_phantom(here / "phantom", sites=2, patients=3, shape=(48, 48, 8)):
    hospital = site.name[-1]
    rows = json.loads((site / "dataset.json").read_text())
    for number, row in enumerate([*rows["training"], *rows["validation"], *rows["test"]]):
        accession = f"{hospital}-{number}"
        store_study(pacs, site / row["image"], site / row["label"], f"patient-{accession}", accession)
    listed = "\n".join(["AccessionNumber", *(f"{hospital}-{number}" for number in range(3))])
    (here / f"studies_{hospital}.csv").write_text(f"{listed}\n")

# %%
# Each hospital makes its data folder
# -----------------------------------
# The first call shows the choice and fetches nothing. Names of cases are pseudonyms with a key of the
# hospital; ``data/hospital_A.state`` says who is who, and stays there.

run(
    f"medfedaug import --dicomweb {pacs} --studies studies_A.csv --labels seg --out data/hospital_A --dry-run"
)
for hospital in "AB":
    run(
        f"medfedaug import --dicomweb {pacs} --studies studies_{hospital}.csv --labels seg "
        f"--segments 'lesion=lesion' --out data/hospital_{hospital}"
    )
run("ls data/hospital_A data/hospital_A/images")

# %%
# They train together
# -------------------
# In life the folders are at two places, and :doc:`03_hospital` shows the rest.

run(
    "medfedaug simulate --data data --methods fedrdn --rounds 8 --local-epochs 10 --batch-size 4 --lr 0.002 "
    "--engine inprocess --no-pictures --out runs/fedrdn "
    """--network-args '{"features": [8, 16, 32, 64, 64, 8], "norm": "instance"}'"""
)

# %%
# A prediction beside the image
# -----------------------------
# The studies are fetched, predicted, and stored: a DICOM SEG, contours, and a structured report with the
# volume.

predict = (
    f"medfedaug predict --model runs/fedrdn --site hospital_B --dicomweb {pacs} --studies studies_B.csv "
    "--rtstruct --report --store --out predicted"
)
run(predict)

# %%
# The archive is asked before anything is fetched: the same command stores nothing twice, also from another
# folder or computer.

run(predict)

# %%
# The archive's own view of one study
# -----------------------------------

import requests

study = requests.get(f"{pacs}/studies?AccessionNumber=B-2", timeout=60).json()[0]["0020000D"]["Value"][0]
for series in requests.get(f"{pacs}/studies/{study}/series?includefield=0008103E", timeout=60).json():
    words = [series.get(tag, {}).get("Value", [""])[0] for tag in ("00080060", "00200011", "0008103E")]
    print(*words)

# %%
# The case of which the model is least sure comes first in the table, and in ``look_first``.

first = json.loads((here / "predicted/predictions.json").read_text())["look_first"][0]
plt.figure(figsize=(7, 4))
plt.imshow(plt.imread(here / f"predicted/previews/{first}.png"))
plt.axis("off")
plt.show()

# %%
# :doc:`/howto/import` and :doc:`/howto/store` have all options, and what the administrator of the PACS has to
# open.
