"""Plan of a federation from its sites' fingerprints, by rules with a reason for each step.

The rules follow nnU-Net (Isensee et al., Nature Methods 2021, supplementary note 2) as far as possible
without images: the median spacing is the target, an axis that is much coarser and much shorter in voxels gets
the 10 % quantile, the patch is the median volume on that grid, reduced until training fits into memory, and
the batch grows only if the patch covers the volume.

Differences from nnU-Net:

- No case leaves a site. nnU-Net resamples the size of each case to the target and takes the median; here each
  site takes the median of its cases' extents in mm, which is equivalent for one target, and the plan uses the
  weighted median of the sites' medians. Sizes in voxels are never mixed with the edges of another protocol.
- Memory is not compared with constants measured on one GPU: the planner counts the tensors that the network
  keeps for the backward pass of the patch.
- The job chooses the network. A patch is a multiple of the network's divisor along each axis; the depth of
  `unet` and `dynunet` is an argument, and their strides follow from the patch.
- There is no cascade. Intensities are clipped to the weighted medians of the sites' quantiles, where nnU-Net
  has quantiles of all cases' voxels; for channels without names, ``--intensity`` applies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import nibabel
import torch

from medfedaug.config.plan import Plan, PlanningConfig
from medfedaug.config.run import RunConfig
from medfedaug.data.dataset_json import unseen_note
from medfedaug.errors import ConfigError, config_errors
from medfedaug.federation.planning.fingerprint import is_ct, outlines_differ
from medfedaug.functional.means import capped_weights
from medfedaug.methods.base import Payload
from medfedaug.models import build_network
from medfedaug.models.networks import size_multiple, supervises

_ANISOTROPIC = 3.0  # least ratio of spacings for separate treatment of the coarse axis
_LARGEST_SHARE = 0.45  # of a site in medians over sites, so that no site exceeds a half
_ALIKE = 0.01  # relative tolerance of equal edges
_FEW_SLICES = 8  # volumes with fewer slices get a plan in 2D
_MOST_SAMPLES, _MOST_PATCHES = 16, 8
_USUAL_MULTIPLE = 16
_SMALLEST_FEATURE_MAP = 4
_MOST_POOLINGS = 5
_FIRST_WIDTH, _MOST_CHANNELS = 32, 320
_BY_CHANNEL = ("normalisation", "ct_intensities")

_built: dict[str, torch.nn.Module] = {}  # the last network: most tried patches use the same


@dataclass(frozen=True)
class Planned:
    """A plan with its reasons.

    Args:
        changes: changed fields of `medfedaug.config.run.RunConfig`: the plan, the batch size and, if they
            depend on the patch, arguments of the network.
        reasons: pairs of a decision and its reason.
    """

    changes: dict[str, Any]
    reasons: list[tuple[str, str]]

    def configure(self, config: RunConfig) -> RunConfig:
        """Return the run with this plan."""
        return replace(config, **self.changes, planning=None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Planned:
        """Read a result of `to_dict`."""
        changes = {k: Plan.from_dict(v) if k == "plan" else v for k, v in values["changes"].items()}
        return cls(changes, [(what, why) for what, why in values["reasons"]])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        changes = {k: v.to_dict() if isinstance(v, Plan) else v for k, v in self.changes.items()}
        return {"changes": changes, "reasons": [list(pair) for pair in self.reasons]}


def make_plan(sites: Mapping[str, Payload], config: RunConfig) -> Planned:
    """Make a plan from the sites' fingerprints.

    Args:
        sites: `medfedaug.federation.planning.fingerprint.fingerprint` of each site that trains, by name.
        config: the run; its ``planning`` has the memory, and the settings to keep.
    """
    decided = _Decisions(config)
    prints = [payload for _, payload in sorted(sites.items())]
    claimed = {site: float(payload["cases"][0]) for site, payload in sorted(sites.items())}
    # Of two sites nobody can tell which one exaggerates.
    cases = list(capped_weights(claimed, _LARGEST_SHARE if len(sites) > 2 else None).values())
    located = all(bool((payload["spacing"] > 0).all()) for payload in prints)
    if not located:
        prints = [_in_voxels(payload) for payload in prints]
    extent = _median([payload["extent"][1] for payload in prints], cases)
    target, target_why = _spacing(prints, cases, extent)
    size = extent / target
    summary = f"{len(sites)} sites with {sum(claimed.values()):.0f} training cases; "
    if located:
        summary += f"the median volume is {_by(extent)} mm, {_by(size.round())} voxels of {_by(target)} mm"
    else:
        summary += f"the median volume has {_by(size)} voxels; some do not say of what size"
    decided.reasons.append(("fingerprint", summary))
    for site, payload in sorted(sites.items()):
        shares = zip(config.classes[1:], payload["foreground"].tolist(), strict=True)
        if unseen := [name for name, share in shares if share == 0]:
            decided.reasons.append((f"site {site}", unseen_note(unseen, "no sampled label map")))
    dims, orientation = _axes_of_plan(decided, size, target, located=located)
    # Fingerprints have the axes R, A and S; from here on the plan's axes apply.
    axes = nibabel.orientations.axcodes2ornt(tuple(orientation or "RAS"))[:, 0]
    order = [int(axis) for axis in axes]
    extent, target = extent[order], target[order]
    spacing, why = None, "some volumes do not say how large their voxels are"
    if located:
        spacing, why = tuple(target.tolist()), target_why
        if all(torch.allclose(f["spacing"].double()[:, order], target, rtol=_ALIKE) for f in prints):
            spacing, why = None, f"all volumes have voxels of {_by(target)} mm"
    spacing = decided.settle("spacing", spacing, why)
    if spacing is not None and located:
        target = torch.tensor(spacing, dtype=torch.float64)
    words, numbers, why = _normalisation(prints, cases, config, located=located)
    normalisation = decided.settle("normalisation", words, why)
    if normalisation != words:
        numbers = config.plan.ct_intensities
    elif numbers:
        why = "the sites' weighted medians of their foreground's own"
        numbers = decided.settle("ct_intensities", numbers, why)
    fields = {
        "spatial_dims": dims,
        "orientation": orientation,
        "spacing": spacing,
        "normalisation": normalisation,
        "ct_intensities": numbers,
    }
    goal = [max(1, round(float(n))) for n in (extent / target)[:dims]]
    return Planned(_sizes(decided, fields, goal), decided.reasons)


class _Decisions:
    """Decisions over the fields of a plan, each with its reason; given fields stay."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.planning = config.planning or PlanningConfig()
        self.given = set(self.planning.given)
        self.reasons: list[tuple[str, str]] = []

    def settle(self, name: str, value: Any, why: str) -> Any:
        if name in self.given:
            value, why = getattr(self.config.plan, name), "given"
        text = _text(value, separator=", " if name in _BY_CHANNEL else " x ")
        self.reasons.append((f"{name} {text}", why))
        return value


