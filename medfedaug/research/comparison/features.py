"""Alignment, uniformity and pictures of a network's features."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from medfedaug.analysis.plots import colours_by_name, plain_label
from medfedaug.data.base import Case
from medfedaug.federation.site.model import SiteModel
from medfedaug.models.modes import evaluating
from medfedaug.models.stages import find_stage
from medfedaug.research.comparison.case_views import network_inputs

# Entries of a block of the N x N matrix of distances: 8 MB in float64.
_BLOCK_ENTRIES = 2**20
_MOST = 80  # of a site
_MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*", "<", ">")


def alignment(features: Tensor, labels: Tensor, alpha: float = 2.0) -> float:
    """Return the mean distance between features of one class; lower is closer (FedFA+ section 5.4.1).

    ::

        mean over i < j with yᵢ = yⱼ of ‖ẑᵢ − ẑⱼ‖₂^α,   ẑ = z / ‖z‖₂

    Args:
        features: z, (N, D).
        labels: classes, (N,).
        alpha: exponent of the distance.

    Returns:
        A number from 0 to 2 ** alpha, computed in float64. Time grows with the square of the largest class,
        but memory does not.

    Raises:
        ValueError: when shapes do not fit, a feature is zero or not finite, or no class has two features.

    Deviations:
        Wang and Isola (ICML 2020) use pairs of views of one image; the paper uses all pairs of one class. It
        does not say whether classes have equal weights; here every pair has the same weight.

    Example:
        >>> alignment(torch.tensor([[2.0, 0.0], [-3.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
        4.0
    """
    unit = _unit_features(features)
    if labels.shape != unit.shape[:1]:
        raise ValueError(f"expected labels of shape ({len(unit)},), got {tuple(labels.shape)}")
    total, pairs = 0.0, 0
    for label in torch.unique(labels):
        members = unit[labels.to(unit.device) == label.to(unit.device)]
        pairs += len(members) * (len(members) - 1) // 2
        total += sum(float(squared.pow(alpha / 2).sum()) for squared in _squared_distances(members))
    if not pairs:
        raise ValueError("no class has two features")
    return total / pairs


def uniformity(features: Tensor, t: float = 2.0) -> float:
    """Measure the uniformity of features on the sphere; lower is more even (FedFA+ section 5.4.1).

    ::

        log of the mean over i < j of exp(−t ‖ẑᵢ − ẑⱼ‖₂²),   ẑ = z / ‖z‖₂

    Args:
        features: z, (N, D), N at least 2.
        t: inverse width of the Gaussian potential.

    Returns:
        A number from -4t to 0, computed in float64. Time grows with the square of N, but memory does not.

    Raises:
        ValueError: when `features` is not (N, D) with N of 2 or more, or a feature is zero or not finite.

    Example:
        >>> uniformity(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]))
        -8.0
    """
    unit = _unit_features(features)
    if len(unit) < 2:
        raise ValueError(f"expected at least two features, got {len(unit)}")
    # The largest term is factored out, so that a large t does not underflow to log(0).
    logs = [torch.logsumexp(-t * squared, dim=0) for squared in _squared_distances(unit)]
    pairs = torch.tensor(len(unit) * (len(unit) - 1) / 2, dtype=torch.float64)
    return float(torch.logsumexp(torch.stack(logs), dim=0) - pairs.log().to(unit.device))


def _unit_features(features: Tensor) -> Tensor:
    if features.ndim != 2:
        raise ValueError(f"expected features of shape (N, D), got {tuple(features.shape)}")
    # In float64 on every device, since a distance is a difference of nearly equal numbers.
    wide = features.detach().double()
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    bad = torch.nonzero(~(torch.isfinite(norms) & (norms > 0)).flatten()).flatten()
    if len(bad):
        raise ValueError(f"feature {int(bad[0])} is zero or not finite and has no direction")
    return wide / norms


def _squared_distances(unit: Tensor) -> Iterator[Tensor]:
    """Yield the squared distances of all pairs i < j, as one vector per block."""
    rows = max(1, _BLOCK_ENTRIES // max(1, len(unit)))
    for start in range(0, len(unit) - 1, rows):
        block, rest = unit[start : start + rows], unit[start:]
        # The exact distance: for nearly equal features, 2 - 2 cos would lose half of the digits.
        distances = torch.cdist(block, rest, compute_mode="donot_use_mm_for_euclid_dist")
        i, j = torch.triu_indices(len(block), len(rest), offset=1, device=unit.device)
        yield distances[i, j].square()


@dataclass
class SiteFeatures:
    """Features of one network at several sites, an even choice at each site.

    Attributes:
        parts: features of each site, (N, D).
        sites: the name of the site of each feature.
        labels: the class of each feature; empty for segmentation.
    """

    parts: list[Tensor] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def add(self, site: SiteModel, network: nn.Module, cases: Sequence[Case], name: str = "") -> None:
        """Add the features of a site's cases."""
        batches = list(network_inputs(site, cases))
        features = site_features(network, (images for images, _ in batches))
        step = max(1, -(-len(features) // _MOST))
        self.parts.append(features[::step])
        self.sites += [name or site.folder.name] * len(features[::step])
        if site.folder.task == "classification":
            labels = torch.cat([labels for _, labels in batches]).tolist()
            self.labels += [site.config.classes[int(label)] for label in labels[::step]]

    def __len__(self) -> int:
        return len(self.sites)

    def measures(self) -> str:
        """Return alignment, if features have classes, and uniformity, in words."""
        features = torch.cat(self.parts)
        text = f"uniformity {uniformity(features):.3f}"
        if not self.labels:
            return text
        classes = torch.tensor([[*dict.fromkeys(self.labels)].index(label) for label in self.labels])
        return f"alignment {alignment(features, classes):.3f}, {text}"

    def picture(self, method: str, width: float) -> Figure:
        """Draw the features (`feature_picture`)."""
        return feature_picture(torch.cat(self.parts), self.sites, self.labels or None, method, width=width)


@torch.no_grad()
def site_features(network: nn.Module, images: Iterable[Tensor], stage: int | str = -1) -> Tensor:
    """Compute features of a site's images: the output of an encoder stage, averaged over space.

    The network runs in evaluation mode; its mode is restored afterwards.

    Args:
        network: a network with known stages (`medfedaug.models.stages`).
        images: batches, (B, C, *spatial), as the network expects them.
        stage: number, counted from 1, or name of the stage; the last by default.

    Returns:
        The features, (N, channels of the stage), float32 and on the CPU.

    Raises:
        ValueError: when the stages of the network are not known, the stage does not exist (the message lists
            the stages), or without an image.

    Example:
        >>> from medfedaug.models import build_network
        >>> network = build_network("lenet5", in_channels=1, out_channels=2)
        >>> site_features(network, [torch.rand(4, 1, 32, 32), torch.rand(2, 1, 32, 32)]).shape
        torch.Size([6, 16])
    """
    outputs: list[Tensor] = []

    def keep(features: Tensor) -> None:
        outputs.append(features.flatten(2).float().mean(dim=2).cpu())

    hook = find_stage(network, stage).watch(network, keep)
    parameter = next(network.parameters(), None)
    try:
        with evaluating(network):
            for batch in images:
                network(batch if parameter is None else batch.to(parameter.device))
    finally:
        hook.remove()
    if not outputs:
        raise ValueError("no image to compute features of")
    return torch.cat([torch.as_tensor(features).as_subclass(Tensor) for features in outputs])


def feature_picture(
    features: Tensor,
    sites: Sequence[str],
    labels: Sequence[object] | Tensor | None = None,
    method: str = "pca",
    *,
    seed: int = 0,
    width: float = 6.0,
) -> Figure:
    """Draw features in two dimensions, with a colour for each site and a marker for each class.

    Args:
        features: (N, D), N at least 3; the features of several sites one after another.
        sites: the name of the site of each feature, N.
        labels: the class of each feature, N.
        method: "pca", the first two principal components, with their shares of the variance; or
            "tsne", scikit-learn's t-SNE of the normalised features, whose axes have no meaning.
        seed: the seed of t-SNE.
        width: width of the figure, inches.

    Raises:
        ValueError: when the lengths do not fit, or `method` is unknown.
        ImportError: for "tsne" without scikit-learn.

    Example:
        >>> figure = feature_picture(torch.rand(6, 4), ["A", "A", "A", "B", "B", "B"])
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['A', 'B']
    """
    if features.ndim != 2 or len(features) < 3:
        raise ValueError(f"expected features of shape (N, D) with N >= 3, got {tuple(features.shape)}")
    names = [str(site) for site in sites]
    classes = [str(v) for v in (labels.tolist() if isinstance(labels, Tensor) else labels or [])]
    for argument, values in (("sites", names), *([] if labels is None else [("labels", classes)])):
        if len(values) != len(features):
            raise ValueError(f"expected {len(features)} {argument}, got {len(values)}")
    if method == "pca":
        points, axes = _principal_components(features)
    elif method == "tsne":
        points, axes = _tsne(features, seed), ("t-SNE 1", "t-SNE 2")
    else:
        raise ValueError(f"unknown method {method!r}: 'pca' or 'tsne'")
    figure = Figure(figsize=(width, 0.8 * width), layout="constrained")
    panel = figure.add_subplot()
    kinds = sorted(set(classes)) or [""]
    # The order does not depend on the site, since the last site would cover the others.
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0)).tolist()
    colours = colours_by_name(names)
    for kind, marker in zip(kinds, cycle(_MARKERS), strict=False):
        chosen = [i for i in order if not classes or classes[i] == kind]
        panel.scatter(
            points[chosen, 0].tolist(),
            points[chosen, 1].tolist(),
            c=[colours[names[i]] for i in chosen],
            marker=marker,
            s=22,
            alpha=0.75,
            linewidths=0,
        )
    panel.set_xlabel(axes[0], fontsize=10)
    panel.set_ylabel(axes[1], fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelleft=False, labelbottom=False)  # features have no meaningful units
    panel.grid(color="0.5", alpha=0.25, linewidth=0.6)
    _legend(figure, colours, kinds if classes else [])
    return figure


def _legend(figure: Figure, colours: dict[str, Any], kinds: Sequence[str]) -> None:
    marks = [("o", colour, site) for site, colour in colours.items()]
    marks += [(mark, "0.5", kind) for kind, mark in zip(kinds, cycle(_MARKERS), strict=False)]
    handles = [
        Line2D([], [], color=colour, marker=mark, linestyle="", markersize=5, label=plain_label(name))
        for mark, colour, name in marks
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)


def _principal_components(features: Tensor) -> tuple[Tensor, tuple[str, str]]:
    wide = features.detach().double().cpu()
    centred = wide - wide.mean(dim=0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    # The sign of a component is arbitrary. The largest entry is made positive, so that pictures agree.
    u = u * u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign()
    points = torch.zeros(len(wide), 2, dtype=torch.float64)
    kept = min(2, len(s))
    points[:, :kept] = (u * s)[:, :kept]
    variances = s.square()
    shares = [*(variances / variances.sum().clamp_min(torch.finfo(torch.float64).tiny)).tolist(), 0.0]
    return points, (f"component 1 ({shares[0]:.0%})", f"component 2 ({shares[1]:.0%})")


def _tsne(features: Tensor, seed: int) -> Tensor:
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError(
            "t-SNE needs scikit-learn, which is not installed: pip install 'medfedaug[tsne]', or method='pca'"
        ) from error
    tsne = TSNE(perplexity=min(30.0, (len(features) - 1) / 3), init="pca", random_state=seed)
    return torch.as_tensor(tsne.fit_transform(_unit_features(features).cpu().numpy()))
