"""`clean_pixels`: remove everything but the values of an image from the pixels of an object."""

from __future__ import annotations

import numpy as np
from pydicom import Dataset
from pydicom.encaps import encapsulate
from pydicom.uid import ExplicitVRLittleEndian, RLELossless

from medfedaug.data.io.codestreams import without_comments
from medfedaug.data.io.dicom_pixels import compressed_frames, expected_bytes, stored_frames, syntax_of
from medfedaug.data.io.pixel_format import PixelFormat


def clean_pixels(dataset: Dataset) -> None:
    """Remove bytes after the pixels, bits that no value uses, and comments in compressed images, in place.

    Values stay the same; RLE is written anew.
    """
    syntax = syntax_of(dataset)
    if syntax == RLELossless:
        _write_rle_anew(dataset)
    elif syntax.is_encapsulated:
        dataset.PixelData = encapsulate([without_comments(image) for image in compressed_frames(dataset)])
    else:
        if not syntax.is_little_endian and dataset["PixelData"].VR == "OW" and dataset.BitsAllocated == 8:
            # Words of swapped bytes: the bytes after the image are last only in the order of the image.
            dataset.PixelData = np.frombuffer(dataset.PixelData, np.uint16).byteswap().tobytes()
            dataset["PixelData"].VR = "OB"
        data = dataset.PixelData[: expected_bytes(dataset)]
        data = _without_unused_bits(dataset, data, little=syntax.is_little_endian)
        dataset.PixelData = data + b"\0" * (len(data) % 2)


def _write_rle_anew(dataset: Dataset) -> None:
    values = stored_frames(dataset)
    form = PixelFormat.of(dataset)
    if form.colour:  # the decoded values are RGB
        dataset.PhotometricInterpretation, dataset.PlanarConfiguration = "RGB", 0
    kind = f"{'i' if form.signed else 'u'}{form.allocated // 8}"
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.PixelData = values.astype(f"<{kind}").tobytes()
    dataset.compress(RLELossless, generate_instance_uid=False)


def _without_unused_bits(dataset: Dataset, data: bytes, *, little: bool) -> bytes:
    """Return pixels whose unused bits repeat the sign, or are 0."""
    form = PixelFormat.of(dataset)
    if form.allocated == 1:
        count = int(dataset.get("NumberOfFrames") or 1) * form.rows * form.columns
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little")
        return np.packbits(bits, bitorder="little").tobytes()
    unused = form.allocated - form.stored
    if not unused:
        return data
    kind = f"{'<' if little else '>'}{'i' if form.signed else 'u'}{form.allocated // 8}"
    values = np.frombuffer(data, kind)
    return ((values << unused) >> unused).astype(kind).tobytes()
