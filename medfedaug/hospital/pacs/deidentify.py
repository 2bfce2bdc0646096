"""`Deidentifier`: reduce DICOM objects to the attributes of a list.

A list of attributes to remove never ends: the standard adds some every year, and programs put names into any.
So the lists name the attributes that each SOP class keeps, for training, labels and geometry; all others go,
also in items of sequences. Attributes that table E.1-1 of PS3.15 removes go even where a list has them;
dicom-anonymizer ships the table.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pydicom
from dicomanonymizer.dicomfields_selector import dicom_anonymization_database_selector
from pydicom import DataElement, Dataset
from pydicom.datadict import dictionary_has_tag, dictionary_keyword, dictionary_VR
from pydicom.dataset import FileMetaDataset
from pydicom.multival import MultiValue
from pydicom.pixels import pack_bits
from pydicom.sequence import Sequence as Items
from pydicom.uid import PYDICOM_IMPLEMENTATION_UID, UID, ExplicitVRLittleEndian, UID_dictionary

from medfedaug._version import __version__
from medfedaug.hospital.dicom.checks import PixelFormat, require
from medfedaug.hospital.dicom.headers import SECONDARY_CAPTURES, dataset_of, items_of
from medfedaug.hospital.dicom.pixels import stored_frames, syntax_of
from medfedaug.utils.files import private_folder, write_atomic

_EDITION = "2026c"
_REMOVED = ("D_TAGS", "Z_TAGS", "X_TAGS", "Z_D_TAGS", "X_Z_TAGS", "X_D_TAGS", "X_Z_D_TAGS")
_NUMBERS = ("AT", "DS", "FD", "FL", "IS", "SL", "SS", "SV", "UL", "US", "UV")
_WORDS = ("CS", "LO")
_CODE_VALUES = ("CodeValue", "LongCodeValue", "URNCodeValue")
_NO_CODE = ("REMOVED", "99MEDFEDAUG", "Removed")
_PROFILE = ("113100", "DCM", "Basic Application Confidentiality Profile")

_OBJECT = """
    SOPClassUID SOPInstanceUID StudyInstanceUID SeriesInstanceUID FrameOfReferenceUID
    Modality SeriesNumber InstanceNumber
"""
_PIXELS = """
    Rows Columns NumberOfFrames SamplesPerPixel PhotometricInterpretation PlanarConfiguration
    BitsAllocated BitsStored HighBit PixelRepresentation PixelData PixelPaddingValue PixelPaddingRangeLimit
    ImageType BurnedInAnnotation LossyImageCompression LossyImageCompressionRatio LossyImageCompressionMethod
"""
_PLACE = """
    ImagePositionPatient ImageOrientationPatient PixelSpacing SliceThickness SpacingBetweenSlices
"""
_UNITS = """
    RescaleSlope RescaleIntercept RescaleType Units WindowCenter WindowWidth PresentationLUTShape
    ModalityLUTSequence
"""
# Settings of scanners, which can differ between the volumes of a series.
_ACQUISITION = """
    EchoTime EchoNumbers RepetitionTime InversionTime FlipAngle MagneticFieldStrength DiffusionBValue KVP
    TemporalPositionIdentifier TriggerTime FrameReferenceTime AcquisitionNumber
    ComplexImageComponent PatientPosition SliceLocation
"""
_FRAMES = """
    SharedFunctionalGroupsSequence PerFrameFunctionalGroupsSequence PixelMeasuresSequence
    PlanePositionSequence PlaneOrientationSequence FrameContentSequence InStackPositionNumber
    DimensionIndexValues DimensionOrganizationType DimensionOrganizationSequence DimensionOrganizationUID
    DimensionIndexSequence DimensionIndexPointer FunctionalGroupPointer
"""
_FRAMES_OF_IMAGES = """
    PixelValueTransformationSequence MREchoSequence EffectiveEchoTime MRDiffusionSequence MRModifierSequence
    InversionTimes MRImageFrameTypeSequence CTImageFrameTypeSequence FrameType CardiacSynchronizationSequence
    NominalCardiacTriggerDelayTime CTXRayDetailsSequence CTReconstructionSequence TemporalPositionIndex
    FrameAcquisitionNumber UnassignedPerFrameConvertedAttributesSequence
    VolumetricProperties VolumeBasedCalculationTechnique PixelPresentation
"""
_REFERENCES = """
    ReferencedSeriesSequence ReferencedInstanceSequence ReferencedSOPClassUID ReferencedSOPInstanceUID
    ReferencedFrameNumber
