"""`ways_to_predict`: from saying 0 to lines and nearest federations, ways to predict a gain from features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import numpy as np
from scipy.optimize import nnls

__all__ = ["GainRows", "Nearest", "Predictor", "Way", "distance_to_nearest", "ways_to_predict"]

_PENALTIES = (100.0, 30.0, 10.0, 3.0, 1.0)
_NEAREST = 8
_LEAST_SCALE = 1e-6
_TOLD = 0.005
"""Change of a gain by a deviation of a feature below which a line's slope is not mentioned."""


@dataclass(frozen=True)
class GainRows:
    """Measured gains.

    Attributes:
        x: features, (N, F).
        y: gains, (N,).
        variances: of the gains, by the number of test patients, (N,).
        families: of each row, (N,).
        federations: of each row, (N,).
    """

    x: np.ndarray
    y: np.ndarray
    variances: np.ndarray
    families: np.ndarray
    federations: np.ndarray

    @cached_property
    def weights(self) -> np.ndarray:
        """Weights with which every federation counts once."""
        _, inverse, counts = np.unique(self.federations, return_inverse=True, return_counts=True)
        return np.asarray(1.0 / counts[inverse])

    @cached_property
    def number(self) -> int:
        """The number of federations."""
        return len(set(self.federations.tolist()))

    @cached_property
    def mean(self) -> float:
        """The mean gain of the federations."""
        return float(np.average(self.y, weights=self.weights))

    @cached_property
    def standard(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation of each feature over the federations, (F,); 1 for one that never varies."""
        w = self.weights / self.weights.sum()
        middle = w @ self.x
        scale = np.sqrt(w @ (self.x - middle) ** 2)
        return middle, np.where(scale > _LEAST_SCALE, scale, 1.0)

    @cached_property
    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums over the federations of products of standardised features, (F, F), and with gains, (F,)."""
        middle, scale = self.standard
        z = (self.x - middle) / scale
        weighted = z.T * (self.weights * self.number / self.weights.sum())
        return weighted @ z, weighted @ (self.y - self.mean)

    @cached_property
    def without_each(self) -> list[tuple[GainRows, np.ndarray]]:
        """For each family the rows of all others, and the mask of its own, (N,).

        Federations take the place of families where there is one family alone.
        """
        groups = self.families if len(set(self.families.tolist())) > 1 else self.federations
        masks = [groups == group for group in dict.fromkeys(groups.tolist())]
        return [(self.among(~there), there) for there in masks]

    def among(self, kept: np.ndarray) -> GainRows:
        """Keep rows by a mask."""
        return GainRows(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))

    def left_out(self, use: Callable[[GainRows, np.ndarray], np.ndarray]) -> np.ndarray:
        """Compute for each row a number of the rows of all other families, (N,): ``use(others, x)``."""
        found = np.zeros(len(self.y))
        for others, there in self.without_each:
            found[there] = use(others, self.x[there])
        return found


class Predictor(Protocol):
    """Predicts gains (M,) from features (M, F), and says of what."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Predict."""

    def explain(self, names: Sequence[str]) -> str:
        """Explain the prediction, with the names of the features."""


@dataclass(frozen=True)
class Constant:
    """The same gain, whatever the sites are like."""

    gain: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Predict."""
        return np.full(len(x), self.gain)

    def explain(self, names: Sequence[str]) -> str:
        """Explain."""
        return "always 0" if self.gain == 0 else f"always the mean of all federations, {self.gain:+.3f}"


@dataclass(frozen=True)
class Line:
    """A linear function of standardised features, within the range of the gains that were measured."""

    middle: np.ndarray
    scale: np.ndarray
    slopes: np.ndarray
    intercept: float
    range: tuple[float, float]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Predict."""
        found = self.intercept + ((x - self.middle) / self.scale) @ self.slopes
        return np.asarray(np.clip(found, *self.range))

    def explain(self, names: Sequence[str]) -> str:
        """Explain."""
        order = sorted(range(len(names)), key=lambda k: -abs(self.slopes[k]))
        told = [f"{names[k]} {self.slopes[k]:+.3f}" for k in order if abs(self.slopes[k]) >= _TOLD]
        slopes = f"and by a deviation of {', '.join(told)}" if told else f"whose slopes are below {_TOLD}"
        return f"a line: {self.intercept:+.3f}, {slopes}"


@dataclass(frozen=True)
class Nearest:
    """The mean gain of the nearest federations, by the distance of standardised features."""

    rows: GainRows = field(repr=False)
    number: int

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Predict."""
        order = np.argsort(_apart(self.rows, x), axis=1, kind="stable")
        weights, gains = self.rows.weights[order], self.rows.y[order]
        used = weights * (np.cumsum(weights, axis=1) - weights < self.number - 1e-9)
        return np.asarray((used * gains).sum(axis=1) / used.sum(axis=1))

    def explain(self, names: Sequence[str]) -> str:
        """Explain."""
        return f"the mean of the {self.number} nearest federations"


@dataclass(frozen=True)
class Way:
    """A way to predict.

    Attributes:
        name: for a table.
        fit: makes a predictor of measured gains.
    """

    name: str
    fit: Callable[[GainRows], Predictor]


def ways_to_predict(signs: Sequence[int]) -> tuple[Way, ...]:
    """The ways that are tried, the simplest first: 0, the mean, lines of less and less penalty, neighbours.

    Args:
        signs: by feature, 1 where the gain cannot fall with it, -1 where it cannot rise, 0 where it can do
            either.
    """
    return (
        Way("0", lambda rows: Constant(0.0)),
        Way("mean", lambda rows: Constant(rows.mean)),
        *(Way(f"line, {penalty:g}", partial(_line, signs=signs, penalty=penalty)) for penalty in _PENALTIES),
        Way("nearest", partial(Nearest, number=_NEAREST)),
    )


def distance_to_nearest(rows: GainRows, x: np.ndarray) -> np.ndarray:
    """Distance of each of x (M, F) from the nearest row: deviations, root mean square over the features."""
    return np.asarray(_apart(rows, x).min(axis=1))


def _apart(rows: GainRows, x: np.ndarray) -> np.ndarray:
    middle, scale = rows.standard
    ours, theirs = (x - middle) / scale, (rows.x - middle) / scale
    squares = (ours**2).sum(axis=1)[:, None] + (theirs**2).sum(axis=1)[None] - 2 * ours @ theirs.T
    return np.asarray(np.sqrt(np.maximum(squares, 0) / x.shape[1]))


def _line(rows: GainRows, signs: Sequence[int], penalty: float) -> Line:
    r"""Monotone ridge regression, of which every federation counts once.

    With z the standardised features and w the weights, which add up to the number of federations, it
    minimises :math:`\sum_i w_i (y_i - \bar y - z_i \cdot \beta)^2 + \lambda |\beta|^2` over the slopes
    :math:`\beta` with the given signs, as non-negative least squares.
    """
    gram, moment = rows.moments
    # A slope of either sign is the difference of two that are not negative.
    columns = [(k, sign) for k, given in enumerate(signs) for sign in ((given,) if given else (1, -1))]
    places, turns = np.array(columns).T
    products = np.outer(turns, turns) * gram[np.ix_(places, places)] + penalty * np.eye(len(columns))
    root = np.linalg.cholesky(products)
    found = nnls(root.T, np.linalg.solve(root, turns * moment[places]))[0]
    slopes = np.zeros(len(signs))
    np.add.at(slopes, places, turns * found)
    ends = float(rows.y.min()), float(rows.y.max())
    return Line(*rows.standard, slopes, rows.mean, ends)
