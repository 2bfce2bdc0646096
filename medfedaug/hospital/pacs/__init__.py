"""PACS and folders of DICOM files as sources of a site's data folder."""
