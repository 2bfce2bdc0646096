"""Identity in all places of an object that an attacker or a careless program thinks of: none is kept."""

import hashlib
from io import BytesIO

import numpy as np
import pydicom
import pytest
from dicom_files import base, item, put_pixels, sets, write_slices
from label_objects import write_rtstruct, write_segmentation
from PIL import Image
from pydicom.datadict import DicomDictionary, tag_for_keyword
from pydicom.dataelem import DataElement, RawDataElement
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.sequence import Sequence as Items
from pydicom.tag import Tag
from pydicom.uid import (
    CTImageStorage,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
    SecondaryCaptureImageStorage,
    generate_uid,
)

from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom.pixels import stored_frames
from medfedaug.hospital.pacs.deidentify import DUMMIES, EMPTIED, LABELS, Deidentifier, kept_attributes

NEEDLE = b"NEEDLE"
VOXELS = np.random.default_rng(1).integers(-900, 900, (40, 36, 3)).astype(np.int16)


def successor(uid):
    return "2.25." + str(int(hashlib.sha256(b"key" + uid.encode()).hexdigest()[:30], 16))


DEIDENTIFIER = Deidentifier(successor, lambda name: "tumour")


def image(sop=CTImageStorage):
    dataset = base(sop, generate_uid(), generate_uid())
    put_pixels(dataset, np.arange(64).reshape(8, 8))
    return dataset


def without_identity(dataset, folder):
    """The file that is written of an object."""
    little = dataset.file_meta.TransferSyntaxUID.is_little_endian
    pydicom.dcmwrite(folder / "in.dcm", dataset, enforce_file_format=True, little_endian=little)
    (path,) = DEIDENTIFIER.write([folder / "in.dcm"], folder / "out", patient="patient-1", study="study-1")
    return path


def items(name, **values):
    return lambda header: setattr(header, name, Items([item(**values)]))


def element(tag, vr, value):
    return lambda header: header.add(DataElement(tag, vr, value))


def sequence_as_unknown(header):
    value = (
        bytes.fromhex("feff00e0ffffffff10001000")
        + b"PN\x0c\0NEEDLE^Doe  "
        + bytes.fromhex("feff0de000000000")
    )
    tag = Tag(0x00081140)
    header._dict[tag] = RawDataElement(tag, "UN", len(value), value, 0, False, True)


def private_in_frames(header):
    inner = Dataset()
    inner.add_new(0x00291010, "UN", b"NEEDLE12")
    header.SharedFunctionalGroupsSequence = Items([inner])


def private_in_item(header):
    inner = item(PatientName="NEEDLE^A")
    inner.private_block(0x0011, "X", create=True).add_new(1, "LO", "NEEDLE")
    header.ReferencedImageSequence = Items([inner])


def hidden_overlay(header):
    values = np.frombuffer(header.PixelData, "<u2") & 0x0FFF
    hidden = np.frombuffer(b"NEEDLE", np.uint8).repeat(2)[: values.size].astype("<u2")
    values[: hidden.size] |= hidden << 12
    header.PixelData, header.BitsStored, header.HighBit = values.tobytes(), 12, 11
    header.PixelRepresentation = 0
    header.add_new(0x60000100, "US", 16)
    header.add_new(0x60000102, "US", 12)


