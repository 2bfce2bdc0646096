"""The layer of a clinical site: DICOM, archives, and the rules, guard and sums of its data."""
