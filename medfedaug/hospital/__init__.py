"""What a clinical site adds: DICOM, archives, rules and guard of its data, secure aggregation."""
