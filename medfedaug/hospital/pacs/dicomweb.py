"""`DicomWebArchive`: an archive with a DICOMweb service (QIDO-RS, WADO-RS, STOW-RS)."""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pydicom
import requests
from dicomweb_client.web import DICOMwebClient
from pydicom import Dataset
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from medfedaug.errors import ConfigError, MedFedAugWarning, ReaderError
from medfedaug.hospital.pacs.archive import (
    ATTEMPTS,
    LONGEST_VALUE,
    Access,
    Archive,
    ArchiveError,
    ArchiveSeries,
    FetchError,
    RequestRefused,
    UnusableAnswer,
    valid_uid,
)
from medfedaug.hospital.pacs.object_check import MOST_BYTES, Arrival, Failure, ObjectRefused

_PAGE = 1000
_MOST_PAGES = 1000
_OBJECTS = {"Accept": 'multipart/related; type="application/dicom"; transfer-syntax=*'}
_MOST_ANSWER, _MOST_OBJECT = 2**26, 2**30  # bytes of an answer without objects, and of an object
_CHUNK = 2**16
_BUSY = (408, 429, 502, 503, 504)
_HERE = ("localhost", "127.0.0.1", "::1")


class _AnswerRefused(requests.RequestException):
    """The archive's answer is unusable, or could do harm; the text follows the archive's name."""


class _Session(requests.Session):
    """Session with one archive, which follows no redirect and bounds the bytes of an answer."""

    def __init__(self, access: Access) -> None:
        super().__init__()
        self.headers["Accept-Encoding"] = "identity"
        # A busy archive is asked again after a growing delay.
        retry = Retry(
            total=ATTEMPTS - 1,
            backoff_factor=0.5,
            status_forcelist=_BUSY,
            raise_on_status=False,
            respect_retry_after_header=False,
            allowed_methods={"GET"},
        )
        for scheme in ("http://", "https://"):
            self.mount(scheme, _BoundedAdapter(max_retries=retry))
        if access.user is not None:
            self.auth = (access.user, access.password or "")
        if access.token is not None:
            self.auth = partial(_with_token, access.token)  # goes before the entry of a file `.netrc`
        if access.authority is not None:
            self.verify = str(access.authority)
        if access.certificate is not None:
            pair = (str(access.certificate), str(access.key))
            self.cert = pair if access.key is not None else pair[0]

    def merge_environment_settings(
        self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
    ) -> dict[str, Any]:
        """Prefer the authority of `Access` to the one of the environment (REQUESTS_CA_BUNDLE)."""
        verify = self.verify if verify is None else verify
        merged: dict[str, Any] = super().merge_environment_settings(url, proxies, stream, verify, cert)
        return merged

    def get_redirect_target(self, response: requests.Response) -> str | None:
        """Raise `_AnswerRefused` for a redirection, which could lead a token or an object elsewhere."""
        if super().get_redirect_target(response) is not None:
            raise _AnswerRefused(
                "redirects, which is not followed; give the final URL, or a user or token where it "
                "redirects to a login"
            )
        return None


class _BoundedAdapter(HTTPAdapter):
    """Adapter whose answers have bounds."""

    def send(  # type: ignore[override]
        self, request: requests.PreparedRequest, stream: bool = False, **options: Any
    ) -> requests.Response:
        response = super().send(request, stream=stream, **options)
        response.raw = _Body(response.raw, MOST_BYTES if stream else _MOST_ANSWER)
        return response


class _Body:
    """Body of an answer with a bound on its bytes; all but its stream is urllib3's."""

    def __init__(self, raw: Any, most: int) -> None:
        self._raw, self._most = raw, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def stream(self, amount: int = _CHUNK, decode_content: bool | None = None) -> Iterator[bytes]:
        total = 0
        for piece in self._raw.stream(amount, decode_content=decode_content):
            total += len(piece)
            if total > self._most:
                raise _AnswerRefused(f"sends more than {self._most >> 20} MiB in one answer")
            yield piece


def _with_token(token: str, request: requests.PreparedRequest) -> requests.PreparedRequest:
    request.headers["Authorization"] = f"Bearer {token}"
    return request


