"""MONAI's networks by the names of their classes."""

from collections.abc import Mapping
from typing import Any

import monai.networks.nets
from torch import nn

from medfedaug.utils.class_paths import constructor_parameters, public_class

_SPATIAL_DIMS = ("spatial_dims",)
# Names of one argument in MONAI's networks.
_IN_CHANNELS = ("in_channels", "n_input_channels")
_OUT_CHANNELS = ("out_channels", "num_classes")
_NORM = ("norm", "norm_name", "norm_type")


class MonaiNetwork:
    """Builder of a network of MONAI; its signature has the names of channels and norm.

    Args:
        cls: the class, or a function that makes the network.
        **defaults: arguments that replace MONAI's defaults.
    """

    def __init__(self, cls: Any, **defaults: Any) -> None:
        self.cls, self.defaults = cls, defaults
        self.parameters = constructor_parameters(cls)

    @property
    def norm_argument(self) -> str | None:
        """The name of the network's argument for its normalisation; None if it has none."""
        return self._name(_NORM)

    def __call__(self, **args: Any) -> nn.Module:
        """Build the network; arguments as of `arguments`."""
        network: nn.Module = self.cls(**self.arguments(**args))
        return network

    def arguments(
        self, *, spatial_dims: int, in_channels: int, out_channels: int, image_size: Any = None, **args: Any
    ) -> dict[str, Any]:
        """Return the keyword arguments of the class."""
        values = {**self.defaults, **args}
        sizes = {_SPATIAL_DIMS: spatial_dims, _IN_CHANNELS: in_channels, _OUT_CHANNELS: out_channels}
        for names, value in sizes.items():
            name = self._name(names)
            if name is None:
                raise ValueError(
                    f"{self.cls.__name__} has no argument {names[0]}; only networks with arguments for the "
                    "dimensions, the channels and the classes can be named"
                )
            if name in args:
                raise ValueError(f"{name} follows from the data; leave it out")
            values[name] = value
        if image_size is not None and "img_size" in self.parameters:
            values.setdefault("img_size", image_size)
        if "pretrained" in self.parameters:  # some networks have it on by default
            values["pretrained"] = False
        self._check(values)
        return values

    def _check(self, values: Mapping[str, Any]) -> None:
        unknown = [name for name in values if name not in self.parameters]
        if unknown:
            raise ValueError(
                f"{self.cls.__name__} has no argument {unknown[0]}; it takes {', '.join(self.parameters)}"
            )
        missing = [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is parameter.empty and name not in values
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
    """Return the class of a path such as ``monai.networks.nets.SegResNet``."""
    return public_class(monai.networks.nets, path, "network")
