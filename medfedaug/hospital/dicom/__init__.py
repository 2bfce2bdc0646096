"""Reading and writing of DICOM: volumes, SEG, RTSTRUCT and SR."""
