"""RandAugment: a few random operations on every training image."""

from collections.abc import Sequence

from monai.transforms import Transform
from monai.utils import CommonKeys as Keys

from medfedaug.methods.base import Method, SiteContext, SitePart
from medfedaug.transforms import RandAugmentd


class RandAugment(Method):
    """Data augmentation by N operations of magnitude M (Cubuk et al., NeurIPS 2020).

    In training each image passes ``num_ops`` random operations of one magnitude from the list of
    `medfedaug.transforms.RandAugment`; operations that move pixels move the label map too. Nothing is
    exchanged. With ``num_ops=0`` it is FedAvg, bit for bit.

    Args:
        num_ops: N.
        magnitude: M, from 0 to 10.
        operations: names from the list; by default all but the flips.

    Raises:
        ConfigError: for arguments out of range and unknown operations.

    Deviations:
        The operations are MONAI's, see the transform. N = 2 and M = 9 are the paper's for ResNet-50;
        papers that compare with it do not give theirs.
    """

    name = "randaugment"
    dimensions = (2,)

    def __init__(
        self, num_ops: int = 2, magnitude: float = 9.0, operations: Sequence[str] | None = None
    ) -> None:
        self.num_ops, self.magnitude, self.operations = num_ops, magnitude, operations
        self._transform(dense=False)  # its constructor checks the arguments

    def _transform(self, dense: bool) -> RandAugmentd:
        label_keys = Keys.LABEL if dense else None
        return RandAugmentd(Keys.IMAGE, self.num_ops, self.magnitude, self.operations, label_keys=label_keys)

    def at_site(self, context: SiteContext) -> SitePart:
        assert context.task is not None
        return _RandAugmentSite(self, context.task.dense)


class _RandAugmentSite(SitePart):
    def __init__(self, method: RandAugment, dense: bool) -> None:
        self.method, self.dense = method, dense

    def transforms(self, *, training: bool) -> Sequence[Transform]:
        return [self.method._transform(self.dense)] if training else ()
