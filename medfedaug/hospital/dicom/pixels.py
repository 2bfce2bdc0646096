"""Read the voxels of DICOM files; check pixels against the header before and after they are decoded.

Decoders trust headers: GDCM fills up short pixels with memory of its process. So pydicom reads uncompressed
pixels and RLE. Images of other compressions go one by one to SimpleITK's GDCM, each in an object that holds
its description and nothing else; pydicom's plugins read the images that GDCM cannot.
"""

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
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

from medfedaug.errors import ReaderError, translated
from medfedaug.hospital.dicom.checks import PixelFormat, reading, require
from medfedaug.hospital.dicom.headers import DicomInstance, DicomSlice, units_of

# Syntaxes of JPEG, lossless JPEG, JPEG-LS and JPEG 2000, which SimpleITK's GDCM decodes.
_BY_GDCM = {f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91)}
_OVERLAY_BIT = 0x0102
_JP2_START, _J2K_START, _JPEG_START, _END = b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51", b"\xff\xd8", b"\xff\xd9"
_JPEG_FRAMES = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}  # markers of segments with the size


def undecodable(instance: DicomInstance) -> str:
    """Return the reason why the voxels of a file cannot be decoded; empty where they can."""
    if instance.frames > len(instance.slices):
        return "all its slices are in one file, which does not say where each lies"
    if instance.syntax in _BY_GDCM:
        return ""
    name = UID(instance.syntax).name
    try:
        decoder = get_decoder(UID(instance.syntax))
    except NotImplementedError:
        return f"compressed as {name}, which nothing here can read; have it sent uncompressed"
    if decoder.is_available:
        return ""
    requirements = decoder.missing_dependencies[0].rpartition("requires ")[2].split(" and ")
    packages = " ".join(requirement.partition(">")[0] for requirement in requirements)
    return f"compressed as {name}, which needs packages that are not installed: pip install {packages}"


def read_slices(slices: Sequence[DicomSlice]) -> np.ndarray:
    """Read voxels in the units of their modality, float32: (Z, Y, X), or in colour (Z, Y, X, C).

    Each slice is rescaled by its own slope and intercept, as in PET, or by the modality LUT of its file.
    Values of MONOCHROME1 without a unit are inverted first. A `ReaderError` names the file last, after
    ``; look at``.
    """
    by_file: dict[Path, list[int]] = defaultdict(list)
    for index, piece in enumerate(slices):
        by_file[piece.file].append(index)
    voxels: np.ndarray | None = None
    for file, places in by_file.items():
        number = slices[places[0]].number
        try:
            intensities = _intensities(file, [slices[index] for index in places])
        except ReaderError as error:
            image = f" (image {number})" if number is not None else ""
            raise ReaderError(f"{error}{image}: fetch or export it again; look at {file.name}") from error
        if voxels is None:
            voxels = np.empty((len(slices), *intensities.shape[1:]), np.float32)
        voxels[places] = intensities
    assert voxels is not None
    return voxels