def _axes_of_plan(
    decided: _Decisions, size: torch.Tensor, target: torch.Tensor, *, located: bool
) -> tuple[int, str | None]:
    slices = round(float(size.min()))
    flat = slices < _FEW_SLICES
    number = f"fewer than {_FEW_SLICES}" if flat else f"at least {_FEW_SLICES}"
    why = f"the median volume has {slices} slices, {number}"
    dims = decided.settle("spatial_dims", 2 if flat else 3, why)
    orientation, why = None, "some volumes do not say how they lie"
    if located:
        orientation, why = _orientation(dims, size, target)
    return dims, decided.settle("orientation", orientation, why)


def _sizes(decided: _Decisions, fields: Mapping[str, Any], goal: list[int]) -> dict[str, Any]:
    """Decide over patch and batch by the memory of a training step; return the run's changes."""
    config, given, dims = decided.config, decided.given, int(fields["spatial_dims"])
    supervised = supervises(config.network)
    has = "several heads" if supervised else "one output"
    supervised = decided.settle("deep_supervision", supervised, f"{config.network} has {has}")
    config = replace(config, plan=replace(config.plan, deep_supervision=supervised))
    args, limit, batch = dict(config.network_args), decided.planning.memory * 2**30, 2
    if "patch_size" in given:
        patch: tuple[int, ...] = decided.settle("patch_size", None, "")
    else:
        patch, args, why = _patch(goal, config, dims, args, limit, batch)
        decided.settle("patch_size", patch, why)
    if "batch_size" in given:
        batch, why = config.batch_size, "given"
    else:
        covered = all(p >= n for p, n in zip(patch, goal, strict=True))
        why = "the smallest, for the sake of the patch"
        if covered or dims == 2:
            single, double = (_bytes(config, args, dims, patch, count) for count in (1, 2))
            batch = max(batch, min(_MOST_SAMPLES, 1 + int((limit - single) / (double - single))))
            why = "as large as memory allows"
            why += ", since a patch covers the volume" if covered else f", at most {_MOST_SAMPLES}"
    decided.reasons.append((f"batch_size {batch}", why))
    needed = _bytes(config, args, dims, patch, batch) / 2**30
    why = f"of {decided.planning.memory:g} GiB, for weights, gradients and kept features"
    decided.reasons.append((f"memory {needed:.2f} GiB", why))
    per_volume, why = 1, "of each slice"
    if dims == 3:
        per_volume = max(1, min(_MOST_PATCHES, round(math.prod(goal) / math.prod(patch))))
        why = f"as many as it takes to cover the median volume once, at most {_MOST_PATCHES}"
    per_volume = decided.settle("patches_per_volume", per_volume, why)
    plan = replace(config.plan, **fields, patch_size=patch, patches_per_volume=per_volume)
    changes: dict[str, Any] = {"plan": plan, "batch_size": batch}
    if args != config.network_args:
        changes["network_args"] = args
        decided.reasons.append((f"network_args {args}", "the depth follows from the patch"))
    return changes