"""
_SEGMENTS = """
    SegmentationType SegmentationFractionalType MaximumFractionalValue SegmentsOverlap SegmentSequence
    SegmentNumber SegmentLabel SegmentAlgorithmType SegmentIdentificationSequence ReferencedSegmentNumber
    SegmentedPropertyCategoryCodeSequence SegmentedPropertyTypeCodeSequence
    DerivationImageSequence SourceImageSequence DerivationCodeSequence PurposeOfReferenceCodeSequence
"""
_REGIONS = """
    StructureSetROISequence ROINumber ROIName ROIGenerationAlgorithm ROIContourSequence ContourSequence
    ContourGeometricType NumberOfContourPoints ContourData ContourImageSequence ReferencedROINumber
    RTROIObservationsSequence ObservationNumber RTROIInterpretedType ReferencedFrameOfReferenceSequence
    ReferencedFrameOfReferenceUID RTReferencedStudySequence RTReferencedSeriesSequence ApprovalStatus
"""

_EMPTIED = """
    PatientBirthDate PatientSex StudyDate StudyTime AccessionNumber ReferringPhysicianName Manufacturer
    PositionReferenceIndicator AcquisitionTime ContentDescription ContentCreatorName
    StructureSetDate StructureSetTime ROIInterpreter
"""
_TERMS = """
    CT MR PT NM US CR DX MG XA RF OT SC XC ES OPT SEG RTSTRUCT
    MONOCHROME1 MONOCHROME2 RGB YBR_FULL YBR_FULL_422 YBR_PARTIAL_420 YBR_ICT YBR_RCT
    ORIGINAL DERIVED MIXED PRIMARY SECONDARY AXIAL LOCALIZER VOLUME OTHER REFORMATTED MPR CPR RESAMPLED
    AVERAGE PROJECTION MIN_IP MAX_IP MAXIMUM MINIMUM MEAN MEDIAN STDDEV NONE SUBTRACTION DIVISION ADDITION
    QUANTITATIVE ANGIO CARDIAC PERFUSION DIFFUSION FLOW_ENCODED FLUID_ATTENUATED PROTON_DENSITY T1 T2 T2_STAR
    STATIC DYNAMIC M P R I M_FFE M_IR M_SE MAGNITUDE PHASE REAL IMAGINARY PHASE_MAP VELOCITY ND NORM
    DIS2D DIS3D FM FS FL
    WATER FAT IN_PHASE OUT_PHASE ADC TRACE TRACEW FA DWI SWI TOF MIP MNR
    ATTENUATION EMISSION TRANSMISSION GATED TOMO RECON_TOMO WHOLE_BODY SCREEN-SAVE
    YES NO 00 01 ISO_10918_1 ISO_14495_1 ISO_15444_1
    HU US OD PCT BQML CNTS CPS GML PROPCNTS PROPCPS SUV IDENTITY INVERSE
    HFS HFP FFS FFP HFDR HFDL FFDR FFDL 3D 3D_TEMPORAL TILED_FULL COLOR MONOCHROME TRUE_COLOR
    BINARY FRACTIONAL LABELMAP PROBABILITY OCCUPANCY UNDEFINED AUTOMATIC SEMIAUTOMATIC MANUAL
    CLOSED_PLANAR CLOSEDPLANAR_XOR OPEN_PLANAR OPEN_NONPLANAR POINT APPROVED UNAPPROVED REJECTED
    GTV CTV PTV ITV EXTERNAL ORGAN AVOIDANCE CONTROL BOLUS CAVITY SUPPORT FIXATION MARKER REGISTRATION
    ISOCENTER TREATED_VOLUME IRRAD_VOLUME CONTRAST_AGENT DOSE_REGION BRACHY_CHANNEL
