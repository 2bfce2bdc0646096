"""Pooled: training with all images in one place."""

from medfedaug.methods.base import Method


class Pooled(Method):
    """Training on the images of all sites together, the oracle to which a federation is compared.

    One network is trained on all training images, for as many epochs and with the same optimiser as a
    federation's sites; a "round" is its local epochs. Each site scores it on its own validation and test
    images, and the best round is selected as in a federation. Only a simulation on one machine, without
    NVFlare, can run it; hospitals cannot.

    Each image is normalised as at its site. It combines with methods that work within one site
    (augmentations, ``norm``, ``fedsam``), and not with methods that exchange, keep or average something.

    Deviations:
        Every round has a new optimiser, as at a site.
    """

    name = "pooled"
    excludes = frozenset({"separate_sites"})
