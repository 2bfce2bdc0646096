"""Checks that a server's message must pass before a site uses it."""

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
    """Check the server's message like a site's reply: shapes, types, finite values, variances."""
    if weights and (missing := sorted(set(shared) - set(weights))):
        raise MedFedAugError(f"site {site}: the global model lacks {missing[0]}")
    method = ""
    try:
        if weights:
            model = StateDictValidator(network, shared)
            model.check_values(site, {key: weights[key] for key in shared})
        check_values(site, once)
        check_values(site, payload)
        for method, part in parts.items():
            for sent, exchange in ((once, part.before_training), (payload, part.every_round)):
                if exchange is not None and (entries := own_entries(sent, method)):
                    exchange.check(entries)
    except UpdateRefused as error:
        text = str(error).removeprefix(f"site {site}, ")
        raise MedFedAugError(f"site {site}: refused what the server sent: {text}") from error
    except (KeyError, ValueError) as error:
        raise MedFedAugError(f"site {site}: refused what the server sent for {method}: {error}") from error
