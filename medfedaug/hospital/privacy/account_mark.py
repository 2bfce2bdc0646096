"""The mark of a site's images, which names the only account of their releases."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from medfedaug.data.base import SiteFolder
from medfedaug.errors import ConfigError, StorageError, own
from medfedaug.hospital.privacy.ledger import PrivacyLedger
from medfedaug.utils.files import parse_versioned, version_mark, write_atomic

_log = logging.getLogger(__name__)

ACCOUNT_MARK = ".medfedaug_account"
"""File in a site's data folder."""

_KIND = "account_mark", 1


@dataclass(frozen=True)
class AccountMark:
    """Reference from a data folder to the ledger that counts its releases.

    Identifier, number of entries and path are those of the ledger at the last writing of the mark.
    """

    account: str
    entries: int
    ledger: str

    @classmethod
    def read(cls, folder: Path) -> AccountMark | None:
        """Read the mark of a data folder; ``None`` for none."""
        path = folder / ACCOUNT_MARK
        try:
            text = path.read_text(encoding="utf-8")
            if not text:  # a process was killed before it wrote
                return None
            content = parse_versioned(text, *_KIND)
            return cls(content["account"], int(content["entries"]), content["ledger"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            # The images may have an account already.
            raise ConfigError(
                f"{own(path)} does not name an account of releases ({error}); restore it, or remove it where "
                "nothing has left about these images"
            ) from error

    @classmethod
    def of(cls, ledger: PrivacyLedger) -> AccountMark:
        """Build the current mark of a ledger; a ledger that does not exist yet has no identifier."""
        assert ledger.path is not None
        identifier, entries = ledger.account() if ledger.path.exists() else ("", 0)
        return cls(identifier, entries, str(ledger.path.absolute()))

    def text(self) -> bytes:
        """Return the content of the file."""
        return f"{json.dumps({**version_mark(*_KIND), **asdict(self)})}\n".encode()


def check_account(ledger: PrivacyLedger, site: SiteFolder) -> AccountMark | None:
    """Check that a site's images have no other account and no newer ledger; return their mark."""
    mark = AccountMark.read(site.path)
    if mark is None:
        return None
    now, path = AccountMark.of(ledger), own(site.path / ACCOUNT_MARK)
    if mark.account != now.account:
        raise ConfigError(
            f"releases about these images are counted in another ledger, {own(mark.ledger)}, and a second "
            "one would be a second budget for the same patients. Name that state folder with site configure "
            f"--state; or, if that ledger is lost, remove {path}, which begins a new budget"
        )
    if mark.entries > now.entries:
        raise ConfigError(
            f"the ledger {own(now.ledger)} has {now.entries} entries and had {mark.entries} before: it is an "
            f"older copy. Restore the newer one; or, if it is lost, remove {path}, which counts from the copy"
        )
    return mark


def bind_account(ledger: PrivacyLedger, site: SiteFolder) -> None:
    """Bind a site's images to an account: a second account would be a second budget for their patients.

    The number of entries in the mark reveals an older copy of the ledger. A folder that cannot be written
    keeps its mark. Published images have no budget, and get no mark.
    """
    if ledger.path is None or site.published:
        return
    check_account(ledger, site)  # before a new ledger begins
    with ledger.held():
        ledger.account()  # begins a new ledger
        mark, path = check_account(ledger, site), site.path / ACCOUNT_MARK
        now = AccountMark.of(ledger)
        try:
            if mark is None and not path.exists():
                # Two kits that begin at the same time have different locks.
                with path.open("xb") as file:
                    file.write(now.text())
            elif mark != now:
                write_atomic(path, lambda file: file.write(now.text()))
        except FileExistsError:
            check_account(ledger, site)
        except (OSError, StorageError) as error:
            _log.warning("the images do not name their account of releases: %s", error)
