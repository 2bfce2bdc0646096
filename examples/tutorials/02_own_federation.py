"""
Your own federation
===================

You do research, have images of several sites, and want to know which method is worth it. From folders of
files to a table of methods, in NVFlare's simulator.
"""

# %%
# Folders of images
# -----------------
# A federation is a folder with one folder per site. Here are two sites as nnU-Net keeps them: ``imagesTr``
# and ``labelsTr``.

import shutil

from shell import run, workspace

from medfedaug.data.datasets.phantom import make_phantom

here = workspace()
for made in make_phantom(here / "phantom", sites=2, patients=6, shape=(32, 32, 6)):
    site = here / "data" / made.name.replace("site_", "hospital-").lower()
    for kind, folder, suffix in (("images", "imagesTr", "_0000"), ("labels", "labelsTr", "")):
        (site / folder).mkdir(parents=True)
        for file in sorted((made / kind).iterdir()):
            name = file.name.removesuffix(".nii.gz")
            shutil.copy(file, site / folder / f"{name}{suffix}.nii.gz")

run("find data/hospital-a | sort | head -6")

# %%
# `init` writes the list of cases with a split by patient. Without ``--yes`` it shows what it would write, and
# asks.

run("medfedaug init data --labels background,lesion --yes")

# %%
# A look before training
# ----------------------
# How far are the sites apart, and are there odd cases? ``inspection.html`` has pictures of both.

run("medfedaug inspect --data data --out inspection.html")

# %%
# One run
# -------
# Each site is a process of its own, as in a hospital. This run is small: two rounds of a network with few
# channels.

SMALL = """--rounds 2 --network-args '{"features": [8, 16, 16, 16, 16, 8], "norm": "instance"}'"""
FEW = "--local-epochs 10 --batch-size 4 --lr 0.005"
run(f"medfedaug simulate --data data --methods fedrdn,fedfa {SMALL} {FEW} --out runs/first")

# %%
# The folder has the model, the statistics, the page, and a record of everything.

run("ls runs/first")

# %%
# Methods, seeds, settings
# ------------------------
# A comparison is one command, which continues where it was stopped. It runs the sites in one process, with
# the same results. Two seeds show how it is done; a verdict needs five.

run(
    "medfedaug benchmark --data data --methods fedavg fedrdn --seeds 2 --no-pictures --out runs/own "
    "--set rounds=2 local_epochs=10 batch_size=4 learning_rate=0.005 "
    """'network_args={"features": [8, 16, 16, 16, 16, 8], "norm": "instance"}'"""
)

# %%
# ``runs/own/report.html`` has the tables, the tests and the curves; ``table.md`` the table alone.
# ``runs/own/experiment.yml`` is the whole experiment as a file: ``medfedaug benchmark --experiment
# runs/own/experiment.yml`` continues it, and with another ``--out`` repeats it.

run("ls runs/own; cat runs/own/table.md")

# %%
# Next: folds, plans for volumes of different size, and experiments as files are in :doc:`/experiments` and
# :doc:`/plans`; what the page shows is in :doc:`/analysis`.
