"""Voxels of DICOM files: header and pixels are compared before they are decoded, and the result after.

Decoders trust headers: where pixels are short, GDCM fills up an image with memory of its process. So pydicom
reads what is not compressed, and RLE. Of other compressed data each image by itself is given to SimpleITK's
GDCM, in an object that holds its description and nothing else; pydicom's plugins read what GDCM cannot.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.pixels import apply_modality_lut, get_decoder
from pydicom.pixels.utils import get_expected_length
from pydicom.uid import UID, ImplicitVRLittleEndian, RLELossless, SecondaryCaptureImageStorage, generate_uid

from medfedaug.data.io.codestreams import describe, unwrapped
from medfedaug.data.io.dicom_headers import DicomInstance, DicomSlice
from medfedaug.data.io.pixel_format import PixelFormat
from medfedaug.errors import ReaderError, first_line

# Syntaxes of JPEG, lossless JPEG, JPEG-LS and JPEG 2000, which SimpleITK's GDCM decodes.
_BY_GDCM = {f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91)}
_OVERLAY_BIT = 0x0102


def undecodable(instance: DicomInstance) -> str:
    """Return why the voxels of a file cannot be decoded; empty where they can."""
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


def read_slices(slices: Sequence[DicomSlice]) -> np.ndarray:
    """Read the voxels of slices in the units of their modality.

    Each slice is rescaled by its own slope and intercept, as in PET, or by the modality LUT of its file.
    Where the lowest value is white (MONOCHROME1), values are inverted first.

    Returns:
        (Z, Y, X), or in colour (Z, Y, X, C), float32.

    Raises:
        ReaderError: for pixels that contradict their header, or cannot be decoded; names the file last, after
            ``; look at``.
    """
    by_file: dict[Path, list[int]] = defaultdict(list)
    for index, piece in enumerate(slices):
        by_file[piece.file].append(index)
    voxels: np.ndarray | None = None
    for file, places in by_file.items():
        number = slices[places[0]].number
        try:
            found = _intensities(file, [slices[index] for index in places])
        except ReaderError as error:
            image = f" (image {number})" if number is not None else ""
            raise ReaderError(f"{error}{image}: fetch or export it again; look at {file.name}") from error
        if voxels is None:
            voxels = np.empty((len(slices), *found.shape[1:]), np.float32)
        voxels[places] = found
    assert voxels is not None
    return voxels


def _intensities(file: Path, slices: Sequence[DicomSlice]) -> np.ndarray:
    """The slices of one file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are not as the standard has them
        try:
            dataset = pydicom.dcmread(file, force=True)
            stored, form = stored_frames(dataset), PixelFormat.of(dataset)
            values = stored[[piece.frame for piece in slices]].astype(np.float64)
            if form.inverted:
                values = form.lowest + form.highest - values
            if dataset.get("ModalityLUTSequence"):
                values = _by_modality_lut(dataset, form, values)
        except ReaderError:
            raise
        except Exception as error:  # a damaged object fails anywhere in pydicom
            raise ReaderError(f"its pixels cannot be decoded ({first_line(error)})") from error
    axes = (1,) * (values.ndim - 1)
    slope, intercept = (
        np.reshape(one, (-1, *axes)) for one in zip(*(p.rescale for p in slices), strict=True)
    )
    with np.errstate(over="ignore"):
        result = (values * slope + intercept).astype(np.float32)
    if not np.isfinite(result).all():
        raise ReaderError("its voxels are not finite once they are rescaled")
    return result


def _by_modality_lut(dataset: Dataset, form: PixelFormat, values: np.ndarray) -> np.ndarray:
    """Values by the table of a header, PS3.3 C.11.1."""
    table, *more = dataset.ModalityLUTSequence
    entries = int(table.LUTDescriptor[0]) or 2**16
    data = table.LUTData
    # Bytes hold 8 or 16 bits an entry.
    fits = len(data) in ((entries, 2 * entries) if isinstance(data, bytes) else (entries,))
    if more or not fits:
        raise ReaderError(f"its modality LUT has not the {entries} entries that its header says")
    rescaled = (dataset.get("RescaleSlope", 1), dataset.get("RescaleIntercept", 0)) != (1, 0)
    if form.inverted or form.colour or rescaled:
        raise ReaderError("its header has a modality LUT beside MONOCHROME1, colours or a slope")
    return np.asarray(apply_modality_lut(values.astype(np.int64), dataset), np.float64)


