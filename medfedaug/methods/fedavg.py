"""FedAvg: the weighted mean of the sites' models."""

from medfedaug.methods.base import Method


class FedAvg(Method):
    """Federated averaging: w ← Σₖ (nₖ/n) wₖ (McMahan et al., AISTATS 2017; FedRDN Eq. 3).

    The federation does the averaging, so that this method adds nothing. Floating-point buffers, such as the
    running statistics of batch norm, are averaged with the parameters; integer buffers never are.

    Deviations:
        None from the paper. Weights by number of samples are the default; ``weighting="uniform"`` of
        `medfedaug.config.run.RunConfig` is the plain mean of FedFA+ Eq. 1.
    """

    name = "fedavg"
