"""
Your own federation
===================

You do research, have images of several sites, and want to know which method is worth it. From folders of
files to a table of methods, one of them your own.
"""

# %%
# Before you begin
# ----------------
# ``pip install ./medfedaug``; without a GPU, PyTorch's build for the CPU comes first (:doc:`/deploy`). All of
# this page runs on one machine. With images of your own leave out the next step, and begin with `init`.

# %%
# Folders of images
# -----------------
# A federation is a folder with one folder per site. Here are two sites as nnU-Net keeps them: ``imagesTr``
# and ``labelsTr``.

import os
import shutil

from shell import run, workspace

from medfedaug.data.phantom import make_phantom

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
# The first answer
# ----------------
# `compare` trains each site alone, all sites together by plain averaging, and with a remedy for each cause of
# differences, twice each and for as long as the budget allows, and says what helped whom. Two methods and six
# rounds keep this tutorial short.

run("medfedaug compare --data data --out compare --methods fedrdn ditto --budget 20min --set rounds=6")

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


def compare(methods):
    run(
        f"medfedaug benchmark --data data --methods {methods} --seeds 2 --no-pictures --out runs/own "
        "--set rounds=2 local_epochs=10 batch_size=4 learning_rate=0.005 "
        """'network_args={"features": [8, 16, 16, 16, 16, 8], "norm": "instance"}'"""
    )


compare("fedavg fedrdn")

# %%
# ``runs/own/report.html`` has the tables, the tests and the curves; ``table.md`` the table alone.
# ``runs/own/experiment.yml`` is the whole experiment as a file: ``medfedaug benchmark --experiment
# runs/own/experiment.yml`` continues it, and with another ``--out`` repeats it.

run("ls runs/own; cat runs/own/table.md")

# %%
# A method of your own
# --------------------
# A method is a class. One that changes training images has a transform of MONAI's at the site, and nothing to
# exchange. As an installed package it has a name on the command line.

package = here / "contrast-method"
package.mkdir()
(package / "contrast_method.py").write_text('''"""Another contrast for each training image."""

from monai.transforms import RandAdjustContrastd

from medfedaug.methods import Method, SitePart


class ContrastSite(SitePart):
    def __init__(self, strength):
        self.limits = (1 / strength, strength)

    def transforms(self, *, training):
        if not training:  # evaluation sees images as they are
            return []
        return [RandAdjustContrastd("image", prob=0.5, gamma=self.limits, retain_stats=True)]


class Contrast(Method):
    """Each training image gets a contrast of its own, drawn between 1/strength and strength."""

    name = "contrast"

    def __init__(self, strength: float = 2.0):
        self.strength = strength

    def at_site(self, context):
        return ContrastSite(self.strength)
''')
(package / "pyproject.toml").write_text("""[project]
name = "contrast-method"
version = "1.0"

[project.entry-points."medfedaug.methods"]
contrast = "contrast_method:Contrast"

[tool.setuptools]
py-modules = ["contrast_method"]
""")

# %%
# ``pip install ./contrast-method`` is all that you need; this page puts the package into a folder of its own,
# so as not to change the environment that it is built in.

run("python -m pip install --quiet --no-deps --no-build-isolation --target installed ./contrast-method")
os.environ["PYTHONPATH"] = str(here / "installed")
run("medfedaug methods contrast")

# %%
# The comparison takes it in, alone and with FedRDN: finished runs stay, and the others are made.

compare("fedavg fedrdn contrast contrast,fedrdn")
run("cat runs/own/table.md")

# %%
# Next: a method that exchanges something, or makes the global model, is in :doc:`/tutorials/05_own_method`;
# folds, plans for volumes of different size, and experiments as files are in :doc:`/experiments` and
# :doc:`/plans`; what the page shows is in :doc:`/analysis`.
