"""Take part in a federation with a custom training loop, in a script.

``medfedaug simulate --loop train.py``, or a job of ``medfedaug export --loop train.py``, runs the script at
each site. Server, exchange and the guards of a site are those of any other run: the script trains its network
and sends nothing itself::

    from medfedaug import client

    files = client.files("training")
    federation = client.join(network, "fedrdn,fedfa+")
    dataset = CacheDataset(files, Compose([*own_transforms, federation.transform]))
    for round in federation:
        for batch in loader:
            output = network(batch["image"])
            loss = criterion(output, batch["label"]) + federation.loss_terms(batch, output)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            federation.step(loss)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medfedaug.config.run import RunConfig
from medfedaug.errors import MedFedAugError
from medfedaug.federation.site.local_training import LocalRound
from medfedaug.federation.site.script_components import Score, ScriptComponents
from medfedaug.federation.site.script_training import Federation, ScriptSession
from medfedaug.methods import parse_methods
from medfedaug.tasks import Sample

__all__ = ["Federation", "FederationHandler", "LocalRound", "files", "join", "settings"]

Wait = Callable[[], LocalRound | None]

_connection: tuple[ScriptSession, Wait] | None = None


@contextmanager
def script_at(session: ScriptSession, wait: Wait) -> Iterator[None]:
    """Connect the script of this process to a session."""
    global _connection
    own = _connection = session, wait
    try:
        yield
    finally:
        if _connection is own:  # otherwise of a script that was started after this one
            _connection = None


def files(split: str = "training") -> list[dict[str, Any]]:
    """Return the cases of this site's data folder for MONAI's transforms.

    Args:
        split: ``"training"``, ``"validation"`` or ``"test"``.

    Returns:
        For each case ``name``, ``image``, a path or the list of the paths of its channels, and ``label``, a
        path or the index of the class in the federation.

    Raises:
        MedFedAugError: when no job runs the script; when the site's channels differ from the federation's, or
            their order; for a class that the federation lacks.
    """
    return _connect()[0].files(split)


def settings() -> RunConfig:
    """Return the settings of the job, the same at every site: plan, classes, batch size, rounds.

    Raises:
        MedFedAugError: when no job runs the script.
    """
    return _connect()[0].site.config


def join(
    network: nn.Module | None = None,
    methods: str | None = None,
    *,
    samples: Sequence[Sample] | None = None,
    score: Score | None = None,
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Federation:
    """Take part in the federation of the job that runs this script.

    The job decides over methods, rounds and all settings of the exchange; the script over everything between
    two exchanges: data pipeline, optimiser, precision, schedule, number of steps.

    By default the site computes scores, and the methods' statistics and histograms, with the job's pipeline:
    intensities and volumes are prepared by the job's settings. A script with another preparation passes
    ``samples`` and ``score``.

    Args:
        network: the network to train, with the entries of the job's. It gets the job's initial weights and
            the methods' layers, in place. ``None`` for the job's, as ``Federation.network``.
        methods: the methods that the script was written for, as on the command line; another job is refused.
        samples: the script's training samples, dictionaries with ``image``, (C, *spatial), and ``label``,
            prepared, but neither augmented nor passed through the methods' transform. They define
            statistics, histograms and the site's weight.
        score: called with the network, in evaluation mode, and ``"validation"`` or ``"test"``; returns the
            job's metric (Dice, accuracy) from 0 to 1 by the name of the case, ``None`` or NaN for a case
            without a score.
        criterion: the script's loss of outputs and targets, for methods that use it; by default the job's.

    Returns:
        The federation: rounds to iterate over, `Federation.transform`, `Federation.loss_terms`,
        `Federation.step`.

    Raises:
        MedFedAugError: when no job runs the script, a method does not support a custom loop, or network and
            job do not fit.
    """
    session, wait = _connect()
    names = None if methods is None else tuple(spec["name"] for spec in parse_methods(methods))
    components = ScriptComponents(network, names, samples, score, criterion)
    return Federation(session.join(components), wait)


class FederationHandler:
    """Lets a MONAI trainer (pytorch-ignite) take part: ``train_handlers=[FederationHandler(...)]``.

    At each iteration it adds the methods' terms to the loss, and follows the steps of the trainer's
    optimiser, also with accumulated gradients.

    Args:
        federation: the result of `join`.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self._followed: torch.optim.Optimizer | None = None

    def attach(self, engine: Any) -> None:
        """Attach the handler to a `monai.engines.SupervisedTrainer`."""
        from ignite.engine import Events
        from monai.engines import IterationEvents
        from monai.utils import CommonKeys as Keys

        def add_terms(engine: Any) -> None:
            state = engine.state.output
            batch = (state[Keys.IMAGE], state[Keys.LABEL])
            state[Keys.LOSS] = state[Keys.LOSS] + self.federation.loss_terms(batch, state[Keys.PRED])

        def follow(engine: Any) -> None:  # in each round the trainer has no optimiser before it starts
            if self._followed is not engine.optimizer:
                self._followed = engine.optimizer
                self.federation.follow(engine.optimizer, lambda: engine.state.output[Keys.LOSS])

        engine.add_event_handler(IterationEvents.LOSS_COMPLETED, add_terms)
        engine.add_event_handler(Events.STARTED, follow)


def _connect() -> tuple[ScriptSession, Wait]:
    """Return the session, and a function that waits for its next round."""
    if _connection is None:
        raise MedFedAugError(
            "no job runs this script: start it with `medfedaug simulate --loop FILE`, or in a job that "
            "`medfedaug export --loop FILE` wrote"
        )
    return _connection
