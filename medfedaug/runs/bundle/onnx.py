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
    """Export the network, run the file with ONNX Runtime, and compare.

    The number of images is free, and so are their sizes where no window and no image size fixes them, as
    multiples of what the network takes.

    Returns:
        A sentence that says what came of it.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--onnx needs {', '.join(missing)}; pip install 'medfedaug[onnx]'")
    import onnxruntime

    smallest = tuple(plain.example.shape[2:])
    free = {} if plain.fixed_size else {axis + 2: n * Dim(f"size{axis}") for axis, n in enumerate(smallest)}
    # Of two images, each axis of its own size: what is alike in the example would be taken to be so always.
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
        seen = torch.rand(1, *plain.example.shape[1:])  # another number, and where they are free other sizes
        (found,) = session.run(["pred"], {"image": seen.numpy()})
        with torch.no_grad():
            wanted = plain.network(seen)
    except Exception as error:  # an exporter fails in many ways
        path.unlink(missing_ok=True)
        return f"The network does not export to ONNX ({first_line(error)}); the bundle has none."
    apart = float((torch.from_numpy(found) - wanted).abs().max() / wanted.abs().max())
    if not apart <= TOLERANCE:
        path.unlink(missing_ok=True)
        return (
            f"ONNX Runtime is {apart:.1e} of the largest logit apart from the network, and {TOLERANCE:g} is "
            "allowed; the bundle has no ONNX file."
        )
    by = " x ".join(map(str, smallest))
    return (
        f"`models/model.onnx` is the network alone, for images of {by}"
        + ("" if plain.fixed_size else ", or of multiples along each axis")
        + f": on random numbers ONNX Runtime is {apart:.1e} of the largest logit apart from it, and "
        f"{TOLERANCE:g} is allowed."
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter prints of its progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
