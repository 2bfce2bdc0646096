"""Pooled: training with all images in one place."""

from __future__ import annotations

from medfedaug.methods.base import Method


class Pooled(Method):
    """Training on the images of all sites together, the oracle that a federation is measured against.

    One network is trained on everybody's training images, for as many epochs and with the same optimiser as
    a federation's sites; a "round" is its local epochs. Each site scores it on its own validation and test
    images, and the best round is selected as in a federation. Nothing travels, since everything is there
    already: a simulation on one machine runs it, without NVFlare, and no hospital can be asked to.

    Each image is normalised as at the site that it comes from. It goes with methods that work within one
    site (augmentations, ``norm``, ``fedsam``), and not with those that exchange, keep or average something.

    Raises:
        ConfigError: beside a method that needs sites which are apart.

    Deviations:
        The optimiser begins anew every round, as it does at a site.
    """

    name = "pooled"
    excludes = frozenset({"separate_sites"})
