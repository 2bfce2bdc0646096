"""Every network that is built in, small enough for a test."""

import importlib.util

import pytest

from medfedaug.models import build_network

U_NET = {"channels": (4, 8, 8), "strides": (2, 2)}
FEATURES = (4, 4, 4, 8, 8, 4)
SEGMENTING = {
    "basicunet": {"features": FEATURES},
    "dynunet": {"filters": (4, 4, 8, 8, 8)},
    "mednext": {
        "init_filters": 4,
        "blocks_down": (1, 1),
        "blocks_up": (1, 1),
        "blocks_bottleneck": 1,
        "kernel_size": 3,
    },
    "segresnet": {"init_filters": 8, "blocks_down": (1, 1, 1), "blocks_up": (1, 1)},
    "segresnetds": {"init_filters": 4, "blocks_down": (1, 1, 1)},
    "swinunetr": {"feature_size": 12, "depths": (1, 1, 1, 1), "norm": "batch"},
    "unet": U_NET,
    "unetr": {"hidden_size": 12, "mlp_dim": 8, "feature_size": 4, "num_heads": 2},
}
"""Arguments by name."""

WIDTHS = {
    "basicunet": [4, 4, 4, 8, 8],
    "dynunet": [4, 4, 8, 8, 8],
    "mednext": [4, 8, 16],
    "segresnet": [8, 16, 32],
    "segresnetds": [4, 8, 16],
    "swinunetr": [12, 24, 48, 96, 192],
    "unet": [4, 8, 8],
    "unetr": [12],
}
"""Channels of the encoder's stages."""

needs_einops = pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="needs einops")


def marked(names):
    """Names as parameters of a test, of which some need an optional package."""
    return [pytest.param(n, marks=needs_einops if n.startswith("swin") else ()) for n in names]


def build_small(name, size=32, **args):
    """A network by its name: of those for segmentation a small one, for images of a size."""
    return build_network(name, **{"image_size": size, **SEGMENTING.get(name, {}), **args})
