"""A finished run as a MONAI Bundle, which needs only MONAI."""

from medfedaug.runs.bundle.export import write_bundle

__all__ = ["write_bundle"]
