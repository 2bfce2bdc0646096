"""`FinishedRun`: a recorded run with its network, weights and exchanges; `Origin`: of images for it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from medfedaug.config.bundle_reference import PREDICTS
from medfedaug.config.machine import KIT_STATE, STATE_VARIABLE, Machine
from medfedaug.data.base import SPLITS, SiteFolder
from medfedaug.data.images import ImageFolder
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, MedFedAugError, config_errors
from medfedaug.federation.composition import Composition
from medfedaug.federation.job_folder import STATE, check_unchanged, exchange_file
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.state import LocalState, read_local_states
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.metrics.registry import GLOBAL, UNSEEN
from medfedaug.models.entries import load_tensors
from medfedaug.runs.recorded_run import RecordedRun
from medfedaug.statistics import ChannelStatistics, load_statistics

if TYPE_CHECKING:
    from typing_extensions import Self

_Model = TypeVar("_Model", bound=SiteModel)


@dataclass(frozen=True, eq=False, repr=False)
class FinishedRun(RecordedRun):
    """A model of a finished run, ready for use.

    ``weights`` are the shared entries of the network, ``payload`` has further values that the methods' layers
    need, by method, and ``state`` is the folder with the sites' state.
    """

    weights: dict[str, Tensor]
    payload: dict[str, Tensor]
    state: Path

    @classmethod
    def open(cls, model: str | Path, *, state: str | Path | None = None) -> Self:
        """Read a run's files, and check that they belong together.

        Args:
            model: the folder of a run, for its ``global_model.pt``, or a model of it.
            state: the sites' state, for a run that leaves layers at the sites: a folder, or the kit of a
                site, whose settings name one. By default the folder ``state`` next to the model, else the
                folder of the environment variable ``MEDFEDAUG_STATE``.

        Raises:
            MedFedAugError: naming the error and its place.
        """
        run = RecordedRun.open(model)
        weights, exchange = _load_weights(run.model), exchange_file(run.model)
        payload = _load_weights(exchange) if exchange.exists() else {}
        return cls(run.model, run.record, weights, payload, _find_state(run.model.parent, state))

    @cached_property
    def composition(self) -> Composition:
        """The network, with initial weights, and the methods."""
        return Composition(self.config)

    @property
    def gamma(self) -> dict[str, tuple[Tensor, Tensor]]:
        """γ of each stage's mean and standard deviation, (C,) each, for `FFALayer.set_gamma`.

        Use it to train a network with the same stages without a federation. Empty where no method of the run
        sent γ.
        """
        means = [key for key in self.payload if key.endswith("/gamma_mean")]
        return {
            key.split("/")[-2]: (self.payload[key], self.payload[key.removesuffix("mean") + "std"])
            for key in means
        }

    def check_whole(self) -> None:
        """Check that the file of exchanged values exists, which a model needs, but not a model card."""
        check_unchanged(exchange_file(self.model), self.record)

    def network(self, site: str = "") -> nn.Module:
        """Build the network with the model's weights, in evaluation mode on the CPU.

        Its input is an image from the run's data pipeline: scaled, and normalised where a method of the run
        normalises, as in `LoadedRun.predict`. It gets the layers or weights of a site, where the run left
        some at the sites.
        """
        if site:
            self.check_site(site)
        kind = VolumeFolder if self.config.task == "segmentation" else ImageFolder
        splits: dict[str, Any] = dict.fromkeys(SPLITS, ())
        model = self.at_site(site, kind(site, self.model.parent, self.config.classes, splits), "cpu")
        with self.scoring(model) as network:
            return copy.deepcopy(network)

    def check_site(self, site: str) -> None:
        """Check that a site took part in the run."""
        record, rounds = self.record, self.record["rounds"]
        known = {*self.statistics, *self.sites_with_layers, *record.get("sites", ())}
        known.update(record.get("unseen", ()), *(round_["sites"] for round_ in rounds))
        if site not in known:
            raise ConfigError(f"{site!r} took no part in the run, whose sites are {', '.join(sorted(known))}")

    def recall(self, model: SiteModel) -> None:
        """Complete the model of `at_site` with the layers and weights that stay at its site."""
        if not model.recall(self.local_state(model.name)):
            keeping = [m.name for m in self.composition.methods if m.local_entries(model.network)]
            sites = ", ".join(self.sites_with_layers)
            raise ConfigError(
                f"{' and '.join(keeping)}: layers of the model stay at the sites; name one with --site "
                f"({sites or 'none'} in {self.state}, and --state names another folder), or train with the "
                "method's argument unseen"
            )

    @contextmanager
    def scoring(self, model: SiteModel) -> Iterator[nn.Module]:
        """Yield the network that scores a site's cases, from the model of `at_site`."""
        self.recall(model)
        with model.scoring():
            model.network.eval()
            yield model.network

    @property
    def sites_with_layers(self) -> list[str]:
        """The sites with layers or weights in `state`."""
        return sorted(path.parent.name for path in self.state.glob(f"*/{self.record['run']}.pt"))

    def whose(self, site: str, split: str = "test") -> str:
        """Name the model of a site's scores, as in ``results.json``.

        The split is ``"validation"`` or ``"test"``. An unknown site has no personal model.
        """
        if site in self.record.get("sites", {}):
            return self.composition.scored[split]
        return UNSEEN if site in self.record.get("unseen", ()) else f"{GLOBAL} (no site of the run)"

    def local_state(self, site: str) -> LocalState | None:
        """Read a site's state with this model, after its last training round; ``None`` for none."""
        states = read_local_states(self.state / site / f"{self.record['run']}.pt")
        last = max((round_ for round_ in states if round_ <= self.round), default=0)
        return states.get(last)

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

        `SiteModel` describes the data, of which at most ``limit`` cases of each split are used. By default
        the site's statistics are computed from its images.
        """
        self.check_whole()
        config = replace(self.config, limit=limit)
        model = SiteModel(config, data, device, machine=_machine(), statistics=statistics)
        model.open(name)
        return self._received(model)

    def trainer(
        self, name: str, data: str | Path | SiteFolder, device: str = "auto", *, limit: int | None = None
    ) -> SiteTrainer:
        """Open the model at a site that may train it further before its test; otherwise as `at_site`."""
        self.check_whole()
        config = replace(self.config, limit=limit)
        trainer = SiteTrainer(config, data, device, self.state / name, machine=_machine())
        trainer.open(name)
        trainer.enter_run(self.record["run"])
        return self._received(trainer)

    def _received(self, model: _Model) -> _Model:
        with config_errors(str(self.model), MedFedAugError):  # somebody changed the model and its record
            model.receive(self.weights, self.payload, self.payload)
        return model


def _find_state(folder: Path, state: str | Path | None) -> Path:
    if state is not None:
        is_kit = (Path(state) / "startup").is_dir() and (Path(state) / "local").is_dir()
        return Path(os.environ.get(STATE_VARIABLE) or Path(state) / KIT_STATE) if is_kit else Path(state)
    default, variable = folder / STATE, os.environ.get(STATE_VARIABLE)
    return Path(variable) if variable and not default.is_dir() else default


def _load_weights(path: Path) -> dict[str, Tensor]:
    """Read a file that has the recorded hash."""
    with config_errors(f"{path}: not a model"):  # a damaged file fails anywhere between zip and pickle
        return dict(load_tensors(path))


def _machine() -> Machine:
    """Read this machine's settings from the environment, without a cache of prepared images."""
    settings = Machine.from_environment()
    return Machine(compile=settings.compile, deterministic=settings.deterministic)


