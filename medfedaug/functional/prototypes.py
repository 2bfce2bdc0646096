"""Distances and clusters that bring the features of a class together (FRAug, FPL, FedSR)."""

import math

import torch
from torch import Tensor

from medfedaug.functional.passes import working_precision


def gaussian_mmd(x: Tensor, y: Tensor, bandwidth: float | Tensor) -> Tensor:
    """Squared maximum mean discrepancy of two samples (Gretton et al., JMLR 2012; FRAug Eq. 5 and 6).

    ::

        E[k(x, x′)] + E[k(y, y′)] − 2 E[k(x, y)],   k(a, b) = exp(−‖a − b‖² / (2 s²))

    The means are over all pairs, including those of an element with itself, so that the value is never
    negative and a sample may have one element, as where there is one prototype per class. (MONAI's
    `MMDMetric` is the unbiased estimate with a linear kernel; it needs two of each, and no mapping of finite
    width makes it Gaussian.)

    Args:
        x: one sample, (N, D).
        y: the other, (M, D).
        bandwidth: s, in units of `x`, positive.

    Returns:
        A scalar in [0, 2].

    Deviations:
        The paper names the distance and not the kernel or its width.

    Example:
        >>> a = torch.tensor([[0.0], [1.0]])
        >>> float(gaussian_mmd(a, a, 1.0)), round(float(gaussian_mmd(a, a + 100.0, 1.0)), 3)
        (0.0, 1.607)
    """
    both = torch.cat([working_precision(x), working_precision(y)])
    kernel = torch.exp((both[:, None] - both[None]).square().sum(dim=2) / (-2.0 * bandwidth**2))
    n = x.shape[0]
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2.0 * kernel[:n, n:].mean()


def ramp_up(step: int, length: int) -> float:
    """The exponential ramp-up ``exp(−5(1 − t)²)``, t = step / length, at most 1.

    Laine and Aila, "Temporal ensembling for semi-supervised learning", 2017, to which FRAug refers.

    Args:
        step: number of steps made so far.
        length: number of steps after which the value is 1; 0 for 1 from the start.

    Example:
        >>> [round(ramp_up(step, 100), 3) for step in (0, 50, 100, 150)]
        [0.007, 0.287, 1.0, 1.0]
    """
    if length <= 0 or step >= length:
        return 1.0
    return math.exp(-5.0 * (1.0 - step / length) ** 2)


def gaussian_kl(mean: Tensor, std: Tensor, other_mean: Tensor, other_std: Tensor) -> Tensor:
    """Kullback-Leibler divergence of Gaussians with diagonal covariance (FedSR's KL(p(z|x) || r(z|y))).

    ::

        Σ_d [log(σ′_d / σ_d) + (σ_d² + (μ_d − μ′_d)²) / (2 σ′_d²) − 1/2]

    Args:
        mean: μ, (N, D).
        std: σ, (N, D), positive.
        other_mean: μ′, (N, D).
        other_std: σ′, (N, D), positive.

    Returns:
        The divergence of each pair, (N,).

    Example:
        >>> one = torch.ones(1, 2)
        >>> float(gaussian_kl(one, one, one, one)), float(gaussian_kl(one, one, one - 2.0, one))
        (0.0, 4.0)
    """
    variances = (std.square() + (mean - other_mean).square()) / (2.0 * other_std.square())
    return (torch.log(other_std / std) + variances - 0.5).sum(dim=1)


def directions(x: Tensor) -> Tensor:
    """Rows scaled to length one; a row of zeros stays, with a finite gradient."""
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / torch.where(length > 0, length, torch.ones_like(length))


def first_neighbours(x: Tensor) -> Tensor:
    """Clusters of vectors that are linked by nearest neighbours: the first partition of FINCH.

    Sarfraz et al., CVPR 2019, Eq. 1 (FPL Eq. 4): with vᵢ the other element that is most similar to
    i by the cosine, the clusters are the connected components of ::

        A(i, j) = 1 if j = vᵢ or i = vⱼ or vᵢ = vⱼ

    Two elements that share a neighbour are connected through it, so that the edges ``(i, vᵢ)`` are
    enough. Every cluster has at least two elements, unless there is only one element.

    Args:
        x: one vector per row, (N, D).

    Returns:
        The number of each vector's cluster, (N,), counted from 0 in the order in which clusters appear.

    Example:
        >>> first_neighbours(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]]))
        tensor([0, 1, 0, 1])
    """
    similarity = directions(x.double())
    similarity = (similarity @ similarity.T).fill_diagonal_(-math.inf)
    clusters = list(range(len(x)))
    for i, j in enumerate(similarity.argmax(dim=1).tolist()):
        first, second = sorted((clusters[i], clusters[j]))
        clusters = [first if cluster == second else cluster for cluster in clusters]
    numbers: Tensor = torch.tensor(clusters).unique(return_inverse=True)[1]
    return numbers


def prototype_contrast(
    z: Tensor, labels: Tensor, prototypes: Tensor, classes: Tensor, temperature: float
) -> Tensor:
    """Contrast of features with the prototypes of their own class and of the others (FPL Eq. 7 and 8).

    ::

        −log((Σ_(c∈Pʸ) e^(s(z,c))) / (Σ_(c∈P) e^(s(z,c)))),
        s(z, c) = (z · c) / (‖z‖ ‖c‖ τ)

    Args:
        z: features, (B, D).
        labels: their classes, (B,); each must have a prototype.
        prototypes: one or more per class, (J, D).
        classes: the prototypes' classes, (J,).
        temperature: τ.

    Returns:
        The loss of each feature, (B,); 0 where there is no prototype of another class.

    Deviations:
        As printed, Eq. 7 could be read as multiplying by the temperature; here it divides, as in the public
        code.

    Example:
        >>> prototypes, classes = torch.eye(2), torch.tensor([0, 1])
        >>> prototype_contrast(torch.tensor([[2.0, 2.0]]), torch.tensor([0]), prototypes, classes, 0.1)
        tensor([0.6931])
    """
    work = working_precision(z)
    similarity = directions(work) @ directions(prototypes.to(work)).T / temperature
    own = similarity.masked_fill(labels[:, None] != classes, -math.inf)
    return (similarity.logsumexp(dim=1) - own.logsumexp(dim=1)).to(z.dtype)
