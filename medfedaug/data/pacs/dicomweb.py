"""`DicomWebArchive`: an archive with a DICOMweb service (QIDO-RS, WADO-RS, STOW-RS)."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pydicom
import requests
from dicomweb_client.web import DICOMwebClient
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from medfedaug.data.pacs.archive import (
    OBJECT_FIELDS,
    SERIES_FIELDS,
    STUDY_FIELDS,
    Access,
    Archive,
    ArchiveError,
    FetchError,
    FoundSeries,
    FoundStudy,
    RequestRefused,
    Wanted,
    in_order,
    known_fields,
    matching,
    valid_uid,
)
from medfedaug.data.pacs.arrival import Arrival, Failure
from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    from pydicom import Dataset

__all__ = ["DicomWebArchive"]

_PAGE = 1000
_MOST = 200_000
_AS_STORED = (("application/dicom", "*"),)
_BUSY = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)


class DicomWebArchive(Archive):
    """Archive that is reached by HTTP.

    Args:
        url: of the service, under which ``/studies`` is.
        access: user or token, TLS files, time-out, attempts.

    Raises:
        ConfigError: for a URL that is none, or holds a password.
    """

    def __init__(self, url: str, access: Access) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--dicomweb takes a URL, such as https://pacs.example.org/dicom-web")
        if parts.username or parts.password:
            raise ConfigError(
                "the URL of the archive holds a user or a password; give them by --user instead"
            )
        self.place = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self._access = access
        self._own = threading.local()
        self._sessions: list[requests.Session] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(access.connections)

    # ------------------------------------------------------------------ searching

    def find_studies(self, wanted: Wanted) -> list[FoundStudy]:
        """Find studies by QIDO."""
        with self._asking():
            rows = self._pages(
                lambda **page: self._client().search_for_studies(
                    search_filters={wanted.key: wanted.value}, fields=[*STUDY_FIELDS], **page
                ),
                "StudyInstanceUID",
            )
        return matching(map(FoundStudy.of_values, rows), wanted)

    def find_series(self, study: FoundStudy) -> list[FoundSeries]:
        """Find series by QIDO."""
        with self._asking():
            rows = self._pages(
                lambda **page: self._client().search_for_series(study.uid, fields=[*SERIES_FIELDS], **page),
                "SeriesInstanceUID",
            )
        return in_order(FoundSeries.of_values(study.uid, row) for row in rows)

    def find_objects(self, series: FoundSeries) -> dict[str, dict[str, str]]:
        """List objects by QIDO."""
        with self._asking():
            rows = self._pages(
                lambda **page: self._client().search_for_instances(
                    series.study, series.uid, fields=[*OBJECT_FIELDS], **page
                ),
                "SOPInstanceUID",
            )
        return {row["SOPInstanceUID"]: known_fields(row, OBJECT_FIELDS) for row in rows}

    @staticmethod
    def _pages(search: Callable[..., list[dict[str, Any]]], key: str) -> list[dict[str, str]]:
        """All answers of a search, page by page, until a page has nothing new."""
        found: dict[str, dict[str, str]] = {}
        answered = 0
        while answered < _MOST:
            page = search(limit=_PAGE, offset=answered)
            rows = [_texts(row) for row in page if isinstance(row, Mapping)]
            new = {row[key]: row for row in rows if valid_uid(row.get(key, "")) and row[key] not in found}
            found.update(new)
            answered += len(page)
            if not new:  # so it ends, too, where a server ignores the offset and repeats itself
                break
        return list(found.values())

    # ------------------------------------------------------------------ fetching

    def fetch(
        self, series: FoundSeries, folder: Path, on_instance: Callable[[], object] | None = None
    ) -> list[Path]:
        """Fetch a series by WADO as it is stored, in one request; objects that are missing then one by one.

        Of these, at most ``access.connections`` of all series are on their way, and in memory.
        """
        where = series.study, series.uid
        with self._asking():
            rows = self._pages(
                lambda **page: self._client().search_for_instances(*where, **page), "SOPInstanceUID"
            )
        uids = sorted(row["SOPInstanceUID"] for row in rows)
        if not uids:
            raise FetchError("the archive lists no object of it")
        arrival = Arrival(folder, uids, on_instance)
        failure, before = Failure(), arrival.missing
        if len(before) > 1:
            failure = self._received(
                arrival, lambda client: client.iter_series(*where, media_types=_AS_STORED)
            )
        # An object that is broken, or a connection that breaks off, must not cost the others. An archive that
        # was silent from the first object on was asked as often as `attempts` says.
        silent = failure.timed_out and arrival.missing == before
        if arrival.missing and not silent:
            failure = self._one_by_one(arrival, where)
        return arrival.files(failure)

    def _one_by_one(self, arrival: Arrival, where: tuple[str, str]) -> Failure:
        """Fetch the missing objects, each by itself, in several threads; return the gravest failure.

        Where the archive is silent, no more is asked for.
        """
        waiting, silent = deque(arrival.missing), threading.Event()

        def work() -> list[Failure]:
            failures = []
            while waiting and not silent.is_set():
                try:
                    uid = waiting.popleft()
                except IndexError:  # another thread was faster
                    break
                failure = self._one(arrival, (*where, uid))
                if failure is not None:
                    failures.append(failure)
                    if failure.timed_out:
                        silent.set()
            return failures

        workers = [self._pool.submit(work) for _ in range(self._access.connections)]
        wait(workers)
        found = [failure for worker in workers for failure in worker.result()]
        return max(found, key=lambda one: one.timed_out, default=Failure())

    def _one(self, arrival: Arrival, where: tuple[str, str, str]) -> Failure | None:
        """Fetch one object in as many attempts as are allowed; ``None`` where it came."""
        for _ in range(self._access.attempts):
            failure = self._received(arrival, partial(_one_instance, where=where))
            if arrival.has(where[-1]):
                return None
            if not failure.passing or failure.timed_out:
                break
        return failure

    def _received(self, arrival: Arrival, request: Callable[[DICOMwebClient], Iterable[Dataset]]) -> Failure:
        """Take in what comes of a request; the reason where it does not come to its end."""
        try:
            for dataset in request(self._client()):
                arrival.accept(str(dataset.get("SOPInstanceUID", "")), _encoded(dataset))
        except requests.RequestException as error:
            return _failure(error, self.place)
        except OSError as error:
            raise ArchiveError(f"a fetched object cannot be written ({error.strerror})") from error
        except Exception:  # what is no DICOM file fails anywhere in the parsers
            return Failure("an object cannot be read", passing=False)
        return Failure("the archive lists them and does not send them")

    # ------------------------------------------------------------------ storing

    def store(self, datasets: Iterable[Dataset]) -> None:
        """Store objects by STOW, one a request."""
        for dataset in datasets:
            with self._asking("store"):
                answer = self._client().store_instances([dataset])
                failed = answer.get("FailedSOPSequence") or []
            if failed:
                code = failed[0].get("FailureReason")
                text = f" (reason {int(code):#06x})" if code is not None else ""
                raise ArchiveError(f"{self.place} refuses to store an object{text}")

    def close(self) -> None:
        """Close the connections of all threads."""
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            for session in self._sessions:
                session.close()
            self._sessions.clear()
            self._own = threading.local()

    # ------------------------------------------------------------------ connections

    def _client(self) -> DICOMwebClient:
        """The client of this thread, since a session is of one thread."""
        client: DICOMwebClient | None = getattr(self._own, "client", None)
        if client is not None:
            return client
        session = _Session()
        # A busy archive is asked again, later each time, or when it says so itself.
        waiting = _Waiting(
            longest=self._access.timeout,
            total=self._access.attempts - 1,
            backoff_factor=0.5,
            status_forcelist=_BUSY,
            raise_on_status=False,
            allowed_methods={"GET"},
        )
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=waiting))
        if self._access.user is not None:
            session.auth = (self._access.user, self._access.password or "")
        if self._access.token is not None:
            session.auth = _Token(self._access.token)
        if self._access.authority is not None:
            session.verify = str(self._access.authority)
        if self._access.certificate is not None:
            pair = (self._access.certificate, self._access.key)
            session.cert = (str(pair[0]), str(pair[1])) if pair[1] else str(pair[0])
        client = DICOMwebClient(
            self.place, session=session, timeout=self._access.timeout, permissive_uid=True
        )
        client.set_http_retry_params(retry=False)
        self._own.client = client
        with self._lock:
            self._sessions.append(session)
        return client

    @contextmanager
    def _asking(self, what: str = "search") -> Iterator[None]:
        """Make one line of what goes wrong, without the path, which names a study."""
        try:
            yield
        except requests.RequestException as error:
            failure = _failure(error, self.place, what)
            code = error.response.status_code if error.response is not None else HTTPStatus.UNAUTHORIZED
            if code != HTTPStatus.UNAUTHORIZED:
                raise RequestRefused(failure.reason) from error
            raise ArchiveError(failure.reason, timed_out=failure.timed_out) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArchiveError(f"{self.place} answers something else than DICOMweb; check the URL") from error


class _Session(requests.Session):
    """A session whose own authority counts, also where the environment names another (REQUESTS_CA_BUNDLE)."""

    def merge_environment_settings(
        self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
    ) -> dict[str, Any]:
        own = self.verify if verify is None else verify
        found: dict[str, Any] = super().merge_environment_settings(url, proxies, stream, own, cert)
        return found


class _Token(requests.auth.AuthBase):
    """A bearer token, which goes before what a file `.netrc` says."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class _Waiting(Retry):
    """Waits before another attempt, as long as the archive says, and no longer than it may be silent.

    Args:
        longest: seconds.
        **settings: of `urllib3.util.Retry`.
    """

    def __init__(self, longest: float = 60.0, **settings: Any) -> None:
        self.longest = longest
        super().__init__(**settings)

    def new(self, **changed: Any) -> _Waiting:
        """Return a copy with some settings changed."""
        return super().new(longest=self.longest, **changed)

    def get_retry_after(self, response: Any) -> float | None:
        """Return the seconds of the header ``Retry-After``, at most ``longest``."""
        asked = super().get_retry_after(response)
        return None if asked is None else min(asked, self.longest)


