"""Damaged and contradicting DICOM series: each is refused in one line, or its voxels are read exactly."""

import numpy as np
import pydicom
import pytest
from dicom_files import sets, write_slices
from pydicom.encaps import encapsulate, generate_frames
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
    generate_uid,
)
from written_volumes import load_volume

from medfedaug.errors import ReaderError

VOXELS = np.random.default_rng(4).integers(-900, 900, (36, 40, 6)).astype(np.int16)
MIDDLE = 2


def lacks(*names):
    def change(header, k):
        for name in names:
            delattr(header, name)

    return change


def pixels(edit):
    def change(header, k):
        header.PixelData = edit(header.PixelData)

    return change


def overlaid(header, k):
    """Hide an overlay in the bits above those that are stored, as the standard once allowed."""
    values = np.frombuffer(header.PixelData, "<u2")
    header.PixelData = (values & 0x0FFF | (values & 1) << 12).tobytes()
    header.add_new(0x60000100, "US", 16)
    header.add_new(0x60000102, "US", 12)
    sets(BitsStored=12, HighBit=11)(header, k)


def table(entries=None, **values):
    """A modality LUT of all values, which turns them into another unit."""

    def change(header, k):
        item = pydicom.Dataset()
        item.LUTDescriptor, item.ModalityLUTType = [entries or 2000, -1000, 16], "US"
        item.LUTData = (3 * np.arange(2000)).astype("<u2").tobytes()
        header.ModalityLUTSequence = [item]
        lacks("RescaleSlope", "RescaleIntercept")(header, k)
        sets(**values)(header, k)

    return change


def inside(edit):
    """Change the compressed data of a file that is written already, lengths and all."""

    def rewrite(path):
        dataset = pydicom.dcmread(path)
        (frame,) = generate_frames(dataset.PixelData, number_of_frames=1)
        dataset.PixelData = encapsulate([edit(frame)])
        dataset.save_as(path)

    return rewrite


def file(edit):
    return lambda path: path.write_bytes(edit(path.read_bytes()))


def flipped(data, at=-700):
    return data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :]


J2K, RLE, JLS = ({"syntax": syntax} for syntax in (JPEG2000Lossless, RLELossless, JPEGLSLossless))
TWELVE = sets(BitsStored=12, HighBit=11)
NO_NUMBER, ONE = ["1e400"] * 6, {"only": MIDDLE}
SAME = lambda stored: stored  # noqa: E731
SHORT = "its pixels are .* bytes, and 1 x 36 x 40 x 1 of 16 bits are 2880"
BREAK = "no pixels, or its file breaks off"