# --- Stored values ---------------------------------------------------------------------------------------


def stored_frames(dataset: Dataset) -> np.ndarray:
    """Decode the pixels of an object as they are stored.

    Returns:
        (frames, rows, columns), or in colour (frames, rows, columns, 3) as RGB; whole numbers.

    Raises:
        ReaderError: for pixels that contradict their header.
        Exception: of a decoder.
    """
    if "PixelData" not in dataset:
        raise ReaderError("it has no pixels, or its file breaks off within them")
    form, syntax, frames = PixelFormat.of(dataset), syntax_of(dataset), _number_of_frames(dataset)
    if form.photometric == "PALETTE COLOR" and dataset.get("SegmentationType") != "LABELMAP":
        raise ReaderError("its pixels are colours of a palette, and no intensities")
    if syntax.is_encapsulated:
        found = np.stack([_decompressed(image, form, syntax) for image in compressed_frames(dataset)])
    else:
        _check_length(dataset, form, frames)
        found = _by_pydicom(dataset, syntax)
        found = found[None] if frames == 1 else found
    found = _values_of_bits(dataset, form, found)
    if found.shape != (frames, *form.shape):
        raise ReaderError(
            f"its pixels are {_sizes(found.shape)}, and its header says {_sizes((frames, *form.shape))}"
        )
    if found.min() < form.lowest or found.max() > form.highest:
        raise ReaderError(f"its pixels have values beyond the {form.stored} bits of its header (BitsStored)")
    return found


def syntax_of(dataset: Dataset) -> UID:
    """Return the transfer syntax of an object as it was read; the standard's default where it has none."""
    meta = getattr(dataset, "file_meta", None)
    return UID(str((meta.get("TransferSyntaxUID") if meta is not None else "") or ImplicitVRLittleEndian))


def expected_bytes(dataset: Dataset) -> int:
    """Return the length of uncompressed pixels by their header, without the byte that fills up an odd one."""
    return get_expected_length(dataset, unit="bytes")


def compressed_frames(dataset: Dataset) -> list[bytes]:
    """Return the compressed images of an object, each whole and of the size that the header says."""
    form, frames = PixelFormat.of(dataset), _number_of_frames(dataset)
    tables = dataset.get("ExtendedOffsetTable"), dataset.get("ExtendedOffsetTableLengths")
    offsets = (tables[0], tables[1]) if tables[0] and tables[1] else None
    try:
        found = [*generate_frames(dataset.PixelData, number_of_frames=frames, extended_offsets=offsets)]
    except ValueError as error:
        raise ReaderError(f"its compressed pixels are damaged ({first_line(error)})") from error
    found = [unwrapped(image) for image in found]
    if len(found) != frames:
        raise ReaderError(
            f"its pixels hold {len(found)} images, and its header says {frames} (NumberOfFrames)"
        )
    if syntax_of(dataset) != RLELossless:
        for image in found:
            _check_codestream(image, form)
    return found


def _check_codestream(image: bytes, form: PixelFormat) -> None:
    found, own = describe(image), (form.columns, form.rows, form.samples)
    if (found.columns, found.rows, found.samples) != own:
        said = _sizes((found.columns, found.rows, found.samples))
        raise ReaderError(f"its compressed pixels are {said}, and its header says {_sizes(own)}")
    if found.bits > form.allocated:
        raise ReaderError(
            f"its compressed pixels have {found.bits} bits, and its header {form.allocated} (BitsAllocated)"
        )


def _number_of_frames(dataset: Dataset) -> int:
    return int(dataset.get("NumberOfFrames") or 1)


