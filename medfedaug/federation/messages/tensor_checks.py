"""Checks of tensors and models: shapes, dtypes, finite values, variances, length of a step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medfedaug.errors import UpdateRefused
from medfedaug.methods.base import Shapes

# Above all intensities of scanners and weights of a working network, and far within float32.
LARGEST = 1e10
# The largest step of a sound training, as a multiple of the norm of the weights.
_LARGEST_MOVE = 100.0
_NOBODY_KNOWS = (
    ". With fewer than three updates nobody can say who is wrong: this site, or one that moved the model "
    "before"
)
# `is_floating_point` also accepts 8-bit formats, for which PyTorch has almost no operators.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class StateDictValidator:
    """Checks the sent entries of a site's model."""

    def __init__(self, network: nn.Module, sent: Sequence[str]) -> None:
        state = network.state_dict()
        self.shapes: Shapes = {key: tuple(state[key].shape) for key in sent}
        self.parameters = {name for name, _ in network.named_parameters()} & set(sent)
        self.variances = _variances(network) & set(sent)
        self._kinds = {"parameters": self.parameters, "buffers": self.shapes.keys() - self.parameters}

    def check(
        self, site: str, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], *, buffers: bool = False
    ) -> dict[str, float]:
        """Check a model after a round; return the lengths of its steps.

        Args:
            buffers: whether buffers are compared with those of the global model. The first round has no
                running statistics to compare with, and a comparison with other sites is better
                (`medfedaug.federation.server.outlier_checks.judge_steps`).
        """
        self.check_values(site, weights)
        steps = self.steps(weights, state)
        for what in ("parameters", "buffers") if buffers else ("parameters",):
            norm = _length(self._root(key, state[key]) for key in self._kinds[what])
            allowed = _LARGEST_MOVE * max(norm, 1.0)
            if steps[what] > allowed:
                doubt = _NOBODY_KNOWS if site and what == "buffers" else ""
                expected = f"a step of norm up to {allowed:.4g}"
                raise UpdateRefused(site, what, expected=expected, got=f"{steps[what]:.4g}{doubt}")
        return steps

    def check_values(self, site: str, weights: Mapping[str, Tensor]) -> None:
        """Check a model's entries, without a comparison."""
        check_tensors(site, weights, self.shapes)
        for key in sorted(self.variances):
            if bool((weights[key] < 0).any()):
                raise UpdateRefused(site, key, expected="a variance, 0 or above", got="a negative one")

    def steps(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the lengths of a checked model's step, of parameters and of buffers.

        Variances count by their square roots, so that one length covers means and standard deviations.
        """
        return {
            what: _length(self._root(k, weights[k]) - self._root(k, state[k]) for k in sorted(keys))
            for what, keys in self._kinds.items()
        }

    def norm(self, state: Mapping[str, Tensor]) -> float:
        """Return the norm of a model's parameters, at least 1."""
        return max(_length(state[key] for key in self.parameters), 1.0)

    def carried(
        self,
        weights: Mapping[str, Tensor],
        start: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        factor: float,
    ) -> dict[str, Tensor]:
        """Carry the step of a checked model over to a later global model, and shorten it.

        w + s (wₖ − w₀) for parameters. Running statistics are averages and no steps: they move from those of
        the later model towards the site's, by the same factor.

        Args:
            weights: wₖ, the model's entries.
            start: w₀, the global model from which the site trained.
            state: w, the present global model.
            factor: s, from 0 to 1.
        """
        carried = {}
        for key, end in weights.items():
            now = state[key].double()
            if key in self.parameters:
                moved = now + factor * (end.double() - start[key].double())
            else:
                first = self._root(key, now)
                moved = first + factor * (self._root(key, end.double()) - first)
                moved = moved.square() if key in self.variances else moved
            carried[key] = moved.float()
        return carried

    def _root(self, key: str, value: Tensor) -> Tensor:
        return value.sqrt() if key in self.variances else value


def _length(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all tensors together."""
    return math.hypot(*(float(tensor.norm()) for tensor in tensors))


def check_tensors(site: str, tensors: Mapping[str, Any], shapes: Shapes | None = None) -> None:
    """Check that values are floating point, finite and below `LARGEST`, and keys and shapes if given."""
    for key in tensors:
        if shapes is not None and key not in shapes:
            raise UpdateRefused(site, repr(key)[:80], expected="no such entry", got="one")
    for key in tensors if shapes is None else shapes:
        value, shape = tensors.get(key), None if shapes is None else shapes[key]
        if not isinstance(value, Tensor):
            expected = "a tensor" if shape is None else f"a tensor of shape {tuple(shape)}"
            got = "none" if value is None else type(value).__name__
            raise UpdateRefused(site, repr(key)[1:-1][:80], expected=expected, got=got)
        # Otherwise (1,) would broadcast silently into (4,).
        if shape is not None and not fits(tuple(value.shape), shape):
            raise UpdateRefused(site, key, expected=f"shape {tuple(shape)}", got=f"{tuple(value.shape)}")
        _check_value(site, key, value)


def _check_value(site: str, key: str, value: Tensor) -> None:
    if value.dtype not in _DTYPES or value.layout is not torch.strided:
        expected = "floating point of 16, 32 or 64 bits"
        raise UpdateRefused(site, key, expected=expected, got=f"{value.dtype}, {value.layout}")
    if not value.numel():
        return
    low, high = (float(edge) for edge in torch.aminmax(value))  # a NaN anywhere makes both NaN
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~torch.isfinite(value)).sum())
        raise UpdateRefused(
            site, key, expected="finite values", got=f"{bad} of {value.numel()} NaN or infinite"
        )
    if max(-low, high) > LARGEST:
        raise UpdateRefused(site, key, expected=f"values up to {LARGEST:g}", got=f"{max(-low, high):g}")


def fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Return whether a shape is as expected; ``None`` in ``expected`` stands for any positive length.

    >>> fits((3, 4), (None, 4)), fits((0, 4), (None, 4)), fits((3, 4), (None, 5))
    (True, False, False)
    """
    return len(shape) == len(expected) and all(
        n > 0 if wanted is None else n == wanted for n, wanted in zip(shape, expected, strict=True)
    )


def _variances(network: nn.Module) -> set[str]:
    """Return the keys of norm layers' running variances, by module type."""
    return {
        f"{prefix}.running_var" if prefix else "running_var"
        for prefix, module in network.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_var is not None
    }