def _parts(response: requests.Response) -> Iterator[bytes]:
    """Yield the bytes of the objects of an answer.

    Raises:
        requests.exceptions.ChunkedEncodingError: where the answer ends in the middle of an object.
    """
    header = Message()
    header["Content-Type"] = response.headers.get("Content-Type", "")
    if header.get_content_type() == "application/dicom":
        content = bytearray()
        for piece in response.iter_content(_CHUNK):
            content += piece
            _check_size(content)
        yield bytes(content)
        return
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/related" or not isinstance(boundary, str):
        raise _AnswerRefused("answers with something other than DICOM objects")
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    content, start, begun = bytearray(b"\r\n"), 0, False
    for piece in response.iter_content(_CHUNK):
        content += piece
        while (end := content.find(delimiter, start)) >= 0:
            head = content.find(b"\r\n\r\n", 0, end)
            if begun and head >= 0:  # before the first delimiter is a preamble
                yield bytes(content[head + 4 : end])
            del content[: end + len(delimiter)]
            start, begun = 0, True
        start = max(0, len(content) - len(delimiter))
        _check_size(content)
    if not begun or not content.startswith(b"--"):
        raise requests.exceptions.ChunkedEncodingError("no delimiter at the end")


def _check_size(content: bytearray) -> None:
    if len(content) > _MOST_OBJECT:
        raise _AnswerRefused(f"sends an object of more than {_MOST_OBJECT >> 20} MiB")


class DicomWebArchive(Archive):
    """Archive with a DICOMweb service at a URL, the part before ``/studies``."""

    def __init__(self, url: str, access: Access) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--dicomweb takes a URL, such as https://pacs.example.org/dicom-web")
        if parts.username or parts.password:
            raise ConfigError(
                "the URL of the archive holds a user or a password; give them by --user instead"
            )
        self.place = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        if parts.scheme == "http" and (access.token or access.user) and parts.hostname not in _HERE:
            warnings.warn(
                "the token or the password of the archive goes over http, where all on the way can read it; "
                "give an https URL",
                MedFedAugWarning,
                stacklevel=2,
            )
        self._access = access
        self._thread = threading.local()
        self._sessions: list[_Session] = []
        self._lock = threading.Lock()

    def _find(self, level: str, fields: Sequence[str], most: int, **keys: str) -> list[dict[str, str]]:
        """Search page by page, until a page has nothing new."""
        client, key = self._client(), fields[0]
        search: Callable[..., list[dict[str, Any]]]
        if level == "STUDY":
            search = partial(client.search_for_studies, fields=[*fields], search_filters=keys)
        elif level == "SERIES":
            search = partial(client.search_for_series, keys["StudyInstanceUID"], fields=[*fields])
        else:
            search = partial(client.search_for_instances, keys["StudyInstanceUID"], keys["SeriesInstanceUID"])
        rows: dict[str, dict[str, str]] = {}
        answered = 0
        with self._requesting():
            for _ in range(_MOST_PAGES):
                page = search(limit=_PAGE, offset=answered)
                texts = [_texts(row) for row in page if isinstance(row, Mapping)]
                new = {row[key]: row for row in texts if valid_uid(row.get(key, "")) and row[key] not in rows}
                rows.update(new)
                answered += len(page)
                if not new:  # ends also where a server ignores the offset and repeats a page
                    return list(rows.values())
                if len(rows) > most:
                    break
            raise _AnswerRefused("answers a search without end")

    def fetch(
        self, series: ArchiveSeries, folder: Path, on_instance: Callable[[], object] = lambda: None
    ) -> list[Path]:
        """Fetch a series by WADO as it is stored, in one request; then request missing objects one by one."""
        arrival = Arrival(series, folder, [*self._find_objects(series)], on_instance)
        address = f"{self.place}/studies/{series.study}/series/{series.uid}"
        failure, before = Failure(), arrival.missing
        if len(before) > 1:
            failure = self._receive(arrival, address)
        # A broken object or connection must not cost the other objects. An archive that sent nothing was
        # already asked several times.
        silent = failure.timed_out and arrival.missing == before
        if arrival.missing and not silent:
            failure = self._one_by_one(arrival, address)
        return arrival.files(failure)

    def _one_by_one(self, arrival: Arrival, series: str) -> Failure:
        """Fetch the missing objects one by one, until the archive is silent; return the last failure."""
        last = Failure()
        for uid in arrival.missing:
            failure = self._receive(arrival, f"{series}/instances/{uid}")
            if not arrival.has(uid):
                last = failure
            if failure.timed_out:
                break
        return last

    def _receive(self, arrival: Arrival, address: str) -> Failure:
        """Accept the objects of an address; return the reason why some may be missing."""
        try:
            with self._session().get(
                address, headers=_OBJECTS, stream=True, timeout=self._access.timeout
            ) as response:
                response.raise_for_status()
                for part in _parts(response):
                    arrival.accept(part)
        except _AnswerRefused as error:
            raise FetchError(f"{self.place} {error}") from error
        except requests.RequestException as error:
            return _failure(error, self.place)
        except OSError as error:
            raise ArchiveError(f"a fetched object cannot be written ({error.strerror})") from error
        except ObjectRefused:
            raise
        except ReaderError as error:
            return Failure(str(error))
        return Failure("the archive lists them and does not send them")

    def _store(self, dataset: Dataset) -> bool:
        """Store an object by STOW."""
        with self._requesting("store"):
            answer = self._client().store_instances([dataset])
            failed = [item.get("FailureReason") for item in answer.get("FailedSOPSequence") or []]
            reason = f" (reason {int(failed[0]):#06x})" if failed and failed[0] is not None else ""
            references = answer.get("ReferencedSOPSequence") or []
            stored = [item.get("ReferencedSOPInstanceUID") for item in references]
        if failed:
            raise RequestRefused(f"{self.place} refuses to store an object{reason}")
        return dataset.SOPInstanceUID in stored

    def close(self) -> None:
        """Close the connections of all threads."""
        with self._lock:
            for session in self._sessions:
                session.close()
            self._sessions.clear()
            self._thread = threading.local()

    def _session(self) -> _Session:
        session: _Session | None = getattr(self._thread, "session", None)
        if session is None:
            session = self._thread.session = _Session(self._access)
            with self._lock:
                self._sessions.append(session)
        return session

    def _client(self) -> DICOMwebClient:
        client: DICOMwebClient | None = getattr(self._thread, "client", None)
        if client is None:
            client = self._thread.client = DICOMwebClient(
                self.place, session=self._session(), timeout=self._access.timeout, permissive_uid=True
            )
            client.set_http_retry_params(retry=False)
        return client

    @contextmanager
    def _requesting(self, action: str = "search") -> Iterator[None]:
        """Turn errors of a request into one line without the path, which names a study."""
        try:
            yield
        except _AnswerRefused as error:
            raise UnusableAnswer(f"{self.place} {error}") from error
        # Invalid JSON, and JSON nested without end, raise no `RequestException`.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UnusableAnswer(
                f"{self.place} answers with something other than DICOMweb; check URL and token"
            ) from error
        except requests.RequestException as error:
            failure = _failure(error, self.place, action)
            code = error.response.status_code if error.response is not None else HTTPStatus.UNAUTHORIZED
            if code != HTTPStatus.UNAUTHORIZED:
                raise RequestRefused(failure.reason) from error
            raise ArchiveError(failure.reason, timed_out=failure.timed_out) from error