"""

EMPTIED = frozenset(_EMPTIED.split())  # required attributes that may be empty

DUMMIES = {
    "ContentLabel": "REMOVED",
    "ContentDate": "19000101",
    "ContentTime": "000000",
    "StructureSetLabel": "REMOVED",
    "SegmentAlgorithmName": "REMOVED",
}
"""Required attributes that get a dummy value."""

TABLE = frozenset(("LUTDescriptor", "LUTData", "ModalityLUTType"))
"""Attributes of a table from stored values to values of a modality."""

LABELS = ("SegmentLabel", "ROIName")  # names of segments and regions, which get names of classes

TERMS = frozenset([*_TERMS.split(), "SCREEN SAVE", "WHOLE BODY", "RECON TOMO", "RECON GATED TOMO"])
"""Words that an attribute of words (ImageType, Modality, ...) keeps; all others go."""

_IMAGES = (
    *("CTImage", "EnhancedCTImage", "LegacyConvertedEnhancedCTImage"),
    *("MRImage", "EnhancedMRImage", "EnhancedMRColorImage", "LegacyConvertedEnhancedMRImage"),
    *("PositronEmissionTomographyImage", "EnhancedPETImage", "LegacyConvertedEnhancedPETImage"),
    *("NuclearMedicineImage", "UltrasoundImage", "UltrasoundMultiFrameImage", "ComputedRadiographyImage"),
    *("XRayAngiographicImage", "XRay3DAngiographicImage", "BreastTomosynthesisImage", "RTImage"),
    *("OphthalmicTomographyImage", "SecondaryCaptureImage", "MultiFrameGrayscaleByteSecondaryCaptureImage"),
    *("MultiFrameGrayscaleWordSecondaryCaptureImage", "MultiFrameTrueColorSecondaryCaptureImage"),
)
_IMAGE_LIST = frozenset(
    (_OBJECT + _PIXELS + _PLACE + _UNITS + _ACQUISITION + _FRAMES + _FRAMES_OF_IMAGES).split()
)
_SEGMENTATION_LIST = frozenset((_OBJECT + _PIXELS + _PLACE + _FRAMES + _REFERENCES + _SEGMENTS).split())
_STRUCTURE_LIST = frozenset((_OBJECT + _REFERENCES + _REGIONS).split())
_BY_CLASS: dict[str, frozenset[str]] = {
    **{str(getattr(pydicom.uid, f"{name}Storage")): _IMAGE_LIST for name in _IMAGES},
    "1.2.840.10008.5.1.4.1.1.66.4": _SEGMENTATION_LIST,
    "1.2.840.10008.5.1.4.1.1.66.7": _SEGMENTATION_LIST,
    str(pydicom.uid.RTStructureSetStorage): _STRUCTURE_LIST,
}


def kept_attributes(sop_class: str) -> frozenset[str]:
    """Return the attributes that objects of a class keep."""
    name = UID(sop_class).name if sop_class in UID_dictionary else "unknown"
    require(sop_class in _BY_CLASS, f"objects of the class {name} cannot be written without identity")
    return _BY_CLASS[sop_class]


@cache
def _removed_by_standard() -> frozenset[int]:
    """Return the tags of attributes that table E.1-1 removes, empties or replaces."""
    table = dicom_anonymization_database_selector(f"dicomfields_{_EDITION}")
    return frozenset(tag[0] << 16 | tag[1] for name in _REMOVED for tag in table[name] if len(tag) == 2)


class Deidentifier:
    """Removes identity from objects and from the items of their sequences.

    An object keeps the attributes in the list of its class, each of the type that the standard gives it:
    numbers, words of a list, and UIDs. A UID has the same successor in every object, so that references hold;
    UIDs of the standard stay; codes go. Segments and regions get the names of classes. Pixels keep only their
    values, uncompressed.

    Deviations: the list is stricter than the basic profile of PS3.15. A required attribute is empty, or has a
    dummy; a required sequence is missing, where the list does not name it.

    ``new_uid`` replaces a UID; ``name_of`` replaces the name of a segment or a region, or returns ``None``.
    """

    def __init__(
        self, new_uid: Callable[[str], str], name_of: Callable[[str], str | None] = lambda name: None
    ) -> None:
        self._new_uid, self._name_of = new_uid, name_of

    def write(self, files: Iterable[Path], folder: Path, *, patient: str, study: str) -> list[Path]:
        """Write the objects of files without identity, each named by its new UID, and return the files."""
        private_folder(folder)
        written = []
        for file in files:
            dataset = pydicom.dcmread(file)
            self.clean(dataset, patient=patient, study=study)
            target = folder / f"{dataset.SOPInstanceUID}.dcm"
            write_atomic(target, partial(dataset.save_as, enforce_file_format=True), private=True)
            written.append(target)
        return written

    def clean(self, dataset: Dataset, *, patient: str, study: str) -> None:
        """Remove identity from an object in place."""
        kept = kept_attributes(str(dataset.SOPClassUID))
        sequences = (("SegmentSequence", "SegmentLabel"), ("StructureSetROISequence", "ROIName"))
        names = [
            (item, attribute, self._name_of(str(item.get(attribute, ""))))
            for sequence, attribute in sequences
            for item in items_of(dataset, sequence)
        ]
        if "PixelData" in dataset:
            _clean_pixels(dataset)
        if dataset.get("SegmentationType") == "LABELMAP":
            dataset.PhotometricInterpretation = "MONOCHROME2"  # without its palette
        may_hold_text = _may_hold_text(dataset)
        self._clean(dataset, kept)
        for number, (item, attribute, name) in enumerate(names, 1):
            setattr(item, attribute, name or f"segment {number}")
        dataset.SpecificCharacterSet = "ISO_IR 192"
        dataset.PatientID, dataset.PatientName, dataset.StudyID = patient, patient, study[:16]
        dataset.PatientIdentityRemoved = "NO" if may_hold_text else "YES"
        dataset.LongitudinalTemporalInformationModified = "REMOVED"
        tool = f"medfedaug {__version__}, dicom-anonymizer {version('dicom-anonymizer')}"
        dataset.DeidentificationMethod = f"PS3.15 E.1-1 {_EDITION}; {tool}"[:64]
        dataset.DeidentificationMethodCodeSequence = Items([_code(*_PROFILE)])
        dataset.file_meta = _file_meta(dataset)
        dataset.preamble = b"\0" * 128

    def _clean(self, dataset: Dataset, kept: frozenset[str]) -> None:
        """Keep the attributes of a list in an object or an item of a sequence."""
        for tag in [*dataset.keys()]:
            name = dictionary_keyword(tag) if not tag.is_private and dictionary_has_tag(tag) else ""
            if name in EMPTIED:
                dataset[tag] = pydicom.DataElement(tag, _types_of(tag)[0], None)
            elif name in DUMMIES:
                setattr(dataset, name, DUMMIES[name])
            elif name not in kept or not self._keep(dataset[tag], name, kept):
                del dataset[tag]

    def _keep(self, element: DataElement, name: str, kept: frozenset[str]) -> bool:
        """Remove identity from the value of an attribute; return whether to keep the attribute."""
        if element.VR not in _types_of(element.tag):
            return False
        if name in LABELS:  # of segments and regions, which `clean` names
            element.clear()
            return True
        if name in ("PixelData", "LUTData"):  # which other functions clean
            return True
        if int(element.tag) in _removed_by_standard():
            return False
        if element.VR == "SQ":
            inner = TABLE if name == "ModalityLUTSequence" else kept - {"PixelData"}
            for item in element.value:
                if any(value in item for value in _CODE_VALUES):
                    item.clear()
                    item.update(_code(*_NO_CODE))
                else:
                    self._clean(item, inner)
        elif element.VR == "UI":
            element.value = _each(element.value, self._successor)
        elif element.VR in _WORDS:
            element.value = [str(word) for word in _listed(element.value) if str(word) in TERMS]
            return bool(element.value)
        else:
            return element.VR in _NUMBERS
        return True

    def _successor(self, uid: Any) -> str:
        return str(uid) if str(uid) in UID_dictionary or not uid else self._new_uid(str(uid))


def _types_of(tag: pydicom.tag.BaseTag) -> list[str]:
    """Return the value representations that the standard gives an attribute."""
    return dictionary_VR(tag).split(" or ")


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, MultiValue) else [] if value is None else [value]


def _each(value: Any, new: Callable[[Any], str]) -> Any:
    return [*map(new, value)] if isinstance(value, MultiValue) else new(value) if value else value


def _code(value: str, scheme: str, meaning: str) -> Dataset:
    return dataset_of(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)


def _may_hold_text(dataset: Dataset) -> bool:
    annotation = str(dataset.get("BurnedInAnnotation", "")).strip().upper()
    return annotation == "YES" or (annotation != "NO" and str(dataset.SOPClassUID) in SECONDARY_CAPTURES)


def _file_meta(dataset: Dataset) -> FileMetaDataset:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = dataset.file_meta.TransferSyntaxUID
    meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    meta.ImplementationClassUID = PYDICOM_IMPLEMENTATION_UID
    return meta


def _clean_pixels(dataset: Dataset) -> None:
    """Write the values anew, uncompressed: unused bits, comments and other bytes may name the patient."""
    values, form = stored_frames(dataset), PixelFormat.of(dataset)
    require(
        syntax_of(dataset).is_little_endian or "ModalityLUTSequence" not in dataset,
        "a big-endian object with a table of values; have it sent in another form",
    )
    if form.allocated == 1:
        data = pack_bits(values, pad=False)
    else:
        data = values.astype(f"<{'i' if form.signed else 'u'}{form.allocated // 8}").tobytes()
    if form.colour:
        dataset.PhotometricInterpretation, dataset.PlanarConfiguration = "RGB", 0
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.PixelData = data + b"\0" * (len(data) % 2)
    dataset["PixelData"].VR = "OB" if form.allocated <= 8 else "OW"