def _intensities(file: Path, slices: Sequence[DicomSlice]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that break the standard
        with reading("its pixels cannot be decoded"):
            dataset = pydicom.dcmread(file, force=True)
            stored, form = stored_frames(dataset), PixelFormat.of(dataset)
            values = stored[[piece.frame for piece in slices]].astype(np.float64)
            if form.inverted and not units_of(dataset):
                values = form.lowest + form.highest - values
            if dataset.get("ModalityLUTSequence"):
                values = _by_modality_lut(dataset, form, values)
    axes = (1,) * (values.ndim - 1)
    slope, intercept = (
        np.reshape(values, (-1, *axes)) for values in zip(*(p.rescale for p in slices), strict=True)
    )
    with np.errstate(over="ignore"):
        result = (values * slope + intercept).astype(np.float32)
    require(np.isfinite(result).all(), "its voxels are not finite once they are rescaled")
    return result


def _by_modality_lut(dataset: Dataset, form: PixelFormat, values: np.ndarray) -> np.ndarray:
    """Map values by the table of a header, PS3.3 C.11.1."""
    table, *more = dataset.ModalityLUTSequence
    entries = int(table.LUTDescriptor[0]) or 2**16
    data = table.LUTData
    # Bytes hold 8 or 16 bits an entry.
    fits = len(data) in ((entries, 2 * entries) if isinstance(data, bytes) else (entries,))
    require(fits and not more, f"its modality LUT has not the {entries} entries that its header says")
    rescaled = (dataset.get("RescaleSlope", 1), dataset.get("RescaleIntercept", 0)) != (1, 0)
    require(
        not (form.inverted or form.colour or rescaled),
        "its header has a modality LUT beside MONOCHROME1, colours or a slope",
    )
    return np.asarray(apply_modality_lut(values.astype(np.int64), dataset), np.float64)


def stored_frames(dataset: Dataset) -> np.ndarray:
    """Decode the stored values of an object: (frames, rows, columns), in colour (..., 3) as RGB."""
    require("PixelData" in dataset, "it has no pixels, or its file breaks off within them")
    form, syntax, frames = (
        PixelFormat.of(dataset),
        syntax_of(dataset),
        int(dataset.get("NumberOfFrames") or 1),
    )
    require(
        form.photometric != "PALETTE COLOR" or dataset.get("SegmentationType") == "LABELMAP",
        "its pixels are colours of a palette, and no intensities",
    )
    if syntax.is_encapsulated:
        images = _compressed_frames(dataset, form, frames)
        pixels = np.stack([_decompressed(image, form, syntax) for image in images])
    else:
        _check_length(dataset, form, frames)
        pixels = _by_pydicom(dataset, syntax)
        pixels = pixels[None] if frames == 1 else pixels
    pixels = _stored_values(dataset, form, pixels)
    require(
        form.lowest <= pixels.min() and pixels.max() <= form.highest,
        f"its pixels have values beyond the {form.stored} bits of its header (BitsStored)",
    )
    return pixels


def syntax_of(dataset: Dataset) -> UID:
    """Return the transfer syntax of an object as read; the standard's default where it has none."""
    return UID(str(dataset.file_meta.get("TransferSyntaxUID") or ImplicitVRLittleEndian))


def _compressed_frames(dataset: Dataset, form: PixelFormat, frames: int) -> list[bytes]:
    """Return the compressed images of an object, each whole and of the size in the header."""
    tables = dataset.get("ExtendedOffsetTable"), dataset.get("ExtendedOffsetTableLengths")
    offsets = (tables[0], tables[1]) if tables[0] and tables[1] else None
    with reading("its compressed pixels are damaged"):
        encoded = [*generate_frames(dataset.PixelData, number_of_frames=frames, extended_offsets=offsets)]
    # Some programs store JPEG 2000 with the header of a file.
    images = [i[max(0, i.find(_J2K_START)) :] if i.startswith(_JP2_START) else i for i in encoded]
    require(
        len(images) == frames,
        f"its pixels hold {len(images)} images, and its header says {frames} (NumberOfFrames)",
    )
    if syntax_of(dataset) != RLELossless:
        for image in images:
            _check_codestream(image, form)
    return images


def _check_codestream(image: bytes, form: PixelFormat) -> None:
    *sizes, bits = _described(image)
    expected = (form.columns, form.rows, form.samples)
    require(
        tuple(sizes) == expected,
        f"its compressed pixels are {_sizes(sizes)}, and its header says {_sizes(expected)}",
    )
    require(
        bits <= form.allocated,
        f"its compressed pixels have {bits} bits, and its header {form.allocated} (BitsAllocated)",
    )


def _described(image: bytes) -> tuple[int, int, int, int]:
    """Return columns, rows, samples and bits of a compressed image that is complete.

    A decoder takes the size from the compressed data, and fills up what is missing. ITU-T T.81 Annex B
    (JPEG), T.87 Annex C (JPEG-LS), T.800 Annex A (JPEG 2000).
    """

    def number(at: int, count: int) -> int:
        return int.from_bytes(image[at : at + count], "big")

    known = image.startswith((_J2K_START, _JPEG_START))
    require(known, "its compressed pixels are neither JPEG nor JPEG 2000")
    require(_END in image[-8:], "its compressed pixels break off")
    if image.startswith(_J2K_START):
        columns, rows = number(8, 4) - number(16, 4), number(12, 4) - number(20, 4)
        return columns, rows, number(40, 2), number(42, 1) % 128 + 1
    at = 2
    while at < len(image) and number(at + 1, 1) not in _JPEG_FRAMES:
        at += 2 + number(at + 2, 2)
    return number(at + 7, 2), number(at + 5, 2), number(at + 9, 1), number(at + 4, 1)


def _check_length(dataset: Dataset, form: PixelFormat, frames: int) -> None:
    """Check the length of uncompressed pixels; some programs fill them up with zeros."""
    length, expected = len(dataset.PixelData), get_expected_length(dataset, unit="bytes")
    filling = dataset.PixelData[expected:]
    excess = len(filling) > 1 and (any(filling) or len(filling) >= expected // frames)
    require(
        length >= expected and not excess,
        f"its pixels are {length} bytes, and {_sizes((frames, form.columns, form.rows, form.samples))} of "
        f"{form.allocated} bits are {expected}",
    )


def _stored_values(dataset: Dataset, form: PixelFormat, pixels: np.ndarray) -> np.ndarray:
    """Return the values of the stored bits; the other bits repeat the sign, are 0, or hold an overlay."""
    unused = 8 * pixels.dtype.itemsize - form.stored
    if form.allocated == 1 or not unused:
        return pixels
    values = (pixels << unused) >> unused
    same = (pixels == values) | (pixels == (values & (2**form.stored - 1)))
    overlay = any(tag.group & 0xFF01 == 0x6000 and tag.element == _OVERLAY_BIT for tag in [*dataset.keys()])
    return values if overlay or same.all() else pixels


def _by_pydicom(dataset: Dataset, syntax: UID) -> np.ndarray:
    options: dict[str, Any] = {"allow_excess_frames": False, "correct_unused_bits": False}
    pixels, _ = get_decoder(syntax).as_array(dataset, **options)
    return pixels


def _decompressed(image: bytes, form: PixelFormat, syntax: UID) -> np.ndarray:
    dataset = _image_object(image, form, syntax)
    problem = f"its pixels cannot be decoded as {syntax.name}"
    with translated(RuntimeError, to=lambda error: ReaderError(problem)):
        if syntax in _BY_GDCM:
            with suppress(RuntimeError):
                return _by_gdcm(dataset)
        return _by_pydicom(dataset, syntax)


def _image_object(image: bytes, form: PixelFormat, syntax: UID) -> Dataset:
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.SOPClassUID, dataset.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    dataset.Rows, dataset.Columns, dataset.SamplesPerPixel = form.rows, form.columns, form.samples
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = form.allocated, form.stored, form.stored - 1
    dataset.PixelRepresentation = int(form.signed)
    # GDCM would invert MONOCHROME1, too.
    dataset.PhotometricInterpretation = form.photometric if form.colour else "MONOCHROME2"
    if form.colour:
        dataset.PlanarConfiguration = 0
    dataset.PixelData = encapsulate([image])
    dataset["PixelData"].VR = "OB"
    return dataset


def _by_gdcm(dataset: Dataset) -> np.ndarray:
    import SimpleITK as sitk

    warnings_shown = sitk.ProcessObject.GetGlobalWarningDisplay()
    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    try:
        with tempfile.NamedTemporaryFile(suffix=".dcm") as file:
            pydicom.dcmwrite(file, dataset, enforce_file_format=True)
            file.flush()
            pixels: np.ndarray = sitk.GetArrayFromImage(sitk.ReadImage(file.name))
    finally:
        sitk.ProcessObject.SetGlobalWarningDisplay(warnings_shown)
    return pixels[0]


def _sizes(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