def _failure(error: requests.RequestException, place: str, what: str = "fetch") -> Failure:
    """A failed request in words, without its path, which names a study."""
    if error.response is not None:
        code = error.response.status_code
        hint = {401: "; check user and password", 403: "; this user may not", 404: "; check the URL"}
        said = HTTPStatus(code).phrase if code in {*HTTPStatus} else "unknown"
        text = f"{place} answers {code} ({said}) to a request to {what}{hint.get(code, '')}"
        return Failure(text, passing=code >= HTTPStatus.INTERNAL_SERVER_ERROR)
    if isinstance(error, requests.exceptions.SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            text = f"{place}: its certificate is not trusted; name its authority with --authority FILE"
        else:
            remedy = "where it wants a certificate, give --certificate and --key"
            text = f"{place} refuses the encryption; {remedy}"
        return Failure(text, passing=False)
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return Failure(f"{place} breaks off in the middle")
    # urllib3 wraps a time-out in the error of the last attempt.
    if isinstance(error, requests.Timeout) or "timed out" in str(error).lower():
        return Failure(f"{place} does not answer in time; give it longer with --timeout", timed_out=True)
    return Failure(f"{place} cannot be reached", timed_out=True)


def _one_instance(client: DICOMwebClient, where: tuple[str, str, str]) -> list[Dataset]:
    return [client.retrieve_instance(*where, media_types=_AS_STORED)]


def _encoded(dataset: Dataset) -> bytes:
    with io.BytesIO() as content:
        pydicom.dcmwrite(content, dataset, enforce_file_format=True)
        return content.getvalue()


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    """The first value of each attribute of an answer, by its keyword."""
    found = {}
    for tag, entry in row.items():
        values = entry.get("Value") if isinstance(entry, Mapping) else None
        name = pydicom.datadict.keyword_for_tag(tag)
        if not name or not isinstance(values, list) or not values:
            continue
        value = values[0]
        value = value.get("Alphabetic", "") if isinstance(value, Mapping) else value
        found[name] = str(value if value is not None else "").strip()
    return found
