"""Errors while a site's reply is used: whatever they are, they concern that site alone."""

from __future__ import annotations

from collections.abc import Callable

from medfedaug.errors import MedFedAugError, first_line
from medfedaug.federation.messages.messages import Reply

_LONGEST_REASON = 1_000


def raise_error(reply: Reply) -> None:
    """Raise what a site said in place of an answer.

    Raises:
        MedFedAugError: with the site's own text, in one line and no longer than a line may be: it goes into
            log, record and checkpoint, whatever a site sends.
    """
    if reply.error:
        raise MedFedAugError(" ".join(str(reply.error)[:_LONGEST_REASON].split()))


def refusal(site: str, use: Callable[[], None]) -> str | None:
    """The reason why a reply could not be used, or ``None`` if it was used."""
    try:
        use()
    except MedFedAugError as error:
        return str(error)
    except Exception as error:
        return f"site {site}: its answer cannot be used ({type(error).__name__}: {first_line(error)})"
    return None