def _failure(error: requests.RequestException, place: str, action: str = "fetch") -> Failure:
    """Describe a failed request without its path, which names a study."""
    if error.response is not None:
        code = error.response.status_code
        hint = {401: "; check user and password", 403: "; this user may not", 404: "; check the URL"}
        phrase = HTTPStatus(code).phrase if code in {*HTTPStatus} else "unknown"
        text = f"{place} answers {code} ({phrase}) to a request to {action}{hint.get(code, '')}"
        return Failure(text)
    if isinstance(error, requests.exceptions.SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            text = f"{place}: its certificate is not trusted; name its authority with --authority FILE"
        else:
            text = (
                f"{place} refuses the encryption; where it wants a certificate, give --certificate and --key"
            )
        return Failure(text)
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return Failure(f"{place} breaks off in the middle")
    # urllib3 wraps a time-out in the error of the last attempt.
    if isinstance(error, requests.Timeout) or "timed out" in str(error).lower():
        return Failure(f"{place} does not answer in time; give it longer with --timeout", timed_out=True)
    return Failure(f"{place} cannot be reached", timed_out=True)


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the first value of each attribute of an answer, by its keyword."""
    texts = {}
    for tag, entry in row.items():
        values = entry.get("Value") if isinstance(entry, Mapping) else None
        name = pydicom.datadict.keyword_for_tag(tag)
        if not name or not isinstance(values, list) or not values:
            continue
        value = values[0]
        value = value.get("Alphabetic", "") if isinstance(value, Mapping) else value
        texts[name] = str(value if value is not None else "")[:LONGEST_VALUE].strip()
    return texts
