"""The papers' equations as pure functions on tensors.

No function has state, reads a file or draws a random number: noise is an argument. Symbols follow the
papers: B images in a batch, C channels, M sites, N samples, L histogram bins. A shape that broadcasting would
silently take for another one is a `ValueError`.

Tensors in float16 or bfloat16 are computed in float32 and the result is returned in the dtype of the input,
because a variance of half-precision numbers is mostly rounding. Everything is differentiable, and the square
root of a zero variance has gradient zero here rather than the infinity of `torch.sqrt`, since a batch of one
image has exactly that.

Sources:
    * FedFA, FedFA+: Zhou et al., "Federated Feature Augmentation and Alignment"; equation numbers are those
      of that article.
    * FedFD: "Feature Diversification and Adaptation for Federated Domain Generalization".
    * FRAug: Chen et al., "FRAug: Tackling Federated Learning with Non-IID Features via Representation
      Augmentation".
    * Robust means: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates".
"""

from medfedaug.functional.distances import gaussian_mmd, ramp_up, soft_histogram, symmetric_kl
from medfedaug.functional.features import (
    across_site_variance,
    augment_features,
    augmentation_spread,
    feature_statistics,
    mix_statistics,
    perturb_features,
    student_t_modulation,
    working_precision,
)
from medfedaug.functional.means import coordinate_median, trimmed_mean

__all__ = [
    "across_site_variance",
    "augment_features",
    "augmentation_spread",
    "coordinate_median",
    "feature_statistics",
    "gaussian_mmd",
    "mix_statistics",
    "perturb_features",
    "ramp_up",
    "soft_histogram",
    "student_t_modulation",
    "symmetric_kl",
    "trimmed_mean",
    "working_precision",
]
