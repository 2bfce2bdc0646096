"""What a site's trainer gives each method to know about the site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medfedaug.methods.base import SiteContext

if TYPE_CHECKING:
    from medfedaug.federation.samples import SiteSamples
    from medfedaug.federation.trainer import SiteTrainer

__all__ = ["site_context"]


def site_context(trainer: SiteTrainer, samples: SiteSamples) -> SiteContext:
    """The context of all methods at a site, which has its network and its samples.

    Args:
        trainer: the site's.
        samples: the site's.
    """
    config, task, composition = trainer.config, trainer.task, trainer.composition
    return SiteContext(
        trainer.name,
        trainer.network,
        statistics=trainer.statistics,
        num_samples=lambda: len(samples.training()),
        samples_by_case=lambda: [len(one) for one in samples.by_case()],
        training_images=lambda: samples.images(samples.training()),
        training_batches=lambda: samples.batches(samples.training()),
        case_moments=samples.case_moments,
        case_landmarks=samples.case_landmarks,
        case_batches=lambda: map(samples.images, samples.by_case()),
        pass_own_images=trainer.pass_own_images,
        kept=composition.kept_keys,
        frozen=composition.frozen,
        missing=trainer.folder.missing_channels,
        task=task,
        momentum=composition.definition.momentum,
        optimiser=lambda parameters: trainer.training.optimiser(parameters, trainer.round),
        round=lambda: trainer.round,
        rounds=config.rounds,
    )
