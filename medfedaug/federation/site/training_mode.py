"""Choice of a site's local training: ordinary, by a script, or DP-SGD by its policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from medfedaug.errors import ConfigError
from medfedaug.federation.messages.privacy_guard import PrivacyGuard
from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.federation.site.script_training import CustomLoop, LoopTraining

if TYPE_CHECKING:
    from medfedaug.federation.site.model import SiteModel


def local_training(
    model: SiteModel,
    guard: PrivacyGuard,
    loop: CustomLoop | None = None,
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> LocalTraining:
    """Choose the training of a site.

    Raises:
        ConfigError: when the site trains with differential privacy and the run does not allow it.
    """
    policy = guard.policy
    if loop is not None:
        if policy.sgd_noise_multiplier:
            raise ConfigError(
                f"site {guard.site}: it trains with differential privacy (sgd_noise_multiplier of its "
                "privacy policy), and nothing bounds what one case changes in a custom loop"
            )
        return LoopTraining(model, loop, criterion)
    if not policy.sgd_noise_multiplier:
        return LocalTraining(model)
    # Imported here: Opacus is an extra, and its import takes seconds.
    from medfedaug.federation.site.dp_sgd import PrivateTraining

    return PrivateTraining(model, clip=policy.sgd_clip, noise=policy.sgd_noise_multiplier, spend=guard.train)
