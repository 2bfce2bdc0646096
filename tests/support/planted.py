"""Identity in fifty tags and more of a DICOM header, to be looked for in all that a command leaves."""

from pydicom import Dataset
from pydicom.sequence import Sequence as Items

TEXTS = {
    "PatientName": "Plant01^Anna",
    "PatientID": "PLANT02",
    "IssuerOfPatientID": "PLANT03",
    "OtherPatientIDs": "PLANT04",
    "OtherPatientNames": "Plant05^Berta",
    "PatientBirthName": "Plant06^Clara",
    "PatientMotherBirthName": "Plant07^Dora",
    "PatientAddress": "Plant08 Street 1",
    "PatientTelephoneNumbers": "PLANT09",
    "MedicalRecordLocator": "PLANT10",
    "MilitaryRank": "PLANT11",
    "EthnicGroup": "PLANT12",
    "Occupation": "PLANT13",
    "AdditionalPatientHistory": "PLANT14 had a fall",
    "PatientComments": "PLANT15",
    "PatientReligiousPreference": "PLANT16",
    "InstitutionName": "PLANT17 Hospital",
    "InstitutionAddress": "PLANT18",
    "InstitutionalDepartmentName": "PLANT19",
    "ReferringPhysicianName": "Plant20^Emil",
    "PerformingPhysicianName": "Plant21^Fritz",
    "OperatorsName": "Plant22^Gustav",
    "PhysiciansOfRecord": "Plant23^Hans",
    "RequestingPhysician": "Plant24^Ida",
    "StationName": "PLANT25",
    "DeviceSerialNumber": "PLANT26",
    "AccessionNumber": "PLANT27",
    "StudyID": "PLANT28",
    "StudyDescription": "PLANT29 of Anna",
    "SeriesDescription": "PLANT30 of Anna",
    "ProtocolName": "PLANT31",
    "ImageComments": "PLANT32",
    "RequestedProcedureDescription": "PLANT33",
    "PatientInsurancePlanCodeSequence": "PLANT34",
    "InsurancePlanIdentification": "PLANT35",
    # None of these is in the table of the standard's profile.
    "PatientBirthDateInAlternativeCalendar": "PLANT42 5707/05/24",
    "PlacerOrderNumberProcedure": "PLANT43",
    "FillerOrderNumberProcedure": "PLANT44",
    "DeviceID": "PLANT45",
    "ImageID": "PLANT46",
    "WindowCenterWidthExplanation": "PLANT47",
    "ContentDescription": "PLANT48 of Anna",
    "SoftwareVersions": "PLANT49",
    "RetrieveURL": "http://PLANT50/studies/1.2",
    "FrameOfInterestDescription": "PLANT51",
    "DataSetDescription": "PLANT52",
    "HangingProtocolCreator": "PLANT53",
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
