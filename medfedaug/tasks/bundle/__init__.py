"""A MONAI Bundle as the definition of a training; `medfedaug.runs.bundle` writes a run as a Bundle.

`medfedaug.config.bundle_reference` lists the allowed Bundles by name and content; `parser` reads the parts of
one; `definition` makes a run's network, task and optimiser of them.
"""
