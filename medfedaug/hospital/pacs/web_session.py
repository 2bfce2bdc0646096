"""`WebSession`: HTTP with one archive, and with bounds on its answers."""

from collections.abc import Iterator
from email.message import Message
from functools import partial
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from medfedaug.hospital.pacs.archive import Access
from medfedaug.hospital.pacs.object_check import MOST_BYTES

_MOST_ANSWER, _MOST_OBJECT = 2**26, 2**30  # bytes of an answer without objects, and of an object
_CHUNK = 2**16
_BUSY = (408, 429, 502, 503, 504)


class AnswerRefused(requests.RequestException):
    """The archive's answer is unusable, or could do harm; the text follows the archive's name."""


class WebSession(requests.Session):
    """Session with one archive, which follows no redirect and bounds the bytes of an answer."""

    def __init__(self, access: Access) -> None:
        super().__init__()
        # A busy archive is asked again after a growing delay.
        retry = Retry(
            total=access.attempts - 1,
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
        """Raise `AnswerRefused` for a redirection, which could lead a token or an object elsewhere."""
        if super().get_redirect_target(response) is not None:
            raise AnswerRefused(
                "redirects, which is not followed; give the URL that it means, or a user or token where it "
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
        """Yield the body in pieces."""
        total = 0
        for piece in self._raw.stream(amount, decode_content=decode_content):
            total += len(piece)
            if total > self._most:
                raise AnswerRefused(f"sends more than {self._most >> 20} MiB in one answer")
            yield piece


def _with_token(token: str, request: requests.PreparedRequest) -> requests.PreparedRequest:
    request.headers["Authorization"] = f"Bearer {token}"
    return request


def parts_of(response: requests.Response) -> Iterator[bytes]:
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
