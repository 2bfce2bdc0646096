"""The layer of a clinical site: DICOM, archives, rules and guard of its data, secure aggregation."""