@dataclass(frozen=True)
class Origin:
    """Origin of images: their site, empty if unknown, and the pair of statistics with its source in words.

    Without a pair, the statistics of the images themselves count.
    """

    site: str
    pair: ChannelStatistics | None
    source: str

    @classmethod
    def of(cls, run: FinishedRun, site: str | None, statistics: str | Path | None) -> Origin:
        """Read the origin from a run and a site's name, or from a file of statistics.

        Raises:
            ConfigError: naming the option that gives missing statistics or layers; and for a run with a
                Bundle.
        """
        if run.config.bundle:
            raise ConfigError(f"{run.model}: {PREDICTS}")
        if site is not None and statistics is not None:
            raise ConfigError("--site and --statistics exclude each other: both choose the statistics")
        if statistics is not None and not run.composition.needs_statistics:
            raise ConfigError("--statistics: the run's methods do not normalise with a site's; leave it out")
        if statistics is not None:
            return cls("", _one_pair(Path(statistics), run), str(statistics))
        if site is None:
            return cls("", None, "")
        run.check_site(site)
        layers = run.sites_with_layers
        if run.composition.personal and site not in layers:
            present = f"has those of {', '.join(layers)}" if layers else "has none"
            raise ConfigError(
                f"the run left layers or weights at its sites, and {run.state} {present}: give --state, the "
                f"folder in which {site} keeps its own, or its kit"
            )
        if run.composition.needs_statistics and site not in run.statistics:
            raise ConfigError(
                f"the run has no statistics of {site}: give --statistics FILE, which `medfedaug statistics "
                f"--intensity {run.composition.intensity} --data DIR --out FILE` makes of its images"
            )
        return cls(site, run.statistics.get(site), f"site {site}")


def _one_pair(path: Path, run: FinishedRun) -> ChannelStatistics:
    with config_errors("--statistics", ValueError), config_errors(f"--statistics {path}", OSError):
        statistics = load_statistics(path, run.composition.intensity)
    if len(statistics) > 1:
        raise ConfigError(f"{path}: expected one site, found {', '.join(statistics)}")
    (pair,) = statistics.values()
    if pair.num_channels != run.config.in_channels:
        raise ConfigError(
            f"{path}: has {pair.num_channels} channels; the model expects {run.config.in_channels}"
        )
    return pair
