"""`SiteModel`: a federation's model at one site, which receives, recalls and scores it."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monai.transforms import Compose
from torch import Tensor

from medfedaug.config.machine import Machine
from medfedaug.config.run import RunConfig, learning_rate
from medfedaug.data.base import SiteFolder
from medfedaug.errors import MedFedAugError, UpdateRefused, warn
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import own_entries
from medfedaug.federation.messages.tensor_checks import StateDictValidator, check_tensors
from medfedaug.federation.site.data_folder import open_own_data
from medfedaug.federation.site.entry_patients import EntryPatients
from medfedaug.federation.site.samples import SiteSamples
from medfedaug.federation.site.script_components import ScriptComponents, ScriptSamples, script_scores
from medfedaug.federation.site.state import LocalState
from medfedaug.methods.base import Payload, SiteContext, SitePart
from medfedaug.methods.census import Census
from medfedaug.methods.compatibility import methods_with
from medfedaug.models.entries import evaluating
from medfedaug.models.execution import compile_calls, lay_out, run_in_bfloat16
from medfedaug.statistics import ChannelStatistics
from medfedaug.tasks import EvaluationCase


class SiteModel:
    """The network of a run at one site, with the site's images and the methods' site halves.

    For scoring and prediction: `open` it, `receive` a global model, `recall` the site's state, then use
    `network` within `scoring`, or `evaluate`. `medfedaug.federation.site.trainer.SiteTrainer` trains, sends
    and writes.

    Args:
        data: see `medfedaug.federation.resolve_data_folder`, or the site's open data.
        device: ``"cpu"``, ``"cuda"``, ... or ``"auto"``: CUDA if available.
        threads: CPU threads; 0 leaves PyTorch's choice.
        machine: where the site keeps its prepared images.
        statistics: channel statistics instead of those of the site's images.

    Attributes:
        trains: whether it has training cases in this run.
        network: the network with all methods' layers, on the device.
        parts: the methods' site halves, by name.
        shared: the entries of the state dict that are averaged.
        kept_keys: the entries that stay at the site.
    """

    folder: SiteFolder
    trains: bool
    composition: Composition
    network: torch.nn.Module

    def __init__(
        self,
        config: RunConfig,
        data: str | Path | SiteFolder | None = None,
        device: str = "auto",
        *,
        threads: int = 0,
        machine: Machine | None = None,
        statistics: ChannelStatistics | None = None,
    ) -> None:
        self.config, self.data, self.threads = config, data, threads
        self.machine = machine or Machine()
        self.device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        )
        self.name, self.round = "", 0
        self.samples: SiteSamples | None = None
        self._given_statistics = statistics
        self._script = ScriptComponents()
        self._set_aside: dict[str, Tensor] = {}
        self.payload: Payload = {}
        """The last received exchange of every round."""
        self.min_patients = 1
        """The fewest patients behind a number that leaves the site."""

    def open(self, name: str) -> None:
        """Open the data folder and build the network with the methods' layers."""
        self.name = name
        data = self.data  # open data are already checked
        self.folder = data if isinstance(data, SiteFolder) else open_own_data(name, self.config, data)
        if self.config.unlabelled_weight == 0:
            self.folder = self.folder.without_unlabelled()
        self.trains = self.folder.trains and name not in self.config.holdout
        self._begin()

    def _begin(self) -> None:
        self._build(ScriptComponents())

    def _build(self, script: ScriptComponents) -> None:
        """Build network, methods and samples, with the components of a training script."""
        if self.threads:
            torch.set_num_threads(min(self.threads, os.cpu_count() or 1))
        if self.machine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used
            torch.use_deterministic_algorithms(True)
        self._script, self._set_aside = script, {}
        script.check(self.name, (method["name"] for method in self.config.methods))
        composition = self.composition = Composition(self.config, script.network)
        self.network = lay_out(composition.network.to(self.device))
        self.task = composition.task()
        self.task.check_site(self.folder)
        if self.trains:
            composition.check_annotated(self.folder)
        self.kept_keys, self.shared = composition.kept_keys, composition.shared
        self.parts: dict[str, SitePart] = {}
        samples = self._samples_of(script)
        if self.samples is not None:  # rebuilt after an error: prepared images are still valid
            samples.take_prepared(self.samples)
        self.samples = samples
        training = self.folder.cases["training"]
        learns = bool(methods_with(composition.methods, "unlabelled_images"))
        self.census = Census(
            [case.owner for case in training],
            least=self.min_patients,
            silent=[] if learns else [i for i, case in enumerate(training) if case.annotated == ()],
        )
        self.entry_patients = EntryPatients(self.census, self.network)
        context = self._context(samples)
        self.parts.update({method.name: method.at_site(context) for method in composition.methods})
        if self.config.precision == "bfloat16":
            run_in_bfloat16(self.network)  # after the methods, whose hooks on the network see float32
        self._compile()

    def _compile(self) -> None:
        """Compile the network's calls where the machine's settings ask for it and the methods allow it."""
        wanted = {"auto": self.device.type == "cuda", "on": True, "off": False}[self.machine.compile]
        twice = [m.name for m in self.composition.methods if "second_derivatives" in m.provides]
        if wanted and twice:
            warn(f"the network is not compiled: {', '.join(twice)} differentiates gradients", site=self.name)
        elif wanted:
            compile_calls(self.network, self.name)

    def _samples_of(self, script: ScriptComponents) -> SiteSamples:
        make: Callable[..., SiteSamples] = SiteSamples
        if script.samples is not None:
            make = partial(ScriptSamples, samples=script.samples)
        site = {"folder": self.folder, "parts": self.parts, "device": self.device}
        return make(**site, task=self.task, config=self.config, machine=self.machine)

    def _context(self, samples: SiteSamples) -> SiteContext:
        config, composition = self.config, self.composition
        return SiteContext(
            self.name,
            self.network,
            statistics=self.statistics,
            num_samples=lambda: len(samples.training()),
            samples_by_case=lambda: [len(of_case) for of_case in samples.by_case()],
            census=self.census,
            cases_with=self._cases_with,
            training_images=lambda: samples.images(samples.training()),
            training_batches=lambda: samples.batches(samples.training()),
            training_loss=self.training_loss,
            case_moments=samples.case_moments,
            case_batches=lambda: map(samples.images, samples.by_case()),
            local_entries=composition.kept_keys,
            frozen=composition.frozen,
            missing_channels=self.folder.missing_channels,
            annotated=lambda: self.folder.annotated("training"),
            task=self.task,
            momentum=composition.definition.momentum,
            optimiser=lambda parameters: composition.definition.optimiser(
                self.entry_patients.optimised(parameters), learning_rate(config, self.round)
            ),
            trained=self.entry_patients.optimised,
            round=lambda: self.round,
            rounds=config.rounds,
        )

    def _cases_with(self, name: str) -> list[int] | None:
        """Return the training cases that have annotated a class, by index; ``None`` for all."""
        if not self.folder.partial:
            return None
        folder, place = self.folder, self.folder.classes.index(name)
        sets = (folder.annotated_set(case, folder.classes) for case in folder.cases["training"])
        return [index for index, annotated in enumerate(sets) if annotated[place]]

    @torch.no_grad()
    def training_loss(self) -> float:
        """Return the mean of the task's loss over the training images, in evaluation mode."""
        losses, samples = [], self._samples.training()
        with evaluating(self.network):
            for inputs, targets in self._samples.batches(samples):
                loss = self.task.loss(self.network(inputs), targets).double()
                losses.append(torch.stack([loss * len(inputs), torch.full_like(loss, len(inputs))]))
        total, count = torch.stack(losses).sum(dim=0)
        return float(total / count)

    def statistics(self, over: str = "image") -> ChannelStatistics:
        """Return the site's channel statistics; see `SiteSamples.statistics`."""
        return self._given_statistics or self._samples.statistics(over)

    @property
    def _samples(self) -> SiteSamples:
        assert self.samples is not None, "call open first"
        return self.samples

    def receive(
        self, weights: Mapping[str, Tensor], payload: Payload | None = None, once: Payload | None = None
    ) -> None:
        """Load the global model's shared entries, and apply the methods' payloads."""
        payload, once = payload or {}, once or {}
        self._check_received(weights, payload, once)
        self.payload = payload
        if weights:
            self.network.load_state_dict({key: weights[key] for key in self.shared}, strict=False)
        if once:
            self._apply_once(once)
        for name, part in self.parts.items():
            entries = own_entries(payload, name)
            if part.every_round is not None and entries:
                part.every_round.apply(entries)

    def _check_received(self, weights: Mapping[str, Tensor], payload: Payload, once: Payload) -> None:
        """Check the server's message like a site's reply: shapes, types, finite values, variances."""
        method = "the model"
        try:
            if weights:
                model = {key: weights[key] for key in self.shared}
                StateDictValidator(self.network, self.shared).check_values(self.name, model)
            check_tensors(self.name, {**once, **payload})
            for method, part in self.parts.items():
                for sent, exchange in ((once, part.before_training), (payload, part.every_round)):
                    if exchange is not None and (entries := own_entries(sent, method)):
                        exchange.check(entries)
        except (KeyError, ValueError, UpdateRefused) as error:
            known = isinstance(error, UpdateRefused)
            text = str(error).removeprefix(f"site {self.name}, ") if known else f"{method}: {error}"
            raise MedFedAugError(f"site {self.name}: refused what the server sent: {text}") from error

    def _apply_once(self, once: Payload) -> None:
        for name, part in self.parts.items():
            entries = own_entries(once, name)
            if part.before_training is not None and entries:
                part.before_training.apply(entries)

    def recall(self, kept: LocalState | None) -> bool:
        """Load the site's state for the received model, or the methods' defaults without it."""
        self._restore(kept)
        return self._complete(has_own=kept is not None)

    def _restore(self, kept: LocalState | None) -> None:
        if self._set_aside:
            self.network.load_state_dict(self._set_aside, strict=False)
            self._set_aside = {}
        if kept is not None:
            self.network.load_state_dict(kept.network, strict=False)
            for name, part in self.parts.items():
                if kept.methods[name]:
                    part.restore(kept.methods[name])

    def _complete(self, *, has_own: bool) -> bool:
        return has_own or not self.kept_keys or self.complete_network()

    def complete_network(self) -> bool:
        """Load the methods' defaults of kept entries until a recall; return whether none is missing."""
        state, known = self.network.state_dict(), {}
        self._set_aside = self._set_aside or {key: state[key].clone() for key in self.kept_keys}
        for part in self.parts.values():
            entries = part.default_local_entries().items()
            known.update({key: value for key, value in entries if key in self.kept_keys})
        self.network.load_state_dict(known, strict=False)
        # Integer entries count batches and have no effect in evaluation.
        return all(key in known for key in self.kept_keys if state[key].is_floating_point())

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Use the network with which the methods score and predict at this site."""
        with ExitStack() as contexts:
            for part in self.parts.values():
                contexts.enter_context(part.scoring())
            yield

    def evaluate(self, split: str, *, full: bool) -> dict[str, Any]:
        """Score the recalled model on the site's cases of a split."""
        with self.scoring():
            if (scorer := self._script.score) is None:
                return self.score(self._samples.evaluation(split), full)
            return script_scores(scorer, self.network, self.folder, split, self.task.metric)

    def score(self, cases: Iterable[EvaluationCase], full: bool = False) -> dict[str, Any]:
        """Score the present network."""
        transform, size = self.evaluation_transform(), self.config.batch_size
        return self.task.evaluate(self.network, cases, transform, size, full)

    def evaluation_transform(self) -> Compose:
        """Return the transforms of an image before the network in evaluation."""
        return self._samples.transform(training=False)
