"""
A Bundle of your own
====================

You have a MONAI Bundle, the definition of a training, and want several sites to train it together. The
federation takes network, loss, optimiser, transforms and metric from it; FedRDN and FFA go into it.
"""

# %%
# The Bundle
# ----------
# One in the layout of MONAI's model zoo: ``configs/train.json`` trains a 3D U-Net on patches with MONAI's
# `SupervisedTrainer`, and knows nothing of a federation. Yours is a folder that you have.

import json
import shutil

import matplotlib.pyplot as plt
import torch
from monai.bundle import ConfigParser
from monai.data import load_decathlon_datalist
from monai.transforms import Compose
from shell import run, workspace

from medfedaug.data.phantom import make_phantom
from medfedaug.transforms import FedRDNd

here = workspace()
both = ["image", "label"]
training = {
    "imports": ["$import glob", "$import ignite"],
    "dataset_dir": ".",
    "images": "$sorted(glob.glob(@dataset_dir + '/images/*.nii.gz'))",
    "labels": "$sorted(glob.glob(@dataset_dir + '/labels/*.nii.gz'))",
    "cases": "$[{'image': i, 'label': l} for i, l in zip(@images, @labels)]",
    "epochs": 10,
    "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
    "network_def": {
        "_target_": "UNet",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
        "channels": [8, 16, 32],
        "strides": [2, 2],
        "norm": "instance",
    },
    "network": "$@network_def.to(@device)",
    "loss": {"_target_": "DiceCELoss", "to_onehot_y": True, "softmax": True, "batch": True},
    "optimizer": {"_target_": "torch.optim.Adam", "params": "$@network.parameters()", "lr": 0.005},
    "train": {
        "deterministic_transforms": [
            {"_target_": "LoadImaged", "keys": both},
            {"_target_": "EnsureChannelFirstd", "keys": both},
            {"_target_": "ScaleIntensityd", "keys": "image"},
        ],
        "random_transforms": [
            {
                "_target_": "RandCropByPosNegLabeld",
                "keys": both,
                "label_key": "label",
                "spatial_size": [24, 24, 8],
                "num_samples": 4,
            },
            {"_target_": "RandFlipd", "keys": both, "prob": 0.5, "spatial_axis": 0},
        ],
        "preprocessing": {
            "_target_": "Compose",
            "transforms": "$@train#deterministic_transforms + @train#random_transforms",
        },
        "dataset": {
            "_target_": "CacheDataset",
            "data": "@cases",
            "transform": "@train#preprocessing",
            "progress": False,
        },
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@train#dataset",
            "batch_size": 2,
            "shuffle": True,
        },
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "Activationsd", "keys": "pred", "softmax": True},
                {
                    "_target_": "AsDiscreted",
                    "keys": ["pred", "label"],
                    "argmax": [True, False],
                    "to_onehot": 2,
                },
            ],
        },
        "handlers": [{"_target_": "ValidationHandler", "validator": "@validate#evaluator", "interval": 1}],
        "trainer": {
            "_target_": "SupervisedTrainer",
            "max_epochs": "@epochs",
            "device": "@device",
            "train_data_loader": "@train#dataloader",
            "network": "@network",
            "loss_function": "@loss",
            "optimizer": "@optimizer",
            "inferer": "@train#inferer",
            "postprocessing": "@train#postprocessing",
            "train_handlers": "@train#handlers",
        },
    },
    "validate": {
        "preprocessing": {"_target_": "Compose", "transforms": "%train#deterministic_transforms"},
        "dataset": {"_target_": "Dataset", "data": "@cases", "transform": "@validate#preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@validate#dataset"},
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": [24, 24, 8],
            "sw_batch_size": 4,
            "overlap": 0.25,
        },
        "postprocessing": "%train#postprocessing",
        "key_metric": {
            "val_mean_dice": {
                "_target_": "MeanDice",
                "include_background": False,
                "output_transform": "$monai.handlers.from_engine(['pred', 'label'])",
            }
        },
        "handlers": [],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@validate#dataloader",
            "network": "@network",
            "inferer": "@validate#inferer",
            "postprocessing": "@validate#postprocessing",
            "key_val_metric": "@validate#key_metric",
            "val_handlers": "@validate#handlers",
        },
    },
    "initialize": ["$monai.utils.set_determinism(seed=0)"],
    "run": [
        "$@train#trainer.run()",
        "$print('mean Dice', @validate#evaluator.state.metrics['val_mean_dice'])",
    ],
}
bundle = here / "bundles/lesion"
(bundle / "configs").mkdir(parents=True)
(bundle / "configs/train.json").write_text(json.dumps(training, indent=2))

