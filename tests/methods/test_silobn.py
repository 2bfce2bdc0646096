"""SiloBN: which entries stay at the site; what sites make of it is in `test_fedbn`."""

from torch import nn

from medfedaug.methods import FedFD, SiloBN


def test_silobn_keeps_statistics_by_type_and_shares_the_weights():
    class Oddly(nn.Module):
        def __init__(self):
            super().__init__()
            self.running_mean_conv = nn.Conv2d(1, 2, 1)  # a word in a key proves nothing
            self.downsample = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2))
            self.last = nn.InstanceNorm3d(2, affine=True)

    names = ("running_mean", "running_var", "num_batches_tracked")
    assert SiloBN().local_entries(Oddly()) == {f"downsample.1.{name}" for name in names}
    # What FedFD adds to a layer is no entry that could be kept.
    net = FedFD().prepare_network(Oddly())
    assert SiloBN().local_entries(net) == {f"downsample.1.{name}" for name in names}
