"""`WebSession`: HTTP with one archive alone, and with bounds on its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.message import Message
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from medfedaug.hospital.pacs.archive import Access
from medfedaug.hospital.pacs.object_check import MOST_BYTES

_MOST_ANSWER, _MOST_OBJECT = 2**26, 2**30  # bytes of an answer without objects, and of an object
_SLOWEST = 1024  # bytes a second
_CHUNK = 2**16
_PORTS = {"http": 80, "https": 443}
_BUSY = (408, 429, 502, 503, 504)


class AnswerRefused(requests.RequestException):
    """The archive's answer is unusable, or could do harm; the text follows the archive's name."""


class WebSession(requests.Session):
    """Session with one archive.

    Redirects are followed to the same scheme, host and port alone, and never for a request to store. Answers
    that are compressed, too long, too slow, or a web page raise `AnswerRefused`.
    """

    def __init__(self, url: str, access: Access) -> None:
        super().__init__()
        self._origin = _origin(url)
        self.max_redirects = 5
        self.headers["Accept-Encoding"] = "identity"
        # A busy archive is asked again after a growing delay, or at the time of its answer.
        retry = _BoundedRetry(
            longest=access.timeout,
            total=access.attempts - 1,
            backoff_factor=0.5,
            status_forcelist=_BUSY,
            raise_on_status=False,
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
        """Return the target of a redirection; ``None`` without one."""
        target: str | None = super().get_redirect_target(response)
        if target is None:
            return None
        if response.request.method != "GET":
            raise AnswerRefused(
                "redirects what is to be stored, which is not sent on; give the URL that it means"
            )
        if _origin(response.url, target) != self._origin:
            raise AnswerRefused(
                "redirects to another scheme, host or port, which is not followed; give the URL that "
                "it means, or a user or token where it redirects to a login"
            )
        return target


def _origin(url: str, target: str = "") -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of a target in an answer of a URL; empty for an invalid one."""
    try:
        parts = urlsplit(urljoin(url, target))
        return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return "", None, None


class _BoundedAdapter(HTTPAdapter):
    """Adapter whose answers have bounds."""

    def send(  # type: ignore[override]
        self, request: requests.PreparedRequest, stream: bool = False, timeout: Any = None, **options: Any
    ) -> requests.Response:
        response = super().send(request, stream=stream, timeout=timeout, **options)
        if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            response.close()
            raise AnswerRefused("compresses its answer, which it was asked not to do")
        if response.status_code in range(200, 300) and _media_type(response) == "text/html":
            response.close()
            raise AnswerRefused(
                "answers with a web page, as of a login, and not with DICOM; check URL and token"
            )
        response.raw = _Body(response.raw, MOST_BYTES if stream else _MOST_ANSWER, float(timeout or 0))
        return response


class _Body:
    """Body of an answer with bounds on bytes and silence; all but its stream is urllib3's."""

    def __init__(self, raw: Any, most: int, timeout: float) -> None:
        self._raw, self._most, self._timeout = raw, most, timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def stream(self, amount: int = _CHUNK, decode_content: bool | None = None) -> Iterator[bytes]:
        """Yield the body in pieces, as they come."""
        total = since = 0
        begin = time.monotonic()
        while piece := self._raw.read1(amount, decode_content=False):
            total, since = total + len(piece), since + len(piece)
            if total > self._most:
                raise AnswerRefused(f"sends more than {self._most >> 20} MiB in one answer")
            if (passed := time.monotonic() - begin) > self._timeout:
                if since < _SLOWEST * passed:
                    raise requests.Timeout("timed out: too little comes")
                begin, since = time.monotonic(), 0
            yield piece


def _with_token(token: str, request: requests.PreparedRequest) -> requests.PreparedRequest:
    request.headers["Authorization"] = f"Bearer {token}"
    return request


class _BoundedRetry(Retry):
    """Waits before another attempt for the archive's ``Retry-After``, at most ``longest`` seconds."""

    def __init__(self, longest: float = 60.0, **settings: Any) -> None:
        self.longest = longest
        super().__init__(**settings)

    def new(self, **changed: Any) -> _BoundedRetry:
        """Return a copy with some settings changed."""
        return super().new(longest=self.longest, **changed)

    def get_retry_after(self, response: Any) -> float | None:
        """Return the seconds of the header ``Retry-After``, at most ``longest``."""
        seconds = super().get_retry_after(response)
        return None if seconds is None else min(seconds, self.longest)


def parts_of(response: requests.Response) -> Iterator[bytes]:
    """Yield the bytes of the objects of an answer.

    Raises:
        requests.exceptions.ChunkedEncodingError: where the answer ends in the middle of an object.
    """
    kind = _media_type(response)
    if kind == "application/dicom":
        content = bytearray()
        for piece in response.iter_content(_CHUNK):
            content += piece
            _check_size(content)
        yield bytes(content)
        return
    header = Message()
    header["Content-Type"] = response.headers.get("Content-Type", "")
    boundary = header.get_param("boundary")
    if kind != "multipart/related" or not isinstance(boundary, str):
        raise AnswerRefused("answers with something else than DICOM objects")
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
        raise AnswerRefused(f"sends an object of more than {_MOST_OBJECT >> 20} MiB")


def _media_type(response: requests.Response) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
