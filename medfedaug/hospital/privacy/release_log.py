"""`Account`: entries of a job's releases in a site's ledger, about cases known by their decoded voxels."""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
from monai.utils import convert_to_tensor
from torch import Tensor

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.dataset_json import LABELLED
from medfedaug.data.io.formats import voxel_files
from medfedaug.errors import ConfigError, MedFedAugError, PrivacyRefused, translated
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
    PrivacyPolicy,
    Release,
    class_labels,
    released_difference,
    released_scores,
)
from medfedaug.hospital.privacy.ledger import PrivacyLedger, bind_account
from medfedaug.metrics.registry import METRICS

_log = logging.getLogger(__name__)

_PIECE = 2**16  # bytes of a file's parts that are hashed
_TRAINING = (FINGERPRINT, PREPARE, TRAIN)  # the tasks whose answers are about training cases


def enter_message(ledger: PrivacyLedger, site: str, job: str, text: str) -> None:
    """Enter the text of an error that the server receives instead of an answer."""
    ledger.enter([Release(job, "task", "message", text, digest=_hash(text), site=site)])


def refusing(site: str, about: str = "") -> AbstractContextManager[None]:
    """Turn a `ConfigError` into a refusal by the site's policy; ``about`` begins its reason."""
    return translated(ConfigError, to=lambda error: PrivacyRefused(site, f"{about}{error.marked}"))


def spend_budget(
    site: str,
    policy: PrivacyPolicy,
    ledger: PrivacyLedger,
    what: str,
    noise: float,
    identities: Callable[[], Collection[bytes]],
    *,
    releases: int = 1,
    rate: float = 1.0,
) -> float:
    """Enter releases with noise in a site's ledger; return ε of all its releases, or refuse them."""
    assert policy.epsilon is not None
    with refusing(site):
        epsilon = ledger.spend(noise, policy.delta, policy.epsilon, identities(), releases, rate)
    if epsilon is None:
        limit = f"ε = {policy.epsilon:g} (δ = {policy.delta:g})"
        raise PrivacyRefused(site, f"privacy budget spent: {what} would exceed {limit}")
    return epsilon


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
        with refusing(self.site):
            bind_account(self.ledger, self.folder)

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


def case_identities(site: SiteFolder, split: str, store: PrivacyLedger | None = None) -> dict[bytes, bytes]:
    """Compute an identity of 16 bytes for each case of a split, with its patient's.

    A case's identity is a hash of the image's decoded voxels, as float32: it survives another compression,
    type or format of the file, and changes with any voxel. A file that cannot be decoded has a hash of its
    bytes.

    Decoding takes as long as reading the image for training, so a store keeps the result by the sizes of the
    image's files and 64 KiB each from their beginnings, middles and ends.

    A patient's identity is a hash of the name in the site's list, or the case's identity without a name.
    """
    keys = [(case, _hash_files(case)) for case in site.cases[split]]
    compute = {key: partial(_hash_voxels, site, case, key) for case, key in keys}
    hashes = {key: f() for key, f in compute.items()} if store is None else store.identities(compute)
    of_name = partial(hashlib.blake2b, digest_size=16, person=b"patient")
    return {
        hashes[key]: of_name(case.patient.encode("utf-8", "replace")).digest()
        if case.patient
        else hashes[key]
        for case, key in keys
    }


def _hash_voxels(site: SiteFolder, case: Case, default: bytes) -> bytes:
    """Hash the stored voxels of a case; return the default of a case that cannot be decoded."""
    digest = hashlib.blake2b(repr(case.index).encode(), digest_size=16, person=b"voxels")
    channels, grid = 0, ()
    try:
        for part in site.read_files(case):
            voxels = np.ascontiguousarray(convert_to_tensor(part, track_meta=False).numpy(), dtype=np.float32)
            channels, grid = channels + voxels.shape[0], voxels.shape[1:]
            digest.update(voxels.data)
    except MedFedAugError as error:  # training cannot read it either
        _log.warning("known by its bytes: %s", error)
        return default
    digest.update(repr((channels, *grid)).encode())
    return digest.digest()


def _hash_files(case: Case) -> bytes:
    digest = hashlib.blake2b(repr(case.index).encode(), digest_size=16)
    for image in case.files:
        # Without separate files, the voxels follow the header in the image's file.
        for path in [file for file in voxel_files(image) if file.is_file()] or [image]:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                for start in sorted({0, max(0, size // 2 - _PIECE // 2), max(0, size - _PIECE)}):
                    file.seek(start)
                    digest.update(file.read(_PIECE))
    return digest.digest()
