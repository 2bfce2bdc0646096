"""`SiteModel`: a federation's model at one site, which receives, recalls and scores it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from monai.transforms import Compose
from torch import Tensor

from medfedaug.config.machine import Machine
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import own_entries
from medfedaug.federation.site.data_folder import open_own_data
from medfedaug.federation.site.local_training import learning_rate
from medfedaug.federation.site.request_checks import check_received
from medfedaug.federation.site.samples import SiteSamples
from medfedaug.federation.site.script_components import Brought, OwnSamples, own_scores
from medfedaug.federation.site.state import LocalState
from medfedaug.federation.site.step_graph import CapturedNetwork, Capturing, of_device, why_plain
from medfedaug.methods.base import Payload, SiteContext, SitePart
from medfedaug.models.memory_format import channels_last
from medfedaug.models.modes import evaluating
from medfedaug.models.precision import run_in_bfloat16
from medfedaug.models.substitution import call_with
from medfedaug.statistics import ChannelStatistics
from medfedaug.tasks import EvaluationCase, Sample


class SiteModel:
    """The network of a run at one site, with the site's images and the methods' site halves.

    It does what scoring and prediction need: `open` it, `receive` a global model, `recall` what the site
    keeps with it, then use `network` within `scoring`, or `evaluate`. Nothing is trained, sent or written;
    `medfedaug.federation.site.trainer.SiteTrainer` does that.

    Args:
        config: the run.
        data: see `medfedaug.federation.resolve_data_folder`, or the site's data if they are already open.
        device: ``"cpu"``, ``"cuda"``, ... or ``"auto"``: CUDA if available.
        threads: CPU threads; 0 leaves PyTorch's choice.
        machine: where the site keeps its prepared images.
        statistics: of the site, in place of those of its images.

    Attributes:
        name: the site's name.
        folder: its data.
        trains: whether it has training cases in this run.
        composition: network and methods as the run puts them together.
        network: the network with all methods' layers, on the device.
        task: samples, loss and scores of the run.
        parts: the methods' site halves, by name.
        samples: the site's images, prepared; ``None`` before `open`.
        shared: the entries of the state dict that are averaged.
        kept_keys: the entries that stay at the site.
        round: the number of the current or next round of training.
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
        self._script = Brought()
        self._set_aside: dict[str, Tensor] = {}
        self._personalised = False  # since the model was received

    def open(self, name: str) -> None:
        """Open the data folder and build the network with the methods' layers, anew if it was open.

        Raises:
            DataError: when the data cannot be used.
            ConfigError: when methods, network and data cannot be combined.
        """
        self.name = name
        data = self.data  # given open data have been checked
        self.folder = data if isinstance(data, SiteFolder) else open_own_data(name, self.config, data)
        if self.config.unlabelled_weight == 0:
            self.folder = self.folder.without_unlabelled()
        self.trains = self.folder.trains and name not in self.config.holdout
        self._begin()

    def _begin(self) -> None:
        self._build(Brought())

    def _build(self, script: Brought) -> None:
        """Put together network, methods and samples, around what a training script brings."""
        if self.threads:
            torch.set_num_threads(min(self.threads, os.cpu_count() or 1))
        if self.machine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used
            torch.use_deterministic_algorithms(True)
        self._script, self._set_aside, self._personalised = script, {}, False
        script.check(self.name, (method["name"] for method in self.config.methods))
        composition = self.composition = Composition(self.config, script.network)
        self.network = channels_last(composition.network.to(self.device))
        self.task = composition.task()
        self.task.check_site(self.folder)
        if self.trains:
            composition.check_annotated(self.folder)
        self.kept_keys, self.shared = composition.kept_keys, composition.shared
        self.parts: dict[str, SitePart] = {}
        samples = self._samples_of(script)
        if self.samples is not None:  # built anew after an error: prepared images are still valid
            samples.take_prepared(self.samples)
        self.samples = samples
        context = self._context(samples)
        self.parts.update({method.name: method.at_site(context) for method in composition.methods})
        reason = why_plain(self.device, composition.methods)
        self._passes = Capturing("passes of inference", self.name, self.device, self.machine.graphs, reason)
        if self.config.precision == "bfloat16":
            run_in_bfloat16(self.network)  # after the methods, whose own hooks on the network see float32

    def _samples_of(self, script: Brought) -> SiteSamples:
        place: dict[str, Any] = {
            "folder": self.folder,
            "task": self.task,
            "config": self.config,
            "device": self.device,
            "parts": self.parts,
            "machine": self.machine,
        }
        return SiteSamples(**place) if script.samples is None else OwnSamples(**place, own=script.samples)

    def _context(self, samples: SiteSamples) -> SiteContext:
        """The context of all methods at this site."""
        config, composition = self.config, self.composition
        return SiteContext(
            self.name,
            self.network,
            statistics=self.statistics,
            num_samples=lambda: len(samples.training()),
            samples_by_case=lambda: [len(one) for one in samples.by_case()],
            cases_by_class=lambda: [*Counter(case.label for case in self.folder.cases["training"]).values()],
            training_images=lambda: samples.images(samples.training()),
            training_batches=lambda: samples.batches(samples.training()),
            training_loss=self.training_loss,
            case_moments=samples.case_moments,
            case_landmarks=samples.case_landmarks,
            case_batches=lambda: map(samples.images, samples.by_case()),
            pass_own_images=self.pass_own_images,
            local_entries=composition.kept_keys,
            frozen=composition.frozen,
            missing_channels=self.folder.missing_channels,
            annotated=lambda: self.folder.annotated("training"),
            task=self.task,
            momentum=composition.definition.momentum,
            optimiser=lambda parameters: of_device(
                composition.definition.optimiser(parameters, learning_rate(config, self.round)), self.device
            ),
            round=lambda: self.round,
            rounds=config.rounds,
        )

    def training_loss(self, what: str, weights: Payload | None = None) -> float:
        """The mean of the task's loss over the training images, in evaluation mode.

        Args:
            what: the loss by name, for a site that limits what it sends of it.
            weights: in place of the network's own.
        """
        return self._mean_loss(self._samples.training(), weights)

    @torch.no_grad()
    def _mean_loss(self, samples: Sequence[Sample], weights: Payload | None = None) -> float:
        found = []
        with evaluating(self.network):
            for inputs, targets in self._samples.batches(samples):
                loss = self.task.loss(call_with(self.network, weights or {}, inputs), targets).double()
                found.append(torch.stack([loss * len(inputs), torch.full_like(loss, len(inputs))]))
        total, count = torch.stack(found).sum(dim=0)
        return float(total / count)

    def statistics(self, over: str = "image") -> ChannelStatistics:
        """The site's channel statistics; see `SiteSamples.statistics`."""
        given = self._given_statistics or self._script.statistics
        return given or self._samples.statistics(over)

    @property
    def _samples(self) -> SiteSamples:
        assert self.samples is not None, "open comes first"
        return self.samples

    def receive(
        self,
        weights: Mapping[str, Tensor],
        payload: Payload | None = None,
        once: Payload | None = None,
    ) -> None:
        """Load the global model's shared entries, and give each method what the server computed.

        Args:
            weights: the shared entries; none for the model that was received before.
            payload: what the methods exchange in every round, with keys ``<method>/<key>``.
            once: what they exchanged before training, with the same kind of keys.

        Raises:
            MedFedAugError: when a check of it fails; nothing is then loaded.
        """
        payload, once = payload or {}, once or {}
        check_received(
            self.name, self.network, self.shared, self.parts, weights=weights, payload=payload, once=once
        )
        if weights:
            self.network.load_state_dict({key: weights[key] for key in self.shared}, strict=False)
            self._personalised = False
        if once:
            self._apply_once(once)
        for name, part in self.parts.items():
            entries = own_entries(payload, name)
            if part.every_round is not None and entries:
                part.every_round.apply(entries)

    def _apply_once(self, once: Payload) -> None:
        for name, part in self.parts.items():
            entries = own_entries(once, name)
            if part.before_training is not None and entries:
                part.before_training.apply(entries)

    def recall(self, kept: LocalState | None) -> bool:
        """Load what the site kept with the received model, or what methods have for a site without it.

        Returns:
            Whether the network is complete. It is not if sites keep layers and this site has none.
        """
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
            self._personalised = False

    def _complete(self, *, has_own: bool) -> bool:
        if self.kept_keys and not has_own and not self.complete_network():
            return False
        self._personalise()
        return True

    def _personalise(self) -> None:
        if not self._personalised:
            for part in self.parts.values():
                part.personalise()
            self._personalised = True

    def complete_network(self) -> bool:
        """Load what methods know of kept entries, until a state is recalled. Returns whether that is all."""
        state, known = self.network.state_dict(), {}
        self._set_aside = self._set_aside or {key: state[key].clone() for key in self.kept_keys}
        for part in self.parts.values():
            found = part.default_local_entries().items()
            known.update({key: value for key, value in found if key in self.kept_keys})
        self.network.load_state_dict(known, strict=False)
        # Integer entries count batches and have no effect in evaluation.
        return all(key in known for key in self.kept_keys if state[key].is_floating_point())

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Within it the network is the one that the methods score and predict with at this site."""
        with ExitStack() as contexts:
            for part in self.parts.values():
                contexts.enter_context(part.scoring())
            yield

    def evaluate(self, split: str, *, full: bool) -> dict[str, Any]:
        """Score the recalled model on the site's cases of a split."""
        with self.scoring():
            if (own := self._script.score) is None:
                return self.score(self._samples.evaluation(split), full)
            return own_scores(own, self.network, self.folder, split, self.task.metric)

    def score(self, cases: Iterable[EvaluationCase], full: bool = False) -> dict[str, Any]:
        """Score the network as it is."""
        transform, size = self.evaluation_transform(), self.config.batch_size
        return self.task.evaluate(self.inference(), cases, transform, self.device, size, full)

    def inference(self) -> torch.nn.Module:
        """The network to infer with, whose passes are captured where the machine has it so.

        It serves as long as the weights stay at their place in memory.
        """
        on = self._passes.on
        return CapturedNetwork(self.network, self._passes, self.parts) if on else self.network

    def pass_own_images(self) -> None:
        """Run the network over the images that the site has to go by: see `SiteContext`."""
        split = "training" if self.folder.cases["training"] else "test"
        cases = self.task.evaluation_cases(self.folder, split, labelled=False)
        transform, size = self.evaluation_transform(), self.config.batch_size
        self.network.eval()
        for _ in self.task.outputs(self.network, cases, transform, self.device, size):
            pass  # layers collect statistics of what passes

    def evaluation_transform(self) -> Compose:
        """The transforms of an image in evaluation, before the network."""
        return self._samples.transform(training=False)
