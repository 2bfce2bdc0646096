"""Write NIfTI files as bytes that depend only on their content."""

import gzip
from pathlib import Path
from typing import IO, Any


def pack_nifti(image: Any, file: IO[bytes]) -> None:
    """Write an image of nibabel as ``.nii.gz``, without the time and the name that gzip adds."""
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed:
        image.to_stream(packed)


def save_nifti(image: Any, path: Path) -> None:
    """Save an image of nibabel: ``.nii.gz`` by `pack_nifti`, another suffix by nibabel."""
    if not path.name.lower().endswith(".nii.gz"):
        import nibabel

        nibabel.save(image, path)
        return
    with path.open("wb") as file:
        pack_nifti(image, file)
