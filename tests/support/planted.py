"""Identity in many tags of a DICOM header, to be looked for in all that a command leaves."""

from pydicom import Dataset
from pydicom.sequence import Sequence as Items

TEXTS = {
    "PatientName": "Plant01^Anna",
    "PatientID": "PLANT02",
    "IssuerOfPatientID": "PLANT03",
    "OtherPatientNames": "Plant05^Berta",
    "PatientAddress": "Plant08 Street 1",
    "PatientComments": "PLANT15",
    "InstitutionName": "PLANT17 Hospital",
    "ReferringPhysicianName": "Plant20^Emil",
    "OperatorsName": "Plant22^Gustav",
    "DeviceSerialNumber": "PLANT26",
    "AccessionNumber": "PLANT27",
    "StudyID": "PLANT28",
    "StudyDescription": "PLANT29 of Anna",
    "SeriesDescription": "PLANT30 of Anna",
    "ProtocolName": "PLANT31",
    "ImageComments": "PLANT32",
    "PatientInsurancePlanCodeSequence": "PLANT34",
    "PlacerOrderNumberProcedure": "PLANT43",
    "WindowCenterWidthExplanation": "PLANT47",
    "RetrieveURL": "http://PLANT50/studies/1.2",
    "RescaleType": "PLANT54",
    "Manufacturer": "PLANT55",
    "PositionReferenceIndicator": "PLANT56",
    "ConvolutionKernel": "PLANT57",
}
DATES = {"PatientBirthDate": "19470811", "StudyDate": "20190317", "AcquisitionDate": "20190318"}
PRIVATE = "PLANT36 of a scanner"
NESTED = "Plant37^Nested"


def plant(header: Dataset, *_: object) -> None:
    """Put identity into a header: standard tags, dates, a private block, and items of a sequence."""
    for name, value in (TEXTS | DATES).items():
        if name.endswith("Sequence"):
            item = Dataset()
            item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = "1", "99X", value
            setattr(header, name, Items([item]))
        else:
            setattr(header, name, value)
    header.private_block(0x0011, "SCANNER", create=True).add_new(0x10, "LO", PRIVATE)
    inner = Dataset()
    inner.ReferencedSOPClassUID, inner.ReferencedSOPInstanceUID = "1.2.840.10008.5.1.4.1.1.2", "1.2.3.99"
    inner.OperatorsName, inner.StudyDescription = NESTED, "PLANT38"
    header.ReferencedImageSequence = Items([inner])
    header.ImageType = ["ORIGINAL", "PRIMARY", "PLANT58 ANNA"]


def values() -> list[str]:
    """All planted values, each as a file would have it, and its parts of a name."""
    texts = [*TEXTS.values(), PRIVATE, NESTED, "PLANT38", "PLANT58"]
    bare = [text.removeprefix("http://").partition("/")[0] for text in texts]
    return sorted({text.split()[0].split("^")[0] for text in bare} | {*DATES.values()})
