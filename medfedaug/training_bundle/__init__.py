"""A MONAI Bundle as the definition of a training; `medfedaug.runs.bundle` is the way back, a run as a Bundle.

`content` knows which Bundles may be used here, by name and content; `configuration` reads the parts of one;
`definition` makes a run's network, task and optimiser of them.
"""