# %%
# By itself it trains at one place, with MONAI alone:

make_phantom(here / "data", sites=2, patients=10, shape=(48, 48, 8))
run(
    "python -W ignore -m monai.bundle run --config_file bundles/lesion/configs/train.json "
    "--dataset_dir data/site_A 2> train.log | tail -1"
)

# %%
# In a federation
# ---------------
# ``--bundle`` takes the Bundle as it is. Its own list of files is not used: each site trains on its own
# cases. What FedRDN does to an image comes at the end of the
# deterministic transforms, and FFA layers go into the network. How many rounds there are is the run's.

run(
    "medfedaug simulate --bundle bundles/lesion --data data --methods fedrdn,fedfa --rounds 3 "
    "--local-epochs 4 --engine inprocess --no-pictures --out runs/lesion"
)

# %%
# Without ``--engine inprocess`` every site is a process of its own, in NVFlare's simulator, to the same
# weights. The run's record has the hash of the Bundle's content, so that nobody evaluates it with another:

config = json.loads((here / "runs/lesion/results.json").read_text())["config"]
print(config["bundle"])

# %%
# Back into the Bundle
# --------------------
# The federation's model has the entries of the Bundle's own network: as ``models/model.pt`` of the Bundle
# it is loaded by MONAI alone. FedRDN normalised in training, so the pair of the image's own site comes after
# the Bundle's deterministic transforms; that is all that changes.

(bundle / "models").mkdir()
shutil.copy(here / "runs/lesion/global_model.pt", bundle / "models/model.pt")

parser = ConfigParser()
parser.read_config(bundle / "configs/train.json")
network = parser.get_parsed_content("network_def").eval()
print(network.load_state_dict(torch.load(bundle / "models/model.pt", weights_only=True)))
own_pair = FedRDNd("image", here / "runs/lesion/statistics.json", site="site_B")
prepare = Compose([*parser.get_parsed_content("train#deterministic_transforms"), own_pair])
infer = parser.get_parsed_content("validate#inferer")

case = prepare(load_decathlon_datalist(here / "data/site_B/dataset.json", True, "test")[0])
with torch.no_grad():
    found = infer(case["image"][None], network)[0].argmax(dim=0)
truth = case["label"][0]
z = truth.sum(dim=(0, 1)).argmax()
figure, panel = plt.subplots(figsize=(4, 4), layout="constrained")
panel.imshow(case["image"][0, ..., z].T, cmap="gray", origin="lower")
panel.contour(truth[..., z].T, levels=[0.5], colors="tab:green")
if (found[..., z] == 1).any():
    panel.contour((found[..., z] == 1).T, levels=[0.5], colors="tab:orange", linestyles="dashed")
panel.set_title("truth (green) and prediction (orange, dashed)", fontsize=10)
panel.axis("off")

# %%
# At hospitals
# ------------
# A Bundle is code, and no job carries one. Each site has its own copy, looks at it, and allows it by name and
# content. The job has the name and the hash.

run("medfedaug enrol project --sites hospital-a,hospital-b --server localhost --out project.yml")
run("nvflare provision -p project.yml -w kits > provision.log")
kit = "kits/medfedaug/prod_00/hospital-a"
make_phantom(here / "hospital", sites=1, patients=10, shape=(48, 48, 8))
run(f"medfedaug site configure {kit} --data hospital/site_A --device cpu --allow-bundle bundles/lesion")
run(
    "medfedaug export --bundle bundles/lesion --methods fedrdn,fedfa --rounds 50 --min-sites 2 "
    "--classes background,lesion --out job"
)

# %%
# Whoever changes the Bundle afterwards, by a new learning rate for one, changes its hash. The site's own
# check says so, and a job with it would be refused:

file = bundle / "configs/train.json"
file.write_text(file.read_text().replace("0.005", "0.05"))
run(f"medfedaug site doctor {kit} | grep -A3 Bundle")

# %%
# Next: what the federation takes from a Bundle and what it refuses, which Bundles of the model zoo train, and
# networks and training loops of your own are in :doc:`/pipelines`.
