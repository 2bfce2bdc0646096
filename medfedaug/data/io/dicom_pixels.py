"""Voxels of DICOM files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pydicom
import SimpleITK as sitk
from pydicom.pixels import get_decoder
from pydicom.uid import UID

from medfedaug.data.io.dicom_headers import DicomInstance, DicomSlice, read_instance, reason_of
from medfedaug.errors import ReaderError

__all__ = ["decode", "read_gdcm", "undecodable"]

# Compressed syntaxes that SimpleITK's GDCM decodes; others are decoded by pydicom's plugins.
_BY_GDCM = {
    *("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2", "1.2.840.10008.1.2.1.99"),
    *(f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91)),
    "1.2.840.10008.1.2.5",
}


def undecodable(instance: DicomInstance) -> str:
    """Why the voxels of a file cannot be decoded; empty where they can."""
    if instance.frames > len(instance.slices):
        return "all its slices are in one file, which does not say where each lies"
    if instance.syntax in _BY_GDCM:
        return ""
    name = UID(instance.syntax).name
    try:
        decoder = get_decoder(UID(instance.syntax))
    except NotImplementedError:
        return f"compressed as {name}, which nothing here can read; have it sent uncompressed"
    return "" if decoder.is_available else _needs(name, decoder.missing_dependencies)


def _needs(name: str, missing: Sequence[str]) -> str:
    package = missing[0].rpartition("requires ")[2] if missing else "a plugin of pydicom"
    packages = [part.partition(">")[0] for part in package.split(" and ")]
    remedy = f"pip install {' '.join(packages)}"
    return f"compressed as {name}, which needs packages that are not installed: {remedy}"


def read_gdcm(files: Sequence[Path], colour: bool) -> sitk.Image | None:
    """An image of one file or of several as slices; ``None`` where pydicom has to decode them.

    Raises:
        RuntimeError: where GDCM cannot read files that pydicom cannot read either.
    """
    syntaxes = {read_instance(file).syntax for file in files}
    if not syntaxes <= _BY_GDCM:
        return None
    # As floating point, since each slice may have a slope of its own (PET).
    pixel = sitk.sitkVectorFloat32 if colour else sitk.sitkFloat32
    names = [str(file) for file in files]
    shown = sitk.ProcessObject.GetGlobalWarningDisplay()
    sitk.ProcessObject.SetGlobalWarningDisplay(False)  # of slices that are sheared it would print a line
    try:
        return sitk.ReadImage(names if len(names) > 1 else names[0], pixel)
    except RuntimeError:
        if all(UID(syntax).is_compressed and get_decoder(UID(syntax)).is_available for syntax in syntaxes):
            return None
        raise
    finally:
        sitk.ProcessObject.SetGlobalWarningDisplay(shown)


def decode(file: Path, slices: Sequence[DicomSlice]) -> np.ndarray:
    """All frames of a file, rescaled."""
    colour = slices[0].channels > 1
    if len({piece.rescale for piece in slices}) == 1:  # GDCM has one slope for all frames
        image = read_gdcm([file], colour)
        if image is not None:
            found = sitk.GetArrayFromImage(image)
            return found if found.ndim == (4 if colour else 3) else found[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = pydicom.dcmread(file, force=True)
        try:
            stored = np.asarray(dataset.pixel_array, dtype=np.float64)
        except Exception as error:  # a plugin's own, or that there is none
            syntax = UID(read_instance(file).syntax)
            missing = [] if (decoder := get_decoder(syntax)).is_available else decoder.missing_dependencies
            raise ReaderError(_needs(syntax.name, missing) if missing else reason_of(error)) from error
        slope, intercept = float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))
    if dataset.get("PhotometricInterpretation") == "MONOCHROME1":  # as GDCM has it
        stored = (-1 if dataset.PixelRepresentation else 2**dataset.BitsStored - 1) - stored
    result = stored if stored.ndim == (4 if colour else 3) else stored[None]
    for piece in slices:
        factor, offset = piece.rescale or (slope, intercept)
        result[piece.frame] = result[piece.frame] * factor + offset
    return result.astype(np.float32)
