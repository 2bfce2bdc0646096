"""`Account`: entries of a job's releases in a site's ledger."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from medfedaug.data.base import SiteFolder
from medfedaug.data.dataset_json import LABELLED
from medfedaug.errors import ConfigError, PrivacyRefused
from medfedaug.federation.messages.messages import (
    FINGERPRINT,
    MASK_TASKS,
    PREPARE,
    SCORE_EPSILON,
    TRAIN,
    Reply,
    by_method,
    digest_of,
)
from medfedaug.hospital.privacy import (
    PrivacyLedger,
    PrivacyPolicy,
    Release,
    class_labels,
    released_difference,
    released_scores,
)
from medfedaug.hospital.privacy.content_hash import case_identities
from medfedaug.hospital.privacy.guard import spend_budget
from medfedaug.hospital.privacy.ledger import bind_account
from medfedaug.metrics.registry import METRICS

_TRAINING = (FINGERPRINT, PREPARE, TRAIN)
"""The tasks whose answers are about training cases."""


def enter_message(ledger: PrivacyLedger, site: str, job: str, text: str) -> None:
    """Enter the text of an error that the server receives instead of an answer."""
    ledger.enter([Release(job, "task", "message", text, digest=_hash(text), site=site)])


class Account:
    """View of one job on a site's ledger; ``epsilon`` is the largest ε of noisy scores on a split."""

    def __init__(
        self, site: str, job: str, ledger: PrivacyLedger, policy: PrivacyPolicy, folder: SiteFolder
    ) -> None:
        self.site, self.job, self.ledger, self.policy, self.folder = site, job, ledger, policy, folder
        self.epsilon: float | None = None
        self._identities: dict[str, dict[bytes, bytes]] = {}
        self._release = partial(Release, job, site=site)

    def bind(self) -> None:
        """Bind the site's images to the ledger, unless they belong to another one, or to a newer copy."""
        try:
            bind_account(self.ledger, self.folder)
        except ConfigError as error:
            raise PrivacyRefused(self.site, error.marked) from error

    def enter(self, reply: Reply) -> None:
        """Enter an answer, except for its scores, before it leaves."""
        if reply.task in MASK_TASKS:
            texts = {key: value.hex() for key, value in reply.masks.items()}
            self.ledger.enter([self._release("masks", reply.task, _names(texts), digest=_hash(texts))])
            return
        if reply.task in _TRAINING:
            if self.epsilon is not None:
                reply.metrics[SCORE_EPSILON] = self.epsilon
            self.ledger.enter(self._update(reply, by_method(reply.payload)), self._cases("training"))
            if reply.task == PREPARE and LABELLED in reply.metrics["input"]:
                names = reply.metrics["input"][LABELLED] or "none"
                text = f"annotated classes: {names}"
                self.ledger.enter([self._release("task", "numbers", text, digest=_hash(names))])

    def release(self, split: str, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Enter the scores of a model in the ledger, and return the part that leaves."""
        patients, labels = self.folder.patients(split), class_labels(self.folder, split)
        answer = released_scores(scores, self.policy, patients, labels)
        if any(value is not None for key, value in answer.items() if key in METRICS):
            self._spend(split)
            self._enter_scores(split, "scores", answer)
        return answer

    def compare(self, split: str, differences: Sequence[float], unit: str) -> dict[str, Any]:
        """Enter the difference between two models' scores in the ledger, and return the part that leaves."""
        difference = released_difference(differences, self.policy, unit)
        if difference:
            self._enter_scores(split, "differences", difference)
        return difference

    def _enter_scores(self, split: str, kind: str, answer: Mapping[str, Any]) -> None:
        left = {key: value for key, value in answer.items() if key in METRICS and value is not None}
        about = (
            _names(left or answer),
            split,
            len(self.folder.cases[split]),
            self.policy.score_noise_multiplier,
        )
        self.ledger.enter([self._release("task", kind, *about, _hash(answer))], self._cases(split))

    def _spend(self, split: str) -> None:
        """Enter noise on scores in the account of ε, before they leave."""
        if noise := self.policy.score_noise_multiplier:
            what, cases = f"the {split} scores of one more model", partial(self._cases, split)
            epsilon = spend_budget(self.site, self.policy, self.ledger, what, noise, cases)
            self.epsilon = max(epsilon, self.epsilon or 0.0)

    def _update(self, reply: Reply, payloads: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Release]:
        about, noise = ("training", len(self.folder.cases["training"])), self.policy.sgd_noise_multiplier
        kinds = {"weights": reply.weights, "masked weights and statistics": reply.masks}
        for kind, tensors in kinds.items():
            if tensors:
                yield self._release("model", kind, _size(tensors), *about, noise, digest_of(tensors))
        for method, values in payloads.items():
            statistics = (_size(values), *about, self.policy.noise_multiplier, digest_of(values))
            yield self._release(method, "statistics", *statistics)
        metrics = {key: value for key, value in reply.metrics.items() if value is not None}
        numbers = {"num_samples": reply.num_samples, **metrics}
        yield self._release("task", "numbers", _names(numbers), *about, digest=_hash(numbers))

    def _cases(self, split: str) -> dict[bytes, bytes]:
        if split not in self._identities:
            self._identities[split] = case_identities(self.folder, split, self.ledger)
        return self._identities[split]


def _size(tensors: Mapping[str, Tensor]) -> str:
    return f"{sum(value.numel() for value in tensors.values())} numbers in {len(tensors)} entries"


def _names(entries: Mapping[str, Any]) -> str:
    return ", ".join(sorted(entries))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