# What is done to a series of six slices, with the voxels or the line that come of it.
CASES = {
    "sound": ({}, SAME),
    "big endian": (
        {
            "syntax": ExplicitVRBigEndian,
            "change": pixels(lambda b: np.frombuffer(b, "<i2").byteswap().tobytes()),
        },
        SAME,
    ),
    "implicit": ({"syntax": ImplicitVRLittleEndian}, SAME),
    "deflated": ({"syntax": DeflatedExplicitVRLittleEndian}, SAME),
    # Files that break off
    "one file ends early": ({"after": file(lambda b: b[:-1500]), **ONE}, SHORT),
    "one file ends in its header": (
        {"after": file(lambda b: b[:400]), **ONE},
        "uneven|damaged|no Rows|expected",
    ),
    "one file is empty": ({"after": file(lambda b: b""), **ONE}, "uneven"),
    "one has no pixels": ({"change": lacks("PixelData"), **ONE}, BREAK),
    # Uncompressed pixels of another length
    "one has half its pixels": ({"change": pixels(lambda b: b[: len(b) // 2]), **ONE}, SHORT),
    "filled up with zeros": ({"change": pixels(lambda b: b + b"\0" * 700)}, SAME),
    "a flipped bit": ({"after": file(flipped), **ONE}, "one voxel"),
    # Compressed pixels
    "J2K": (J2K, SAME),
    "J2K in a JP2 file": (
        {**J2K, "after": inside(lambda b: b"\0\0\0\x0cjP  \r\n\x87\n\0\0\0\0jp2c" + b)},
        SAME,
    ),
    "RLE": (RLE, SAME),
    "JPEG-LS": (JLS, SAME),
    "J2K file ends early": ({**J2K, "after": file(lambda b: b[:-300]), **ONE}, BREAK),
    "J2K breaks off": ({**J2K, "after": inside(lambda b: b[:-300]), **ONE}, "break off"),
    "RLE breaks off": ({**RLE, "after": inside(lambda b: b[:-300]), **ONE}, "decoded as RLE"),
    "J2K is no J2K": ({**J2K, "after": inside(lambda b: b"\0" * 2880), **ONE}, "neither JPEG nor JPEG 2000"),
    "J2K of another size": (
        {**J2K, "after": inside(lambda b: b.replace(b"\0\0\0\x28", b"\0\0\0\x14")), **ONE},
        "compressed pixels are 36 x 20 x 1",
    ),
    "all J2K headers of other rows": (
        {**J2K, "after": lambda path: _set(path, Rows=36, Columns=40)},
        "compressed pixels are 36 x 40 x 1",
    ),
    # Bits
    "12 bits of 16": ({"change": TWELVE}, SAME),
    "8 bits of 16": ({"change": sets(BitsStored=8, HighBit=7)}, "beyond the 8 bits"),
    "an overlay in the other bits": ({"change": overlaid}, SAME),
    "bits at the upper end": ({"change": sets(BitsStored=12)}, "12 bits that end at bit 15"),
    "unsigned in one": ({"change": sets(PixelRepresentation=0), **ONE}, "differ in their pixels"),
    "no bits stored": ({"change": lacks("BitsStored"), **ONE}, "has no BitsStored"),
    # Units
    "a slope in one": (
        {"change": sets(RescaleSlope=2), **ONE},
        lambda v: v * np.where(np.arange(6) == MIDDLE, 2, 1),
    ),
    "slope -1": ({"change": sets(RescaleSlope=-1)}, lambda v: -v),
    "slope 0": ({"change": sets(RescaleSlope=0)}, "RescaleSlope 0"),
    "intercept 1e30": ({"change": sets(RescaleIntercept="1e30"), **ONE}, "RescaleIntercept 1e"),
    "a table": ({"change": table()}, lambda v: 3.0 * (v + 1000)),
    "a short table": ({"change": table(entries=2500)}, "modality LUT has not the 2500"),
    # Kinds of pixels
    "white is lowest": (
        {"change": sets(PhotometricInterpretation="MONOCHROME1", Modality="MR")},
        lambda v: -1 - v,
    ),
    "white is lowest in CT": ({"change": sets(PhotometricInterpretation="MONOCHROME1")}, lambda v: v),
    "a palette": ({"change": sets(PhotometricInterpretation="PALETTE COLOR")}, "colours of a palette"),
    # Places
    "pixels of 0 mm": ({"change": sets(PixelSpacing=[0, 0])}, "voxels of 0 x 0 mm"),
    "other pixels in one": ({"change": sets(PixelSpacing=[2, 2]), **ONE}, "differ in pixel spacing"),
    "no directions": ({"change": sets(ImageOrientationPatient=[0] * 6)}, "not unit vectors"),
    "a turned one": ({"change": sets(ImageOrientationPatient=[-1, 0, 0, 0, 1, 0]), **ONE}, "2 volumes"),
    "directions without end": (
        {"change": sets(ImageOrientationPatient=NO_NUMBER)},
        "wrong ImageOrientationPatient",
    ),
    "one place": ({"change": sets(ImagePositionPatient=[0, 0, 0])}, "lie in one place"),
    "uneven": ({"change": sets(ImagePositionPatient=lambda k: [-80, -90, 3 * k + 0.4 * (k == 3)])}, "uneven"),
    "far apart": ({"change": sets(ImagePositionPatient=lambda k: [0, 0, 5000 * k])}, "5000 mm apart"),
    "another frame of reference in one": (
        {"change": sets(FrameOfReferenceUID=lambda k: generate_uid()), **ONE},
        "frames of reference",
    ),
    # Objects of others
    "another series in one": (
        {"change": sets(SeriesInstanceUID=lambda k: generate_uid()), **ONE},
        "2 DICOM series",
    ),
    "another patient in one": ({"change": sets(PatientID="PID-B"), **ONE}, "different patients"),
    # Texts
    "a name as the kind of pixels": (
        {"change": sets(PhotometricInterpretation="DOE^JANE")},
        "pixels are of no known kind",
    ),
    "a description that moves the cursor": (
        {"change": sets(SeriesDescription="\x1b[2J\x1b]0;x\x07<script>")},
        SAME,
    ),
    "another syntax than it says": (
        {"after": file(lambda b: b.replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2\0\0\0"))},
        SAME,
    ),
}


def _set(path, **values):
    dataset = pydicom.dcmread(path)
    sets(**values)(dataset, 0)
    dataset.save_as(path)


def write(folder, change=lambda header, k: None, after=None, only=None, syntax=None):
    """A series that is damaged before or after its files are written."""
    chosen = lambda k: only is None or k == only  # noqa: E731
    options = {"syntax": syntax} if syntax else {}
    named = lambda header, k: f"CT{k}"  # noqa: E731
    apply = lambda header, k: change(header, k) if chosen(k) else None  # noqa: E731
    for path in write_slices(folder, VOXELS, change=apply, name=named, **options):
        if after is not None and chosen(int(path.name[-1])):
            after(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_damaged_series_is_refused_or_read_exactly(tmp_path, name):
    damage, expected = CASES[name]
    write(tmp_path / "in", **damage)
    if callable(expected):
        np.testing.assert_array_equal(load_volume(tmp_path / "in").numpy()[0], expected(VOXELS.astype(float)))
        return
    if expected == "one voxel":  # which no header can show
        assert (load_volume(tmp_path / "in").numpy()[0] != VOXELS).sum() == 1
        return
    with pytest.raises(ReaderError, match=expected) as error:
        load_volume(tmp_path / "in")
    assert "\n" not in str(error.value)
