"""Errors in the use of a site's reply, which concern only that site."""

from collections.abc import Callable

from medfedaug.errors import MedFedAugError, first_line
from medfedaug.federation.messages.messages import Reply

_LONGEST_REASON = 1_000


def raise_error(reply: Reply) -> None:
    """Raise the error that a site sent instead of an answer."""
    if reply.error:
        raise MedFedAugError(" ".join(str(reply.error)[:_LONGEST_REASON].split()))


def refusal(site: str, use: Callable[[], None]) -> str | None:
    """Use a reply; return the reason if it could not be used, otherwise ``None``."""
    try:
        use()
    except MedFedAugError as error:
        return str(error)
    except Exception as error:
        return f"site {site}: its answer cannot be used ({type(error).__name__}: {first_line(error)})"
    return None