def _check_length(dataset: Dataset, form: PixelFormat, frames: int) -> None:
    """Check the length of uncompressed pixels; some programs fill them up with zeros."""
    found, expected = len(dataset.PixelData), expected_bytes(dataset)
    filling = dataset.PixelData[expected:]
    more = len(filling) > 1 and (any(filling) or len(filling) >= expected // frames)
    if found < expected or more:
        raise ReaderError(
            f"its pixels are {found} bytes, and {_sizes((frames, form.columns, form.rows, form.samples))} of "
            f"{form.allocated} bits are {expected}"
        )


def _values_of_bits(dataset: Dataset, form: PixelFormat, found: np.ndarray) -> np.ndarray:
    """Values of the bits that are used; the others repeat the sign, are 0, or hold an overlay."""
    unused = 8 * found.dtype.itemsize - form.stored
    if form.allocated == 1 or not unused:
        return found
    values = (found << unused) >> unused
    same = (found == values) | (found == (values & (2**form.stored - 1)))
    overlay = any(tag.group & 0xFF01 == 0x6000 and tag.element == _OVERLAY_BIT for tag in [*dataset.keys()])
    if not overlay and not same.all():
        raise ReaderError(f"its pixels have values beyond the {form.stored} bits of its header (BitsStored)")
    return values


def _by_pydicom(dataset: Dataset, syntax: UID) -> np.ndarray:
    options: dict[str, Any] = {"allow_excess_frames": False, "correct_unused_bits": False}
    found, _ = get_decoder(syntax).as_array(dataset, **options)
    return found


def _decompressed(image: bytes, form: PixelFormat, syntax: UID) -> np.ndarray:
    """One compressed image, as stored."""
    alone = _alone(image, form, syntax)
    if syntax in _BY_GDCM:
        try:
            return _by_gdcm(alone)
        except RuntimeError as error:
            if not get_decoder(syntax).is_available:
                raise _damaged(syntax) from error
    try:
        return _by_pydicom(alone, syntax)
    except RuntimeError as error:
        raise _damaged(syntax) from error


def _damaged(syntax: UID) -> ReaderError:
    return ReaderError(f"its pixels cannot be decoded as {syntax.name}")


def _alone(image: bytes, form: PixelFormat, syntax: UID) -> Dataset:
    """An object that holds one compressed image and its description, and nothing else."""
    found = Dataset()
    found.file_meta = FileMetaDataset()
    found.file_meta.TransferSyntaxUID = syntax
    found.SOPClassUID, found.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    found.Rows, found.Columns, found.SamplesPerPixel = form.rows, form.columns, form.samples
    found.BitsAllocated, found.BitsStored, found.HighBit = form.allocated, form.stored, form.stored - 1
    found.PixelRepresentation = int(form.signed)
    # GDCM would invert it, too.
    found.PhotometricInterpretation = form.photometric if form.colour else "MONOCHROME2"
    if form.colour:
        found.PlanarConfiguration = 0
    found.PixelData = encapsulate([image])
    found["PixelData"].VR = "OB"
    return found


def _by_gdcm(dataset: Dataset) -> np.ndarray:
    import SimpleITK as sitk

    written = BytesIO()
    pydicom.dcmwrite(written, dataset, enforce_file_format=True)
    shown = sitk.ProcessObject.GetGlobalWarningDisplay()
    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    try:
        with _path_to(written.getbuffer()) as path:
            found: np.ndarray = sitk.GetArrayFromImage(sitk.ReadImage(path))
    finally:
        sitk.ProcessObject.SetGlobalWarningDisplay(shown)
    return found[0]


@contextmanager
def _path_to(content: memoryview) -> Iterator[str]:
    """A path by which a library opens content, which lies in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("image")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{handle}"
    else:
        with tempfile.NamedTemporaryFile(suffix=".dcm") as other:
            other.write(content)
            other.flush()
            yield other.name


def _needs(name: str, missing: Sequence[str]) -> str:
    package = missing[0].rpartition("requires ")[2] if missing else "a plugin of pydicom"
    packages = [part.partition(">")[0] for part in package.split(" and ")]
    remedy = f"pip install {' '.join(packages)}"
    return f"compressed as {name}, which needs packages that are not installed: {remedy}"


def _sizes(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
