"""The messages between server and site, for every engine."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from monai.utils import convert_to_tensor
from torch import Tensor

from medfedaug.errors import MedFedAugError, first_line
from medfedaug.methods.base import Payload
from medfedaug.methods.census import Contributors

FINGERPRINT, PREPARE, TRAIN, VALIDATE, TEST = "fingerprint", "prepare", "train", "validate", "test"
KEYS, SHARES, CONFIRM, OPEN = "keys", "shares", "confirm", "open"

MASK_TASKS = (KEYS, SHARES, CONFIRM, OPEN)
"""The tasks before and after each round in which the server learns only a sum of masked updates."""

TASKS = (FINGERPRINT, PREPARE, TRAIN, VALIDATE, TEST, *MASK_TASKS)  # the tasks of a federation

MASKED = "sum"  # the entry of `Reply.masks` with the masked numbers of an update

UNSCORED = "val_note"  # the entry of `Reply.metrics` with the reason for an update without a validation score

SCORE_EPSILON = "privacy/score_epsilon"
"""The entry of `Reply.metrics` with ε of the validation scores, if the site adds noise to them."""

NUMBER_OF_SAMPLES = "number of samples"
"""The entry of `Reply.contributors` with the patients behind `Reply.num_samples`."""

FROZEN = "frozen"  # the prefix of the entries in `Request.once` that no site trains

SCORE = "score"  # the task of a comparison that scores a model (`medfedaug.federation.server.comparison`)

_LONGEST_REASON = 1_000


@dataclass
class Request:
    """From the server to a site."""

    task: str  #: one of `TASKS`
    #: The number of the beginning round, from 1; 0 before training. For `validate` and `test`, the round of
    #: the model in this request.
    round: int = 0
    #: The shared entries of the global model that sites train.
    weights: dict[str, Tensor] = field(default_factory=dict)
    #: A hash (`entries_hash`) of the other shared entries, which are in `once`; empty without any.
    frozen: str = ""
    #: The exchange before training, with keys `<method>/<key>`; not repeated in every round.
    once: Payload = field(default_factory=dict)
    payload: Payload = field(default_factory=dict)  #: the exchange of every round, with the same kind of keys
    selected_round: int = 0  #: the best round so far, 0 before the first; sites keep its state
    run: str = ""  #: the identity of the run, which a resumed run keeps; sites find their state by it
    #: Settings of the run from the sites' fingerprints, as JSON types.
    planned: dict[str, Any] = field(default_factory=dict)
    training: str = ""  #: in a comparison, the name of the training to which the request belongs
    #: In rounds with masks, the messages of the round's sites to each other.
    masks: dict[str, Any] = field(default_factory=dict)


@dataclass
class Reply:
    """From a site to the server."""

    task: str
    round: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)  #: the shared entries of the local model
    payload: Payload = field(default_factory=dict)  #: the methods' exchange, with keys `<method>/<key>`
    num_samples: int = 0  #: the number of training samples of the site, which is the weight of its update
    #: Numbers by name, e.g. `train_loss`, `val_dice`, `seconds`; for `test`, an entry per case below `cases`.
    #: `medfedaug.hospital.privacy.score_release` lists those that leave a real site.
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""  #: one line, if the request failed; the server then ignores all other fields
    #: The site's messages to other sites about masks; in an update the masked numbers of weights and payload,
    #: below `MASKED`.
    masks: dict[str, Any] = field(default_factory=dict)
    #: The patients behind each entry of weights and payload, and behind `num_samples`; empty once it leaves
    #: the site.
    contributors: dict[str, Contributors | None] = field(default_factory=dict)


def raise_error(reply: Reply) -> None:
    """Raise the error that a site sent instead of an answer."""
    if reply.error:
        raise MedFedAugError(" ".join(str(reply.error)[:_LONGEST_REASON].split()))


def refusal(site: str, use: Callable[[], Any]) -> str | None:
    """Use a site's reply; return the reason if it could not be used, which concerns only that site."""
    try:
        use()
    except MedFedAugError as error:
        return str(error)
    except Exception as error:
        return f"site {site}: its answer cannot be used ({type(error).__name__}: {first_line(error)})"
    return None


def namespaced(payload: Mapping[str, Tensor], method: str) -> Payload:
    """Put a method's name before its keys: ``enc1/mean`` becomes ``fedfa/enc1/mean``."""
    return {f"{method}/{key}": value for key, value in payload.items()}


def own_entries(payload: Mapping[str, Tensor], method: str) -> Payload:
    """Return a method's entries of a payload, without the prefix of `namespaced`."""
    prefix = f"{method}/"
    return {key.removeprefix(prefix): value for key, value in payload.items() if key.startswith(prefix)}


def by_method(payload: Mapping[str, Tensor]) -> dict[str, Payload]:
    """Group the entries of a payload by method; their keys stay as they are."""
    groups: dict[str, Payload] = {}
    for key, value in payload.items():
        groups.setdefault(key.split("/", 1)[0], {})[key] = value
    return groups


def shared_keys(state: Mapping[str, Tensor], local_entries: frozenset[str]) -> list[str]:
    """Return the averaged entries of a state dict: floating point, and not kept at the site."""
    return [key for key, value in state.items() if value.is_floating_point() and key not in local_entries]


def entries_hash(entries: Mapping[str, Tensor]) -> str:
    """Hash entries of a network by name, shape and float32 value; empty for none."""
    plain = {key: portable(value, torch.device("cpu")) for key, value in entries.items()}
    return digest_of(plain) if entries else ""


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Hash tensors by name, type, shape and value."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        value = tensors[key].detach().cpu().contiguous()
        digest.update(repr((key, str(value.dtype), tuple(value.shape))).encode())
        # As bytes, since NumPy has no bfloat16.
        digest.update(value.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def split_frozen(once: Mapping[str, Tensor]) -> tuple[Payload, Payload]:
    """Split `Request.once` into entries that no site trains, and the methods' exchange before training."""
    frozen = {key: value for key, value in once.items() if key.startswith(f"{FROZEN}/")}
    return frozen, {key: value for key, value in once.items() if key not in frozen}


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of tensors, without the framing of messages."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def portable(value: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a contiguous copy, by default in float32, for all engines."""
    plain = convert_to_tensor(value.detach(), track_meta=False)
    copy: Tensor = torch.empty(plain.shape, dtype=dtype, device=device).copy_(plain)
    return copy


def packed(weights: Mapping[str, Tensor], wire: str, device: torch.device | None = None) -> dict[str, Tensor]:
    """Return copies of a model's entries in the numbers in which they travel (`RunConfig.wire`).

    Vectors (biases, norm layers, running statistics) stay float32: they have under 1% of a network's numbers,
    and a running variance may be large. So does a tensor that the wire's type would make infinite.
    """
    narrow = getattr(torch, wire)

    def dtype(value: Tensor) -> torch.dtype:
        if narrow == torch.float32 or value.ndim < 2 or not value.numel():
            return torch.float32
        low, high = torch.aminmax(value)  # NaN stays, for the checks on arrival
        return narrow if max(-float(low), float(high)) <= torch.finfo(narrow).max else torch.float32

    return {key: portable(value, device or value.device, dtype(value)) for key, value in weights.items()}
