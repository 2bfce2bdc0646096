"""A finished run as a MONAI Bundle, which runs with MONAI alone."""

from medfedaug.runs.bundle.export import write_bundle

__all__ = ["write_bundle"]