def _normalisation(
    prints: Sequence[Payload], cases: list[float], config: RunConfig, *, located: bool
) -> tuple[tuple[str, ...] | None, tuple[float, ...] | None, str]:
    """Return the normalisation of each channel by its name, the numbers for ``ct``, and the reason."""
    names = config.channel_names
    if config.intensity != RunConfig().intensity:
        return None, None, f"--intensity {config.intensity} is asked for"
    if not names:
        return None, None, "channels have no names: channel_names in dataset.json would say the modality"
    if not located:
        return None, None, "some images do not say how large their voxels are, as photographs"
    words, numbers, lacking = [], [], []
    # Some sites may have outlined only lungs, whose range would clip the bones of others.
    wide = outlines_differ(prints)
    for index, name in enumerate(names):
        rows = [(summary["ct"][index], number) for summary, number in zip(prints, cases, strict=True)]
        known = [(row, number) for row, number in rows if row[0] < row[1] and row[3] > 0]
        if is_ct(name) and known:
            words.append("ct")
            summary = _median(*map(list, zip(*known, strict=True)))
            if wide:
                ends = torch.stack([row[:2] for row, _ in known])
                summary[0], summary[1] = ends[:, 0].min(), ends[:, 1].max()
            numbers += [round(float(value), 4) for value in summary]
        else:
            words.append("z_score")
            lacking += [name] if is_ct(name) else []
    why = "; ".join(f"{name}: {word}" for name, word in zip(names, words, strict=True))
    why += "; clipped to the range of all sites, which outlined different classes" if wide and numbers else ""
    why += f"; no site's foreground has more than one intensity in {', '.join(lacking)}" if lacking else ""
    return tuple(words), tuple(numbers) or None, why


def _orientation(dims: int, size: torch.Tensor, edges: torch.Tensor) -> tuple[str, str]:
    """Return the orientation and its reason: RAS, or for slices the axis across them last."""
    why = "all volumes say how they lie"
    across, last = int(edges.argmax()), 2
    if dims == 2 and size.min() < _FEW_SLICES:
        last = int(size.argmin())
    elif dims == 2 and float(edges[across] / edges[last]) > 1 + _ALIKE:
        last = across
    if last == 2:
        return "RAS", why
    others = [axis for axis in range(3) if axis != last]
    return "".join("RAS"[axis] for axis in (*others, last)), f"{why}, and slices are cut across the last axis"


def _in_voxels(fingerprint: Payload) -> Payload:
    """Convert a fingerprint to lengths in the site's own voxels."""
    edges = fingerprint["spacing"]
    known = edges.where(edges > 0, 1.0)
    return {**fingerprint, "extent": fingerprint["extent"] / known, "spacing": torch.ones_like(edges)}


