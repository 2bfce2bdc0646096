"""A MONAI Bundle as the definition of a training; `medfedaug.runs.bundle` writes a run as a Bundle."""
