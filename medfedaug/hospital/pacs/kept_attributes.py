"""Attributes that an object without identity keeps, for training, labels and geometry.

A list of attributes to remove never ends: the standard adds some every year, and programs put names into any.
So these lists name the kept attributes of each SOP class; all others go, also in items of sequences. Of the
attributes that PS3.15 table E.1-1 removes, they name those alone that get another value (a test compares).
"""

import pydicom.uid
from pydicom.uid import UID, UID_dictionary

from medfedaug.errors import ReaderError

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

EMPTIED = frozenset(_EMPTIED.split())
"""Required attributes that may be empty."""

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

LABELS = ("SegmentLabel", "ROIName")
"""Names of segments and regions, which get names of classes."""

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
    if sop_class not in _BY_CLASS:
        name = UID(sop_class).name if sop_class in UID_dictionary else "unknown"
        raise ReaderError(f"objects of the class {name} cannot be written without identity")
    return _BY_CLASS[sop_class]
