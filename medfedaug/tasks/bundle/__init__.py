"""A MONAI Bundle as the definition of a training; `medfedaug.runs.bundle` is the way back, a run as a Bundle.

`medfedaug.config.bundle_reference` knows which Bundles may be used here, by name and content; `parser` reads
the parts of one; `definition` makes a run's network, task and optimiser of them.
"""
