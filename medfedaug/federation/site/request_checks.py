"""The checks that a server's message must pass before a site uses anything of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from medfedaug.errors import MedFedAugError, UpdateRefused
from medfedaug.federation.messages.messages import own_entries
from medfedaug.federation.messages.tensor_checks import StateDictValidator, check_values
from medfedaug.methods.base import Payload, SitePart


def check_received(
    site: str,
    network: nn.Module,
    shared: Sequence[str],
    parts: Mapping[str, SitePart],
    *,
    weights: Mapping[str, Tensor],
    payload: Payload,
    once: Payload,
) -> None:
    """Check what the server sent as it checks what sites send: shapes, types, finite values, variances."""
    exchanged = {"once": once, "payload": payload}
    missing = sorted(set(shared) - set(weights)) if weights else []
    if missing:
        raise MedFedAugError(f"site {site}: the global model lacks {missing[0]}")
    method = ""
    try:
        if weights:
            model = StateDictValidator(network, shared)
            model.check_values(site, {key: weights[key] for key in shared})
        for kind in ("once", "payload"):
            check_values(site, exchanged[kind])
        for method, part in parts.items():
            for kind, exchange in (("once", part.before_training), ("payload", part.every_round)):
                entries = own_entries(exchanged[kind], method)
                if exchange is not None and entries:
                    exchange.check(entries)
    except UpdateRefused as error:
        told = str(error).removeprefix(f"site {site}, ")
        raise MedFedAugError(f"site {site}: refused what the server sent: {told}") from error
    except (KeyError, ValueError) as error:
        raise MedFedAugError(f"site {site}: refused what the server sent for {method}: {error}") from error
