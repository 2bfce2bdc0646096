r"""nnU-Net's own trainer in the rounds of a federation.

Loader, augmentation, loss, optimiser, steps and inference are nnU-Net's, and so is the preparation of the
images, at each site. The job's plan says spacing, patch and normalisation, the same at every site, and
the network follows from it by nnU-Net's rule. Weights and the methods' values alone travel.

    pip install ./examples/nnunet
    medfedaug simulate --data data --methods fedavg --spatial-dims 3 --spacing 1,1,1 --patch-size 32,32,16 \
      --network nnunet --network-args '{"spacing": [1, 1, 1], "patch_size": [32, 32, 16]}' \
      --loop nnunet --rounds 4 --local-steps 50 --batch-size 2 --out run
"""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from monai.utils import convert_to_tensor
from nnunetv2.evaluation.evaluate_predictions import compute_tp_fp_fn_tn
from nnunetv2.experiment_planning.experiment_planners.network_topology import get_pool_and_conv_props
from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.training.dataloading.nnunet_dataset import infer_dataset_class
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
from torch import nn

from medfedaug import client
from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError

SPLITS = ("training", "validation", "test")
NORMALISATIONS = {"none": "NoNormalization", "z_score": "ZScoreNormalization", "ct": "CTNormalization"}


def architecture(spatial_dims, spacing, patch_size, features=32):
    """The network of nnU-Net's plans for patches of a size and spacing, along x, y and z."""
    spacing, patch = list(spacing)[:spatial_dims][::-1], list(patch_size)[::-1]  # nnU-Net has z first
    _, strides, kernels, padded, _ = get_pool_and_conv_props(spacing, patch, 4, 999999)
    if list(padded) != patch:
        fitting = ",".join(str(size) for size in list(padded)[::-1])
        raise ConfigError(f"nnU-Net's network halves patches of {patch_size} unevenly; take {fitting}")
    stages, largest = len(strides), 320 if spatial_dims == 3 else 512
    arguments = {
        "n_stages": stages,
        "features_per_stage": [min(features * 2**stage, largest) for stage in range(stages)],
        "conv_op": f"torch.nn.modules.conv.Conv{spatial_dims}d",
        "kernel_sizes": [[int(n) for n in kernel] for kernel in kernels],
        "strides": [[int(n) for n in stride] for stride in strides],
        "n_conv_per_stage": [2] * stages,
        "n_conv_per_stage_decoder": [2] * (stages - 1),
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{spatial_dims}d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    return {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": arguments,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def network(spatial_dims, in_channels, out_channels, spacing, patch_size, features=32):
    """Build nnU-Net's U-Net for the plan of a federation, as `--network nnunet`."""
    made = architecture(spatial_dims, spacing, patch_size, features)
    return get_network_from_plans(*made.values(), in_channels, out_channels, deep_supervision=False)


def nnunet_plans(config):
    """A federation's plan as nnU-Net's, with nnU-Net's own defaults for all that it leaves open."""
    plan = config.plan
    if plan.spacing is None or plan.patch_size is None:
        raise ConfigError("nnU-Net needs the federation's plan: --plan FILE, or --spacing and --patch-size")
    channels = range(config.in_channels)
    words = list(plan.normalisation or ["z_score"])
    words = words * config.in_channels if len(words) == 1 else words
    names = ("percentile_00_5", "percentile_99_5", "mean", "std")
    numbers = plan.ct_intensities or (0.0, 1.0, 0.0, 1.0) * config.in_channels
    resampling = {"order_z": 0, "force_separate_z": None}
    configuration = {
        "data_identifier": "federation",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": config.batch_size,
        "patch_size": list(plan.patch_size)[::-1],
        "spacing": list(plan.spacing)[: plan.spatial_dims][::-1],
        "normalization_schemes": [NORMALISATIONS[word] for word in words],
        "use_mask_for_norm": [False] * config.in_channels,
        "batch_dice": plan.spatial_dims == 2,
        "architecture": architecture(plan.spatial_dims, **config.network_args),
        **{f"resampling_fn_{of}": "resample_data_or_seg_to_shape" for of in ("data", "seg", "probabilities")},
        "resampling_fn_data_kwargs": {"is_seg": False, "order": 3, **resampling},
        "resampling_fn_seg_kwargs": {"is_seg": True, "order": 1, **resampling},
        "resampling_fn_probabilities_kwargs": {"is_seg": False, "order": 1, **resampling},
    }
    return {
        "dataset_name": "Dataset001_Federation",
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "NibabelIOWithReorient" if plan.orientation else "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "foreground_intensity_properties_per_channel": {
            str(c): dict(zip(names, numbers[4 * c : 4 * c + 4], strict=True)) for c in channels
        },
        "label_manager": "LabelManager",
        "configurations": {"federation": configuration},
        "continue_training": False,
    }


def nnunet_dataset(config):
    """Channels and classes as in nnU-Net's `dataset.json`."""
    names = config.channel_names or [f"channel_{index}" for index in range(config.in_channels)]
    return {
        "channel_names": {str(index): name for index, name in enumerate(names)},
        "labels": {name: index for index, name in enumerate(config.classes)},
        "file_ending": ".nii.gz",
    }


class Prepared(Sequence):
    """A site's cases as nnU-Net prepares them; as a sequence the training samples, from nnU-Net's files.

    Args:
        config: the job's settings.
        folder: an empty folder, for nnU-Net's files.
    """

    def __init__(self, config, folder):
        self.dataset_json = nnunet_dataset(config)
        self.plans = nnunet_plans(config)
        self.manager = PlansManager(self.plans)
        self.configuration = self.manager.get_configuration("federation")
        self.labels = self.manager.get_label_manager(self.dataset_json)
        base = folder / self.plans["dataset_name"]
        self.folder = base / "federation"
        self.folder.mkdir(parents=True)
        self.files = {}
        prepare = self.configuration.preprocessor_class(verbose=False)
        for split in SPLITS:
            for index, file in enumerate(client.files(split)):
                key, images = f"{split}_{index:04d}", file["image"]
                self.files[key] = file
                images = [images] if isinstance(images, str) else images
                where = (str(self.folder / key), images, file["label"])
                prepare.run_case_save(*where, self.manager, self.configuration, self.dataset_json)
        split = {"train": self.keys("training"), "val": self.keys("validation")}
        (base / "splits_final.json").write_text(json.dumps([split]))
        (base / "dataset_fingerprint.json").write_text("{}")  # nnU-Net copies it beside the model
        self.dataset = infer_dataset_class(str(self.folder))(str(self.folder))

    def keys(self, split):
        """The cases of a split, by nnU-Net's names."""
        return [key for key in self.files if key.startswith(split)]

    def __len__(self):
        return len(self.keys("training"))

    def __getitem__(self, index):
        data, label, *_ = self.dataset.load_case(self.keys("training")[index])
        return {"image": torch.from_numpy(data[:]), "label": torch.from_numpy(label[:])}

    def predictor(self, network, device):
        """nnU-Net's sliding window, as its own validation has it."""
        found = nnUNetPredictor(
            device=device, perform_everything_on_device=device.type == "cuda", allow_tqdm=False
        )
        mirrored = tuple(range(len(self.configuration.patch_size)))
        found.manual_initialization(
            network=network,
            plans_manager=self.manager,
            configuration_manager=self.configuration,
            parameters=None,
            dataset_json=self.dataset_json,
            trainer_name="nnUNetTrainer",
            inference_allowed_mirroring_axes=mirrored,
        )
        return found

    def score(self, network, split, transform):
        """Mean Dice of the classes of each case, on the grid of its file."""
        predictor, scores = self.predictor(network, next(network.parameters()).device), {}
        reader = self.manager.image_reader_writer_class()
        for key in self.keys(split):
            data, _, _, properties = self.dataset.load_case(key)
            image = changed(torch.from_numpy(data[:]), transform)
            logits = predictor.predict_sliding_window_return_logits(image).cpu()
            found = convert_predicted_logits_to_segmentation_with_correct_shape(
                predicted_logits=logits,
                plans_manager=self.manager,
                configuration_manager=self.configuration,
                label_manager=self.labels,
                properties_dict=properties,
                num_threads_torch=torch.get_num_threads(),
            )
            truth = reader.read_seg(self.files[key]["label"])[0][0]
            scores[self.files[key]["name"]] = mean_dice(truth, found, self.labels.foreground_labels)
        return scores


def changed(image, transform):
    """An image after the methods' transform, without meta data, with which nnU-Net cannot weigh losses."""
    return convert_to_tensor(transform({"image": image})["image"], track_meta=False)


def mean_dice(truth, found, labels):
    """Mean over the classes that either has; `None` where there is none."""
    counts = [compute_tp_fp_fn_tn(truth == label, found == label)[:3] for label in labels]
    dice = [2 * tp / (2 * tp + fp + fn) for tp, fp, fn in counts if tp + fp + fn]
    return float(np.mean(dice)) if dice else None


class AllHeads(nn.Module):
    """The same encoder and decoder with all heads, of which the federation's network gives the finest."""

    def __init__(self, network):
        super().__init__()
        self.encoder, self.decoder = network.encoder, network.decoder

    def forward(self, images):
        """The heads, the finest first, where deep supervision is on."""
        return self.decoder(self.encoder(images))


class FederatedTrainer(nnUNetTrainer):
    """Trains by nnU-Net's `run_training` for the epochs of a round, with the federation's network.

    The rate falls over all rounds by nnU-Net's rule. Momentum starts afresh in each round, since it belongs
    to weights that the average has replaced.
    """

    def join(self, federation, config):
        """Take the network, and the methods' part."""
        self.federation, self.settings = federation, config
        self.epochs = 1 if config.local_steps else config.local_epochs
        if config.local_steps:
            self.num_iterations_per_epoch = config.local_steps
            self.num_val_iterations_per_epoch = min(config.local_steps, self.num_val_iterations_per_epoch)
        self.num_epochs = config.rounds * self.epochs
        self.initialize()
        federation.follow(self.optimizer, lambda: self.last_loss)

    def build_network_architecture(self, plans_manager, *_):
        """The network of the job, with the methods' layers."""
        return AllHeads(self.federation.network)

    def _do_i_compile(self):  # the methods' layers change from round to round
        return False

    def _build_loss(self):
        task_loss = super()._build_loss()

        def loss(output, target):
            found = task_loss(output, target)
            if self.network.training:
                fine = (output[0], target[0]) if self.enable_deep_supervision else (output, target)
                batch = {"image": self.images, "label": fine[1]}
                found = found + self.federation.loss_terms(batch, fine[0])
                self.last_loss = found.detach()
            return found

        return loss

    def train(self, round_):
        """One round."""
        self.past = (round_.number - 1) * self.epochs - self.current_epoch
        self.num_epochs = self.current_epoch + self.epochs
        self.optimizer.state.clear()
        np.random.seed(round_.seed % 2**32)
        self.run_training()
        self.set_deep_supervision_enabled(False)  # the site's own scores are of the finest output

    def on_train_start(self):
        """Open the data once, not in every round."""
        if self.dataloader_train is None:
            super().on_train_start()
        self.set_deep_supervision_enabled(self.enable_deep_supervision)

    def on_train_end(self):
        """Leave the data open for the next round."""

    def on_train_epoch_start(self):
        """The rate of the round, also where this site was not in every one."""
        super().on_train_epoch_start()
        self.lr_scheduler.step(self.current_epoch + self.past)

    def train_step(self, batch):
        """nnU-Net's step, of images that the methods have changed."""
        self.images = torch.stack([changed(image, self.federation.transform) for image in batch["data"]])
        return super().train_step({**batch, "data": self.images})

    def validation_step(self, batch):
        """The same for a validation patch."""
        transform = self.federation.evaluation_transform
        images = torch.stack([changed(image, transform) for image in batch["data"]])
        return super().validation_step({**batch, "data": images})


def model_folder(run, out):
    """Write a run's selected model for `nnUNetv2_predict_from_modelfolder`, as fold `all`."""
    results = json.loads((Path(run) / "results.json").read_text())
    config = RunConfig.from_dict(results["config"])
    out = Path(out)
    (out / "fold_all").mkdir(parents=True)
    (out / "plans.json").write_text(json.dumps(nnunet_plans(config)))
    (out / "dataset.json").write_text(json.dumps(nnunet_dataset(config)))
    checkpoint = {
        "network_weights": torch.load(Path(run) / "global_model.pt", weights_only=True),
        "trainer_name": "nnUNetTrainer",
        "init_args": {"configuration": "federation"},
        "inference_allowed_mirroring_axes": tuple(range(config.plan.spatial_dims)),
    }
    torch.save(checkpoint, out / "fold_all/checkpoint_final.pth")


def main():
    """Train in the rounds of the federation."""
    config = client.settings()
    with tempfile.TemporaryDirectory(prefix="nnunet-") as folder:
        for part in ("raw", "preprocessed", "results"):
            os.environ[f"nnUNet_{part}"] = str(Path(folder) / part)
        os.environ.setdefault("nnUNet_n_proc_DA", "0")  # loaders of their own where the site says so
        prepared = Prepared(config, Path(folder) / "preprocessed")
        federation = client.join(
            samples=prepared,
            score=lambda network, split: prepared.score(network, split, federation.evaluation_transform),
        )
        trainer = FederatedTrainer(
            prepared.plans, "federation", 0, prepared.dataset_json, device=federation.device
        )
        trainer.join(federation, config)
        for round_ in federation:
            trainer.train(round_)


if __name__ == "__main__":
    main()
