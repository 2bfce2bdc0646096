"""Which local training a site does: the ordinary one, a script's own, or DP-SGD where its policy says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from medfedaug.errors import ConfigError
from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.federation.site.privacy_guard import PrivacyGuard
from medfedaug.federation.site.script_training import ForeignLoop, LoopTraining
from medfedaug.methods.base import Method

__all__ = ["local_training"]


def local_training(
    guard: PrivacyGuard,
    methods: Sequence[Method],
    place: tuple[Any, ...],
    ahead: int,
    more: tuple[Any, ...],
    loop: ForeignLoop | None = None,
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> LocalTraining:
    """The training of a site.

    Args:
        guard: knows the site's policy, and its account.
        methods: those of the run.
        place: the first arguments of `LocalTraining`, up to the methods' site halves.
        ahead: how many batches are made ahead.
        more: the last arguments of `LocalTraining`, from the frozen entries on.
        loop: a script's own, if it trains.
        criterion: the script's loss.

    Raises:
        ConfigError: when the site trains with differential privacy and the run does not allow it.
    """
    policy = guard.policy
    if loop is not None:
        if policy.sgd_noise_multiplier:
            raise ConfigError(
                f"site {guard.site}: it trains with differential privacy (sgd_noise_multiplier of its "
                "privacy policy), and nothing bounds what one case changes in a loop of one's own"
            )
        by_script: tuple[Any, ...] = (*place, loop, criterion, *more)
        return LoopTraining(*by_script)
    own: tuple[Any, ...] = (*place, ahead, *more)
    if not policy.sgd_noise_multiplier:
        return LocalTraining(*own)
    # Imported here: Opacus is an extra, and takes seconds.
    from medfedaug.federation.site.dp_sgd import PrivateTraining

    clip, noise = policy.sgd_clip, policy.sgd_noise_multiplier
    return PrivateTraining(*own, methods=methods, clip=clip, noise=noise, spend=guard.train)
