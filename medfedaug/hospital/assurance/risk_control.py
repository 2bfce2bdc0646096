r"""Risk control: the largest threshold at which the expected loss keeps a promise.

A structure's map at a threshold λ has the voxels whose probability is at least λ. The loss L(λ) of a patient,
in [0, 1], is the missed share of the structure: it never falls with λ, and L(0) = 0. The thresholds are
`LEVELS`, fixed before any data.

**In the mean** (conformal risk control, Angelopoulos et al. 2022, arXiv 2208.02814, Theorem 1). With the
losses of n patients, λ̂ is the largest level with

    (Σᵢ Lᵢ(λ) + 1) / (n + 1) ≤ α.

If the n patients and a new one are exchangeable, E L(λ̂) ≤ α. Proof: let λ' be the largest level with Σᵢ
Lᵢ(λ) ≤ α (n + 1) over all n + 1 patients. The new loss is at most 1, so that λ̂ ≤ λ' and E L(λ̂) ≤ E L(λ').
λ' does not depend on the order of the patients, so that E L(λ') is the expectation of the mean of all n + 1
losses at λ', which is at most α.

**With a confidence** 1 - δ (risk-controlling prediction sets, Bates et al. 2021, arXiv 2101.02703; the
p-value of Hoeffding and Bentkus: Learn then Test, Angelopoulos et al. 2021, arXiv 2110.01052). With p(λ) of
the hypothesis E L(λ) > α, λ̂ is the largest level with p(λ) ≤ δ. If the patients are independent, P(E L(λ̂) >
α) ≤ δ. Proof: let λ* be the smallest level with E L > α. p never falls with λ, so that λ̂ ≥ λ* needs p(λ*) ≤
δ, which has at most the probability δ.

A set of classes, those with a probability of at least λ, has the loss 1 where it lacks the true class. The
first rule is then split conformal prediction: the set has the true class with a probability of at least 1 -
α.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from medfedaug.hospital.assurance.options import LESIONS
from medfedaug.utils.plugins import import_extra

LEVELS = np.concatenate([[0.0], 1 / (1 + np.exp(-np.linspace(-20, 20, 401)))]).astype(np.float32)
"""The thresholds, (T,): 0, and 401 evenly spaced in log-odds from -20 to 20, all in single precision."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss and size of a case's map at each of `LEVELS`."""

    loss: np.ndarray  # (T,)
    size: np.ndarray  # (T,), voxels of the map, or classes of the set
    plain_loss: float  # loss of the plain label map, or class
    plain_size: int  # its size
    unit: float = 1.0  # size of a voxel in millilitres; 1 for counts


def structure_curve(
    shares: np.ndarray, predicted: np.ndarray, truth: np.ndarray, risk: str, unit: float = 1.0
) -> Curve:
    """Return the curve of a structure that a case shows.

    A connected part counts as found if at least one of its voxels is in the map; voxels are connected across
    faces, edges and corners.

    Args:
        shares: probabilities of the structure, (X, Y, Z).
        predicted: its plain map, bool.
        truth: its outline, bool, with at least one voxel.
        risk: `VOLUME` or `LESIONS`.
        unit: size of a voxel in millilitres.
    """
    scores, found = shares[truth], predicted[truth]
    if risk == LESIONS:
        parts, number = ndimage.label(truth, np.ones((3,) * truth.ndim))
        numbers = np.arange(1, number + 1)
        scores, found = (np.asarray(ndimage.maximum(of, parts, numbers)) for of in (shares, predicted))
    return Curve(
        1 - _at_least(scores) / len(scores),
        _at_least(shares.ravel()),
        1 - float(np.mean(found > 0)),
        int(predicted.sum()),
        unit,
    )


def class_curve(shares: np.ndarray, truth: int) -> Curve:
    """Return the curve of the set of classes of an image, from its probabilities, (K,)."""
    missed = 1.0 - _at_least(shares[truth : truth + 1])
    return Curve(missed, _at_least(shares), float(shares.argmax() != truth), 1)


def _at_least(values: np.ndarray) -> np.ndarray:
    """Count the values of at least each level, (T,)."""
    levels_below = np.searchsorted(LEVELS, values.astype(np.float32), side="right")
    counts = np.bincount(levels_below, minlength=len(LEVELS) + 1)
    return counts[::-1].cumsum()[::-1][1:]


def fewest(miss: float, confidence: float | None = None) -> int:
    """Return the number of patients below which no level keeps the promise, even without any loss.

    1 / (n + 1) ≤ α in the mean, (1 - α)ⁿ ≤ δ with a confidence 1 - δ.

    Example:
        >>> fewest(0.1), fewest(0.05), fewest(0.1, confidence=0.9)
        (9, 19, 22)
    """
    if confidence is None:
        return math.ceil(1 / miss - 1e-9) - 1
    return math.ceil(math.log(1 - confidence) / math.log(1 - miss) - 1e-9)


def controlled_level(
    losses: np.ndarray, miss: float, confidence: float | None = None, *, binary: bool = False
) -> int | None:
    """Return the index of λ̂ in `LEVELS` for losses of patients, (n, T); ``None`` if no level qualifies.

    ``binary`` says that every loss is 0 or 1, whatever the data: the bound is tighter then.

    Example:
        >>> losses = np.zeros((9, len(LEVELS)))
        >>> controlled_level(losses, 0.1) == len(LEVELS) - 1, controlled_level(losses[:8], 0.1)
        (True, None)
    """
    number = len(losses)
    if not number:
        return None
    if confidence is None:
        kept = losses.sum(axis=0) + 1 <= miss * (number + 1) + 1e-9
    else:
        kept = _p_values(losses, miss, binary) <= 1 - confidence + 1e-12
    return int(kept.sum()) - 1 if kept[0] else None


def _p_values(losses: np.ndarray, miss: float, binary: bool) -> np.ndarray:
    methods = import_extra("mapie.risk_control.methods", "assurance", "--confidence")
    means = np.clip(losses.mean(axis=0), 0, 1)
    p_values = methods.compute_hoeffding_bentkus_p_value(means, len(losses), miss, binary=binary)
    return np.asarray(p_values)[:, 0]