PLACES = {
    "private in an item": private_in_item,
    "private in functional groups": private_in_frames,
    "sequence that is kept as OB": element(tag_for_keyword("ModalityLUTSequence"), "OB", b"NEEDLE^Doe  "),
    "sequence as UN": sequence_as_unknown,
    "number as OB": element(0x00280107, "OB", b"NEEDLE^Doe  "),
    "kept UID as LO": element(tag_for_keyword("FrameOfReferenceUID"), "LO", "NEEDLE"),
    "trailing padding": element(0xFFFCFFFC, "OB", b"NEEDLE^Doe  "),
    "overlay": element(0x60003000, "OW", b"NEEDLE^Doe  "),
    "icon": items("IconImageSequence", Rows=2, Columns=2, BitsAllocated=8, PixelData=b"NEEDLE^Doe  "),
    "preamble": lambda header: setattr(header, "preamble", b"NEEDLE^Doe" + b"\0" * 118),
    "segment": items(
        "SegmentSequence",
        SegmentNumber=1,
        SegmentLabel="NEEDLE",
        SegmentDescription="NEEDLE",
        TrackingID="NEEDLE",
    ),
    "image type": sets(ImageType=["ORIGINAL", "PRIMARY", "NEEDLE DOE"]),
    "table": items(
        "ModalityLUTSequence",
        LUTDescriptor=[4, 0, 16],
        LUTData=b"\0\1\2\3\4\5\6\7",
        LUTExplanation="NEEDLE",
        ModalityLUTType="NEEDLE",
    ),
    "character set": sets(SpecificCharacterSet="ISO_IR 192", PatientName="NEEDLE^Ä"),
    "frames": items(
        "PerFrameFunctionalGroupsSequence",
        FrameContentSequence=Items([item(FrameComments="NEEDLE", FrameLabel="NEEDLE")]),
    ),
    "pixels in an item": items("SharedFunctionalGroupsSequence", BitsAllocated=8, PixelData=b"NEEDLE^Doe  "),
    "table in an item": items("SharedFunctionalGroupsSequence", LUTDescriptor=[6, 0, 8], LUTData=b"NEEDLE"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
def test_no_planted_place_is_kept(place, tmp_path):
    planted = image()
    PLACES[place](planted)
    path = without_identity(planted, tmp_path)
    assert NEEDLE not in path.read_bytes().upper()
    np.testing.assert_array_equal(pydicom.dcmread(path).pixel_array, np.arange(64).reshape(8, 8))


def test_no_number_of_another_object_is_kept(tmp_path):
    """Dates, ages, weights and UIDs that no text shows."""
    planted = image()
    planted.PatientAge, planted.PatientWeight, planted.SecondaryReviewDate = "087Y", "81.5", "20190317"
    planted.IrradiationEventUID, planted.StorageMediaFileSetUID = "1.2.276.777", "1.2.276.777.2"
    planted.add_new(0x00081155, "UI", "1.2.276.777")
    planted.add_new(0x00209164, "UI", "1.2.276.777.9")
    planted.DimensionOrganizationSequence = Items([item(DimensionOrganizationUID="1.2.276.777.1")])
    planted.RadiopharmaceuticalInformationSequence = Items(
        [item(RadiopharmaceuticalStartDateTime="20190317101112")]
    )
    content = without_identity(planted, tmp_path).read_bytes()
    assert [value for value in (b"1.2.276.777", b"087Y", b"81.5", b"20190317") if value in content] == []


TEXTS = {"AE", "CS", "LO", "LT", "PN", "SH", "ST", "UC", "UR", "UT"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["image", "SEG", "RTSTRUCT"])
def test_no_text_of_the_standards_dictionary_is_kept(kind, tmp_path):
    """Also one that the standard does not give the class, in the object and in each of its items."""
    files = write_slices(tmp_path / "series", VOXELS)
    mask = np.zeros(VOXELS.shape, np.uint8)
    mask[3:9, 4:8, 1] = 1
    square = [(1, [(2.5, 2.5), (8.5, 2.5), (8.5, 8.5)])]
    path = {
        "image": lambda: files[0],
        "SEG": lambda: write_segmentation(tmp_path / "seg.dcm", files, mask),
        "RTSTRUCT": lambda: write_rtstruct(tmp_path / "rt.dcm", files, {"GTV": square}),
    }[kind]()
    planted = pydicom.dcmread(path)
    inside = [one for element in [*planted.iterall()] if element.VR == "SQ" for one in element.value]
    own = ("SegmentationType", "Modality", "PhotometricInterpretation", "SpecificCharacterSet")
    for tag, (vr, _, _, _, keyword) in DicomDictionary.items():
        if vr.split(" ")[0] not in TEXTS or keyword in own or tag >> 16 in (0, 2):
            continue
        for one in (planted, *inside):
            one.add_new(tag, vr.split(" ")[0], "NEEDLE")
    content = without_identity(planted, tmp_path).read_bytes()
    assert NEEDLE not in content


def test_pixels_lose_the_bits_that_no_value_uses(tmp_path):
    planted = image()
    hidden_overlay(planted)
    written = pydicom.dcmread(without_identity(planted, tmp_path))
    assert np.frombuffer(written.PixelData, "<u2").max() < 2**12
    np.testing.assert_array_equal(written.pixel_array, np.arange(64).reshape(8, 8))


def commented(data, at):
    """Compressed data with a comment and an application segment at a place."""
    comment = b"\xff\xfe\0\x0cNEEDLE^Doe"
    application = b"\xff\xe5\0\x08NEEDLE"
    return data[:at] + comment + application + data[at:]


def jpeg():
    rng, written = np.random.default_rng(2), BytesIO()
    pixels = np.kron(rng.integers(0, 255, (4, 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    exif = Image.Exif()
    exif[0x010E] = "NEEDLE"
    Image.fromarray(pixels).save(written, "JPEG", quality=95, comment=b"NEEDLE", exif=exif)
    dataset = image(SecondaryCaptureImageStorage)
    dataset.Rows = dataset.Columns = 32
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation, dataset.PlanarConfiguration = (
        3,
        "YBR_FULL_422",
        0,
    )
    dataset.BitsAllocated = dataset.BitsStored = 8
    dataset.HighBit, dataset.PixelRepresentation, dataset.BurnedInAnnotation = 7, 0, "NO"
    dataset.PixelData = encapsulate([written.getvalue()])
    dataset["PixelData"].VR = "OB"
    dataset.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    return dataset


def compressed(syntax, comment):
    dataset = image()
    put_pixels(dataset, VOXELS[..., 0])
    dataset.compress(syntax)
    (frame,) = generate_frames(dataset.PixelData, number_of_frames=1)
    dataset.PixelData = encapsulate([comment(frame)])
    return dataset


def in_tile(frame):
    """JPEG 2000 with comments in its main header and in that of its tile."""
    comment = b"\xff\x64\0\x0c\0\1NEEDLE^D"
    tile = frame.index(b"\xff\x90\0\x0a")
    length = int.from_bytes(frame[tile + 6 : tile + 10], "big") + len(comment)
    tile_header = frame[tile : tile + 6] + length.to_bytes(4, "big") + frame[tile + 10 : tile + 12]
    return frame[:tile] + comment + tile_header + comment + frame[tile + 12 :]


COMPRESSED = {
    "JPEG": jpeg,
    "JPEG-LS": lambda: compressed(JPEGLSLossless, lambda frame: commented(frame, 2)),
    "JPEG 2000": lambda: compressed(JPEG2000Lossless, in_tile),
    "RLE": lambda: compressed(RLELossless, lambda frame: frame + b"NEEDLE"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", COMPRESSED)
def test_comments_of_compressed_images_go_and_values_stay(kind, tmp_path):
    planted = COMPRESSED[kind]()
    assert NEEDLE in planted.PixelData
    before = stored_frames(planted)
    written = pydicom.dcmread(without_identity(planted, tmp_path))
    assert NEEDLE not in written.PixelData
    np.testing.assert_array_equal(stored_frames(written), before)


def test_an_object_without_a_list_is_refused(tmp_path):
    planted = image()
    planted.SOPClassUID = planted.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.104.1"
    with pytest.raises(ReaderError, match="Encapsulated PDF Storage cannot be written without identity"):
        without_identity(planted, tmp_path)


@pytest.mark.parametrize(
    ("annotation", "sop", "removed"),
    [
        ("YES", CTImageStorage, "NO"),
        ("NO", SecondaryCaptureImageStorage, "YES"),
        ("", SecondaryCaptureImageStorage, "NO"),
        ("", CTImageStorage, "YES"),
    ],
)
def test_identity_is_said_to_be_removed_where_pixels_hold_no_text(annotation, sop, removed, tmp_path):
    planted = image(sop)
    planted.BurnedInAnnotation = annotation
    assert pydicom.dcmread(without_identity(planted, tmp_path)).PatientIdentityRemoved == removed


def test_no_code_is_kept(tmp_path):
    planted = image("1.2.840.10008.5.1.4.1.1.66.4")
    code = item(CodeValue="4711", CodingSchemeDesignator="SCT", CodeMeaning="NEEDLE")
    planted.SegmentSequence = Items([item(SegmentedPropertyTypeCodeSequence=Items([code]))])
    written = pydicom.dcmread(without_identity(planted, tmp_path))
    (kept,) = written.SegmentSequence[0].SegmentedPropertyTypeCodeSequence
    assert (kept.CodeValue, kept.CodeMeaning) == ("REMOVED", "Removed")


LISTED = {
    "CT": CTImageStorage,
    "SEG": "1.2.840.10008.5.1.4.1.1.66.4",
    "LABELMAP": "1.2.840.10008.5.1.4.1.1.66.7",
    "RTSTRUCT": "1.2.840.10008.5.1.4.1.1.481.3",
}


def test_lists_hold_attributes_of_the_standard_that_its_profile_keeps():
    from dicomanonymizer.dicomfields_selector import dicom_anonymization_database_selector

    table = dicom_anonymization_database_selector("dicomfields_2026c")
    removed = {
        tag[0] << 16 | tag[1]
        for name, tags in table.items()
        for tag in tags
        if len(tag) == 2 and name not in ("U_TAGS", "X_Z_U_STAR_TAGS", "ALL_TAGS")
    }
    listed = set().union(*map(kept_attributes, LISTED.values()))
    assert sorted(name for name in listed if tag_for_keyword(name) in removed) == ["ROIName"]
    assert {*LABELS} <= listed
    assert not listed & (EMPTIED | DUMMIES.keys())
    assert all(tag_for_keyword(name) for name in listed | EMPTIED | DUMMIES.keys())