def _spacing(prints: Sequence[Payload], cases: list[float], extent: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return the target spacing, (3,), and its reason, for the median ``extent``.

    The rule for anisotropic data with its two conditions is nnU-Net's ``determine_fullres_target_spacing``.
    """
    target = _median([payload["spacing"][1] for payload in prints], cases)
    why = "the median over the sites of their own medians, weighted by cases"
    size, axis = extent / target, int(target.argmax())
    others = [a for a in range(3) if a != axis]
    coarse = float(target[axis]) > _ANISOTROPIC * float(target[others].max())
    if coarse and float(size[axis]) * _ANISOTROPIC < float(size[others].min()):
        fine = _median([payload["spacing"][0] for payload in prints], cases)
        target[axis] = max(float(fine[axis]), float(target[others].max()))
        why += f"; along {'xyz'[axis]}, more than {_ANISOTROPIC:g} times coarser, the 10 % quantile"
    return target.apply_(lambda edge: round(edge, 4)), why


def training_bytes(network: torch.nn.Module, shape: tuple[int, ...]) -> int:
    """Return the bytes of a training step: weights, gradients, Adam's moments, features of the backward pass.

    Counts the gradient of the largest feature map in addition to all features, since the backward pass begins
    near it. Excludes the constant memory of libraries, about a third of a GiB in a process on a CPU.
    """
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(torch.empty(shape, device="meta"))
    features = [t.untyped_storage().nbytes() for key, t in kept.items() if key not in parameters]
    result: int = sum(features) + max(features, default=0) + 4 * sum(p.nbytes for p in network.parameters())
    return result


def _bytes(config: RunConfig, args: dict[str, Any], dims: int, patch: tuple[int, ...], batch: int) -> int:
    network = _network(config, args, dims, patch)
    with config_errors(f"network {config.network} does not take a batch of {batch} of {_by(patch)} voxels"):
        return training_bytes(network, (batch, config.in_channels, *patch))


def _network(config: RunConfig, args: dict[str, Any], dims: int, patch: Sequence[int]) -> torch.nn.Module:
    network = [config.network, config.plan.deep_supervision, config.in_channels, config.num_classes]
    key = json.dumps([network, dims, args], sort_keys=True)
    if key in _built:
        return _built[key]
    _built.clear()
    with suppress(ConfigError):
        _built[key] = _build(config, args, dims)
        return _built[key]
    # Some networks have a fixed image size.
    multiple = [-(-n // _USUAL_MULTIPLE) * _USUAL_MULTIPLE for n in patch]
    return _build(config, args, dims, image_size=tuple(multiple))


def _build(config: RunConfig, args: dict[str, Any], dims: int, **more: Any) -> torch.nn.Module:
    with config_errors(f"network {config.network}"), torch.device("meta"):
        return build_network(
            config.network,
            in_channels=config.in_channels,
            out_channels=config.num_classes,
            **{"supervised": config.plan.deep_supervision, **args, **more, "spatial_dims": dims},
        )


def _patch(
    goal: list[int], config: RunConfig, dims: int, args: dict[str, Any], limit: float, batch: int
) -> tuple[tuple[int, ...], dict[str, Any], str]:
    """Reduce the longest axis, relative to the volume, until a training step fits."""
    size, per_voxel = list(goal), 0.0
    while True:
        fitted = _with_depth(config, size, args)
        multiple = size_multiple(_network(config, fitted, dims, size), dims)
        patch = tuple(max(m, -(-n // m) * m) for n, m in zip(size, multiple, strict=True))
        # Counting is slow: skipped if the last bytes per voxel do not fit.
        fits = per_voxel * math.prod(patch) * batch <= limit
        if fits:
            needed = _bytes(config, fitted, dims, patch, batch)
            fits, per_voxel = needed <= limit, needed / math.prod(patch) / batch
        if fits:
            whole = all(p >= n for p, n in zip(patch, goal, strict=True))
            why = "the median volume" + ("" if whole else ", cut along its longest axes to fit into memory")
            return patch, fitted, f"{why}; a multiple of {_by(multiple)}, as the network needs"
        longest = max(range(dims), key=lambda a: (patch[a] > multiple[a], patch[a] / goal[a], patch[a]))
        if patch[longest] <= multiple[longest]:
            raise ConfigError(
                f"not even patches of {_by(patch)} voxels fit into {limit / 2**30:g} GiB with "
                f"{config.network}; allow more memory, or take a smaller network"
            )
        size[longest] = patch[longest] - multiple[longest]


def _with_depth(config: RunConfig, size: list[int], args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with strides for a network of variable depth, which halve axes down to four voxels."""
    if config.network not in ("unet", "dynunet") or args.keys() & {"strides", "channels", "filters"}:
        return args
    left, strides = list(size), []
    for _ in range(_MOST_POOLINGS):
        step = [2 if n / 2 >= _SMALLEST_FEATURE_MAP and n * 2 >= max(left) else 1 for n in left]
        if 2 not in step:
            break
        left = [-(-n // s) for n, s in zip(left, step, strict=True)]
        strides.append(step)
    widths = [min(_FIRST_WIDTH * 2**level, _MOST_CHANNELS) for level in range(len(strides) + 1)]
    if config.network == "unet":
        return {**args, "channels": widths, "strides": strides}
    kernels = [[3] * len(size)] * len(widths)
    return {
        **args,
        "filters": widths,
        "strides": [[1] * len(size), *strides],
        "kernel_size": kernels,
        "upsample_kernel_size": strides,
    }


def _median(values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Return the weighted median of each component: the least value with half of the weight up to it."""
    table, weight = torch.stack(values).double(), torch.tensor(weights, dtype=torch.float64)
    order = table.argsort(dim=0)
    shares = weight[order].cumsum(dim=0) / weight.sum()
    place = (shares >= 0.5).to(torch.int8).argmax(dim=0)
    return table.gather(0, order).gather(0, place[None])[0]


def _by(values: Any) -> str:
    return " x ".join(f"{float(value):.4g}" for value in values)


def _text(value: Any, separator: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, tuple):
        return "none" if value is None else str(value)
    return separator.join(entry if isinstance(entry, str) else f"{float(entry):.4g}" for entry in value)
