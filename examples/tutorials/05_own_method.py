"""
A method of your own
====================

A method is a class; what it does at a site and what at the server stand side by side. This one moves each
weight only as far as all sites agree to move it.
"""

# %%
# The class
# ---------
# `Method` has one hook for each place where a method can join a federation (:doc:`/methods`). A method that
# makes the global model of the sites' models has an `Aggregator`: `accept` is given each site's update as it
# arrives, and `result` the mean at the end of the round.

import os

from shell import run, workspace

from medfedaug.data.phantom import make_phantom

here = workspace()
package = here / "cautious-methods"
package.mkdir()
(package / "cautious_methods.py").write_text('''"""The smallest of the sites' steps in place of their mean."""

import torch

from medfedaug.methods import Aggregator, Method


class SmallestStep(Aggregator):
    """Keeps the sites' models until the end of the round: it needs all of them at once."""

    def __init__(self):
        self.models = []

    def accept(self, update):
        self.models.append({key: value.float() for key, value in update.weights.items()})

    def result(self, round_):
        models, self.models = self.models, []
        new = {}
        for key, start in round_.previous.items():
            steps = torch.stack([model[key] - start for model in models])
            new[key] = start + steps.gather(0, steps.abs().argmin(dim=0, keepdim=True))[0]
        return new


class Cautious(Method):
    """Each weight moves only as far as all sites want to move it."""

    name = "cautious"

    def aggregator(self, context):
        return SmallestStep()
''')

# %%
# A name for it
# -------------
# An installed package adds its methods by entry points. Nothing in medfedaug changes.

(package / "pyproject.toml").write_text("""[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "cautious-methods"
version = "1.0"
dependencies = ["medfedaug"]

[project.entry-points."medfedaug.methods"]
cautious = "cautious_methods:Cautious"

[tool.setuptools]
py-modules = ["cautious_methods"]
""")

# %%
# ``pip install ./cautious-methods`` is all that you need. This page puts the package into a folder of its
# own, so as not to change the environment that it is built in.

run("python -m pip install --quiet --no-deps --no-build-isolation --target installed ./cautious-methods")
os.environ["PYTHONPATH"] = str(here / "installed")
run("medfedaug methods cautious")

# %%
# In a federation
# ---------------
# It composes with all methods that do not make the global model themselves.

make_phantom(here / "data", sites=2, patients=5, shape=(32, 32, 6))
run(
    "medfedaug simulate --data data --methods cautious,fedrdn --rounds 2 --engine inprocess --no-pictures "
    """--network-args '{"features": [4, 8, 8, 8, 8, 4]}' --out runs/cautious"""
)

# %%
# Two methods that both make the global model are refused, with the reason:

run("! medfedaug simulate --data data --methods cautious,median --engine inprocess --out runs/both 2>&1")

# %%
# Next: at hospitals the package has to be installed, and allowed by each administrator: ``site configure
# --allow-plugin cautious-methods``. The other hooks are in :doc:`/methods`; a test of a whole federation
# against the method's equations is described in ``CONTRIBUTING.md``.
