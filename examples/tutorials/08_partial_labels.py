"""
Sites that outlined different structures
========================================

One hospital has outlined the lesion and the ventricles, another the ventricles and the deep grey matter, and
each wants all of them found in its own images. They train one network, and see which structure is found
where.
"""

# %%
# Three hospitals
# ---------------
# The phantom stands for them: three structures, of which each site has outlined two. Its test cases have all
# of them outlined, so that this page can show how well a structure is found at a site that never outlined it
# for training.

import json

from shell import run, workspace

from medfedaug.data.phantom import make_phantom
from medfedaug.research.datasets.partial_phantom import annotate_apart

here = workspace()
make_phantom(here / "data", sites=3, patients=8, shape=(48, 48, 6), classes=4, shift=0)
outlined = annotate_apart(here / "data", measured=True)
print(outlined)

# %%
# With data of your own, each site says in its ``dataset.json`` what it has outlined. Names decide, not
# numbers; a row may say otherwise for its own case, and one without ``label`` has no outlines
# (:doc:`/howto/partial_labels`). `medfedaug inspect` says which structures one site alone has outlined, or
# none, and which names may mean the same.

content = json.loads((here / "data/site_B/dataset.json").read_text())
print(json.dumps({name: content[name] for name in ("labels", "labelled")}, indent=1))
print(json.dumps({"training": content["training"][0], "test": content["test"][0]}, indent=1))

# %%
# Open, or background?
# --------------------
# What a site has not outlined may be there all the same. The loss leaves that open (``marginal``, the
# default). ``none`` is the mistake that it avoids: what is not outlined is learned as background. One seed
# of each shows how it is done; a verdict needs five.

NETWORK = """'network_args={"channels": [8, 16, 32, 32], "strides": [2, 2, 2], "norm": "batch"}'"""
run(
    "medfedaug benchmark --data data --methods fedavg --seeds 1 --no-pictures --out losses "
    "--set partial_loss=marginal,none rounds=40 batch_size=4 learning_rate=0.01 validate_every=5 "
    f"network=unet {NETWORK}"
)

# %%
# ``metrics.md`` has the mean of each structure over the sites that outlined it in test cases.

run("cat losses/metrics.md")

# %%
# At the hospital
# ---------------
# A prediction has all structures, and says which of them the site has borrowed.

run("ls losses/fedavg")
model = next(
    file.parent.relative_to(here)
    for file in (here / "losses").rglob("results.json")
    if json.loads(file.read_text())["config"]["partial_loss"] == "marginal"
)
image = f"data/site_A/{json.loads((here / 'data/site_A/dataset.json').read_text())['test'][0]['image']}"
run(f"medfedaug predict --model {model} --images {image} --site site_A --out predicted")
print(*json.loads((here / "predicted/predictions.json").read_text())["notes"], sep="\n")

# %%
# A hospital without any outline takes part with its images: methods that learn from these are `condist` and
# `teacher`, and all others say so before anything is trained. ``medfedaug compare --methods
# condist teacher --set unlabelled_weight=1`` measures what such a site brings.
#
# Do not take a borrowed structure on trust: outline it in some test cases of this hospital, and name them in
# their rows (``"labelled": [...]``). It is then scored here, too.
