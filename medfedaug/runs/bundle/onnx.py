"""The network of a bundle as an ONNX file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.export import Dim

from medfedaug.errors import ConfigError, first_line
from medfedaug.runs.bundle.network import PlainInference

TOLERANCE = 1e-4
"""Largest difference of ONNX Runtime's output from the network's, as a share of the largest logit."""

_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def write_onnx(plain: PlainInference, path: Path) -> str:
    """Export the network, run the file with ONNX Runtime, and return a sentence on the comparison.

    The number of images is free, and so are their sizes, as multiples of the network's smallest size, unless
    a window or an image size fixes them.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--onnx needs {', '.join(missing)}; pip install 'medfedaug[onnx]'")
    import onnxruntime

    smallest = tuple(plain.example.shape[2:])
    free = {} if plain.fixed_size else {axis + 2: n * Dim(f"size{axis}") for axis, n in enumerate(smallest)}
    # Two images, and a different size along each axis: the exporter takes equal sizes for always equal.
    size = smallest if plain.fixed_size else tuple(n * (axis + 2) for axis, n in enumerate(smallest))
    example = torch.rand(2, plain.example.shape[1], *size, generator=torch.Generator().manual_seed(1))
    try:
        with _quiet():
            exported = torch.onnx.export(
                plain.network,
                (example,),
                input_names=["image"],
                output_names=["pred"],
                dynamic_shapes=({0: Dim("images"), **free},),
                dynamo=True,
            )
            assert exported is not None
            exported.save(str(path))
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        images = torch.rand(1, *plain.example.shape[1:])  # another number of images, and other free sizes
        (output,) = session.run(["pred"], {"image": images.numpy()})
        with torch.no_grad():
            expected = plain.network(images)
    except Exception as error:  # an exporter fails in many ways
        path.unlink(missing_ok=True)
        return f"The network does not export to ONNX ({first_line(error)}); the bundle has none."
    difference = float((torch.from_numpy(output) - expected).abs().max() / expected.abs().max())
    distance = f"{difference:.1e} of the largest logit apart from"
    if not difference <= TOLERANCE:
        path.unlink(missing_ok=True)
        return (
            f"ONNX Runtime is {distance} the network, and {TOLERANCE:g} is allowed; the bundle has no ONNX "
            "file."
        )
    sizes = " x ".join(map(str, smallest)) + ("" if plain.fixed_size else ", or of multiples along each axis")
    return (
        f"`models/model.onnx` is the network alone, for images of {sizes}: on random numbers ONNX Runtime is "
        f"{distance} it, and {TOLERANCE:g} is allowed."
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's progress messages."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
