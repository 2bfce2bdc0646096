"""`FinishedRun`: a recorded run with its network and weights, and what of its exchange these need."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medfedaug.config.machine import Machine
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SPLITS, SiteFolder
from medfedaug.data.images import ImageFolder
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, first_line
from medfedaug.federation.composition import Composition
from medfedaug.federation.job_folder import STATE, check_unchanged, exchange_file
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.state import LocalState, read_local_states
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.metrics.registry import GLOBAL, UNSEEN
from medfedaug.models.tensor_files import load_tensors
from medfedaug.privacy.site_settings import STATE_VARIABLE, SiteSettings
from medfedaug.runs.recorded_run import RecordedRun
from medfedaug.statistics import ChannelStatistics
from medfedaug.utils.validation import first_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FinishedRun"]


@dataclass(frozen=True, eq=False)
class FinishedRun(RecordedRun):
    """A model of a finished run, with all that is needed to use it.

    Args:
        weights: the shared entries of the network.
        payload: what the methods' layers need besides, by method.
        state: the folder in which the sites keep what is theirs.
    """

    weights: dict[str, Tensor]
    payload: dict[str, Tensor]
    state: Path

    @classmethod
    def open(
        cls, model: str | Path, *, config: str | Path | None = None, state: str | Path | None = None
    ) -> Self:
        """Read a run's files, and check that they belong together.

        Args:
            model: the folder of a run, whose ``global_model.pt`` is taken, or a model of it. What layers of
                methods need besides is read from ``global_exchange.pt`` beside it, where there is one.
            config: the run's ``results.json``; by default the one beside the model.
            state: where the sites keep what is theirs, for a run that leaves layers at the sites: a folder of
                states, or the kit of a site, whose settings name one. By default the folder ``state`` beside
                the model, and where there is none that of the environment variable ``MEDFEDAUG_STATE``.

        Raises:
            ConfigError: one line that says what is wrong and where.
        """
        run = RecordedRun.open(model, config=config)
        weights, beside = _load_weights(run.model), exchange_file(run.model)
        payload = _load_weights(beside) if beside.exists() else {}
        finished = cls(run.model, run.record, weights, payload, _find_state(run.model.parent, state))
        _check_weights(run.model, weights, finished.composition)
        _check_finite(beside, payload)
        return finished

    @cached_property
    def composition(self) -> Composition:
        """The network, with initial weights, and the methods."""
        return Composition(self.config)

    @property
    def gamma(self) -> dict[str, tuple[Tensor, Tensor]]:
        """γ of the mean and of the deviation of each stage, (C,) each, as `FFALayer.set_gamma` takes them.

        For training without a federation, in a network with the same stages. Empty where no method of the run
        sent any.

        Example:
            A network of one's own gets the γ of a run::

                layers = ffa_layers(insert_ffa(network))
                for stage, (gamma_mean, gamma_std) in FinishedRun.open("runs/fedfa").gamma.items():
                    layers[stage].set_gamma(gamma_mean, gamma_std)
        """
        means = [key for key in self.payload if key.endswith("/gamma_mean")]
        return {
            key.split("/")[-2]: (self.payload[key], self.payload[key.removesuffix("mean") + "std"])
            for key in means
        }

    def check_whole(self) -> None:
        """Check that what the model needs besides is there; a model card can do without.

        Raises:
            ConfigError: naming the file that is missing.
        """
        check_unchanged(exchange_file(self.model), self.record)

    def network(self, site: str = "") -> nn.Module:
        """Build the network with the model's weights, in evaluation mode on the CPU.

        Its input is an image as the run's data pipeline gives it: scaled, and normalised where a method of
        the run normalises. `LoadedRun.predict` does that, too.

        Args:
            site: the site whose own layers or weights the network gets, where the run left some at the sites.

        Raises:
            ConfigError: for a site that took no part in the run, and where the model is not whole without a
                site, with the sites to name.
        """
        known = {*self.record.get("sites", {}), *self.record.get("unseen", ()), *self.sites_with_layers}
        if site and site not in known:
            raise ConfigError(f"{site!r} took no part in the run, whose sites are {', '.join(sorted(known))}")
        kind = VolumeFolder if self.config.task == "segmentation" else ImageFolder
        splits: dict[str, Any] = dict.fromkeys(SPLITS, ())
        model = self.at_site(site, kind(site, self.model.parent, self.config.classes, splits), "cpu")
        with self.scoring(model) as network:
            return copy.deepcopy(network)

    @contextmanager
    def scoring(self, model: SiteModel) -> Iterator[nn.Module]:
        """Yield the network with which a site's cases are scored.

        Args:
            model: of `at_site`.

        Raises:
            ConfigError: where layers of the model stay at the sites, and `state` has none of this one.
        """
        if not model.recall(self.local_state(model.name)):
            keeping = [m.name for m in self.composition.methods if m.local_entries(model.network)]
            named = ", ".join(self.sites_with_layers)
            raise ConfigError(
                f"{' and '.join(keeping)}: layers of the model stay at the sites"
                + (f"; name one with --site ({named})" if named else f", and {self.state} has none")
            )
        with model.scoring():
            model.network.eval()
            yield model.network

    @property
    def sites_with_layers(self) -> list[str]:
        """The sites whose own layers or weights are in `state`."""
        return sorted(path.parent.name for path in self.state.glob(f"*/{self.record['run']}.pt"))

    def whole_weights(self, site: str) -> dict[str, Tensor]:
        """The shared entries, and those that a site kept in this run, without anything of its images.

        Raises:
            ConfigError: when they are not a whole model.
        """
        network = self.composition.network
        network.load_state_dict(self.weights, strict=False)
        kept = self.local_state(site)
        if self.composition.personalising or (self.composition.kept_keys and kept is None):
            raise ConfigError(
                f"{self.model}: the model of {site} is not whole: its run left layers or weights at the "
                f"sites, and {self.state} has none of {site} that could be sent"
            )
        if kept is not None:
            network.load_state_dict(kept.network, strict=False)
        return {k: v.detach().clone() for k, v in network.state_dict().items() if v.is_floating_point()}

    def whose(self, site: str, split: str = "test") -> str:
        """Name the model that a site's scores belong to, as ``scored`` of ``results.json`` does.

        Args:
            site: its name. One that the run does not know has nothing of its own: data of a site under
                another name, or of a place that never trained.
            split: ``"validation"`` or ``"test"``.
        """
        if site in self.record.get("sites", {}):
            return self.composition.scored[split]
        return UNSEEN if site in self.record.get("unseen", ()) else f"{GLOBAL} (no site of the run)"

    def local_state(self, site: str) -> LocalState | None:
        """Read what a site kept with this model, in the last round in which it trained.

        Returns:
            ``None`` for a site that kept nothing.

        Raises:
            MedFedAugError: when its file is damaged.
        """
        kept = read_local_states(self.state / site / f"{self.record['run']}.pt")
        last = max((round_ for round_ in kept if round_ <= self.round), default=0)
        return kept.get(last)

    def at_site(
        self,
        name: str,
        data: str | Path | SiteFolder,
        device: str = "auto",
        *,
        limit: int | None = None,
        statistics: ChannelStatistics | None = None,
    ) -> SiteModel:
        """Open the model at a site, ready for `SiteModel.recall` with `local_state`.

        Args:
            name: the site's name.
            data: the site's data, see `SiteModel`.
            device: where to compute.
            limit: at most this many cases of each split.
            statistics: of the site, in place of those of its images.

        Raises:
            MedFedAugError: one line that says what is wrong and where.
        """
        self.check_whole()
        model = SiteModel(self._limited(limit), data, device, machine=_machine(), statistics=statistics)
        model.open(name)
        model.receive(self.weights, self.payload, self.payload)
        return model

    def trainer(
        self, name: str, data: str | Path | SiteFolder, device: str = "auto", *, limit: int | None = None
    ) -> SiteTrainer:
        """Open the model at a site that may train it further before its test; otherwise as `at_site`.

        Raises:
            MedFedAugError: one line that says what is wrong and where.
        """
        self.check_whole()
        trainer = SiteTrainer(self._limited(limit), data, device, self.state / name, machine=_machine())
        trainer.open(name)
        trainer.enter_run(self.record["run"])
        trainer.receive(self.weights, self.payload, self.payload)
        return trainer

    def _limited(self, limit: int | None) -> RunConfig:
        return (
            self.config if limit is None else RunConfig.from_dict({**self.config.to_dict(), "limit": limit})
        )


def _find_state(folder: Path, given: str | Path | None) -> Path:
    if given is not None:
        is_kit = (Path(given) / "startup").is_dir() and (Path(given) / "local").is_dir()
        named = SiteSettings.load(given, {}).state if is_kit else None
        return named or Path(given)
    beside, variable = folder / STATE, os.environ.get(STATE_VARIABLE)
    return Path(variable) if variable and not beside.is_dir() else beside


def _load_weights(path: Path) -> dict[str, Tensor]:
    try:
        weights = load_tensors(path)
    except Exception as error:  # a damaged file fails anywhere between zip and pickle
        raise ConfigError(f"{path}: not a model ({first_line(error)})") from error
    if not isinstance(weights, Mapping) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise ConfigError(f"{path}: not a state dict")
    return dict(weights)


def _check_weights(path: Path, weights: Mapping[str, Tensor], composition: Composition) -> None:
    """Check that a model is one of its run's network, whole and finite.

    Raises:
        ConfigError: naming file and entry.
    """
    expected = composition.network.state_dict()
    missing = [key for key in composition.shared if key not in weights]
    if missing:
        raise ConfigError(
            f"{path}: lacks {len(missing)} of the {len(composition.shared)} entries that its run's network "
            f"shares: {first_of(missing)}"
        )
    strange = [key for key in weights if key not in expected]
    if strange:
        raise ConfigError(f"{path}: its run's network has no entries {first_of(strange)}")
    for key, value in weights.items():
        if value.shape != expected[key].shape:
            raise ConfigError(
                f"{path}: {key} has the shape {tuple(value.shape)}, in its run's network "
                f"{tuple(expected[key].shape)}"
            )
    _check_finite(path, weights)


def _check_finite(path: Path, values: Mapping[str, Tensor]) -> None:
    spoilt = [key for key, value in values.items() if not torch.isfinite(value).all()]
    if spoilt:
        raise ConfigError(f"{path}: NaN or infinite values in {len(spoilt)} entries: {first_of(spoilt)}")


def _machine() -> Machine:
    """Read from the environment how this machine computes; it keeps no prepared images."""
    found = SiteSettings.load(None)
    return Machine(graphs=found.graphs, deterministic=found.deterministic)
