"""Reading and writing of DICOM: volumes, SEG and RTSTRUCT."""
