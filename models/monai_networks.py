"""MONAI's networks by the names of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import monai.networks.nets
from torch import nn

from medfedaug.utils.class_paths import constructor_parameters, public_class

_SPATIAL_DIMS = "spatial_dims"
# The same thing has several names among MONAI's networks.
_IN_CHANNELS = ("in_channels", "n_input_channels")
_OUT_CHANNELS = ("out_channels", "num_classes")
_NORM = ("norm", "norm_name", "norm_type")
_PRETRAINED = "pretrained"


class MonaiNetwork:
    """Builds a network of MONAI; what channels and norm are called there is found in its signature.

    Args:
        cls: the class, or a function that makes the network.
        **defaults: arguments in the place of MONAI's own defaults.
    """

    def __init__(self, cls: Any, **defaults: Any) -> None:
        self.cls, self.defaults = cls, defaults
        self.parameters = constructor_parameters(cls)

    @property
    def norm_argument(self) -> str | None:
        """The name of the network's own argument for its normalisation, where it has one."""
        return self._name(_NORM)

    def __call__(
        self,
        *,
        spatial_dims: int,
        in_channels: int,
        out_channels: int,
        image_size: Any = None,
        **args: Any,
    ) -> nn.Module:
        """Build the network.

        Args:
            spatial_dims: 2 or 3.
            in_channels: channels of the image.
            out_channels: channels of the output.
            image_size: of all images, where they have one: for a network that is made for one size.
            **args: further arguments of the network.
        """
        sizes = {"spatial_dims": spatial_dims, "in_channels": in_channels, "out_channels": out_channels}
        result: nn.Module = self.cls(**self.arguments(**sizes, image_size=image_size, **args))
        return result

    def arguments(
        self, *, spatial_dims: int, in_channels: int, out_channels: int, image_size: Any = None, **args: Any
    ) -> dict[str, Any]:
        """Return the keyword arguments of the class for the arguments of a call."""
        given = {**self.defaults, **args}
        sizes = (
            ((_SPATIAL_DIMS,), spatial_dims),
            (_IN_CHANNELS, in_channels),
            (_OUT_CHANNELS, out_channels),
        )
        for names, value in sizes:
            name = self._name(names)
            if name is None:
                raise ValueError(
                    f"{self.cls.__name__} has no argument {names[0]}; only networks with arguments for the "
                    "dimensions, the channels and the classes can be named"
                )
            if name in args:
                raise ValueError(f"{name} follows from the data; leave it out")
            given[name] = value
        if image_size is not None and "img_size" in self.parameters:
            given.setdefault("img_size", image_size)
        if _PRETRAINED in self.parameters:  # on by default in some
            given[_PRETRAINED] = False
        self._check(given)
        return given

    def _check(self, given: Mapping[str, Any]) -> None:
        unknown = [name for name in given if name not in self.parameters]
        if unknown:
            raise ValueError(
                f"{self.cls.__name__} has no argument {unknown[0]}; it takes {', '.join(self.parameters)}"
            )
        missing = [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is parameter.empty and name not in given
        ]
        if missing:
            raise ValueError(
                f"{self.cls.__name__} needs the argument {missing[0]}: "
                f"--network-args '{{\"{missing[0]}\": ...}}'"
                + (", or images of one size (--image-size)" if missing[0] == "img_size" else "")
            )

    def _name(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self.parameters), None)


def network_class(path: str) -> type[nn.Module]:
    """The class of a path such as ``monai.networks.nets.SegResNet``."""
    return public_class(monai.networks.nets, path, "network")
