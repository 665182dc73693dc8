"""Sends the page and its data: to a browser on this machine, or into one HTML file."""

import base64
import hashlib
import json
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, final
from urllib.parse import parse_qsl

from typing_extensions import override

from marl_collect.files.atomic import write_atomically

Answers = Mapping[str, Callable[..., Any]]
"""By the path of a request: a function of integers.

It returns JSON, a picture, or the future of a picture that takes time.
"""

_PICTURE: Final = "image/png"
_SAVED: Final = '<script id="saved" type="application/json">null</script>'
_POLICY: Final = (
    "default-src 'none'; img-src 'self' data:; connect-src 'self'; "
    "style-src 'unsafe-inline'; script-src 'sha256-{}'"
)
"""The browser loads nothing from elsewhere, and runs no script but the page's."""


def page(saved: Mapping[str, Any] | None = None) -> str:
    """Return the page, with the answers that it would otherwise request."""
    text = files("marl_collect.cli.viewer").joinpath("page.html").read_text("utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = text.replace("SECURITY_POLICY", _POLICY.format(digest))
    # No name in the data can end the element that has them.
    data = _json(saved).replace("<", "\\u003c")
    return text.replace(_SAVED, _SAVED.replace("null", data))


def save(file: Path, answers: Answers, requests: Iterable[str]) -> None:
    """Write the page with the answers to these requests; it needs no server."""
    saved: dict[str, Any] = {}
    for request in requests:
        path, _, query = request.partition("?")
        answer = _wait(_answer(answers, path, dict(parse_qsl(query))))
        if isinstance(answer, bytes):
            code = base64.b64encode(answer).decode()
            answer = f"data:{_PICTURE};base64,{code}"
        saved[request] = answer
    write_atomically(file, page(saved))


@final
class Viewer(ThreadingHTTPServer):
    """Serves the page to browsers of this machine that have its address.

    Args:
        answers: to the requests of the page.
        port: to listen on; 0 for any that is free.

    Raises:
        OSError: if the port is in use, or not allowed.

    Attributes:
        token: that each request must have; nobody can guess it.
    """

    def __init__(self, answers: Answers, port: int) -> None:
        """Listen on a port of this machine; 0 for any that is free."""
        self.token = secrets.token_urlsafe(32)
        self._answers = answers
        self._lock = threading.Lock()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise type(error)(
                f"Port {port}: {error.strerror}. Choose another one; 0 is any free one."
            ) from error

    @property
    def address(self) -> str:
        """The page's address, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def knows(self, token: str) -> bool:
        """Return whether a token is this server's, in constant time."""
        return secrets.compare_digest(token.encode(), self.token.encode())

    def answer(self, path: str, arguments: Mapping[str, str]) -> Any:
        """Return the answer to a request; the others do not wait for a picture."""
        with self._lock:
            answer = _answer(self._answers, path, arguments)
        return _wait(answer)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, but not that a browser no longer waits for an answer."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 30.0
    """Seconds without a byte of a request, or until an answer is sent."""
    server: Viewer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        arguments = dict(parse_qsl(query))
        # Browsers leave out port 80.
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            self._send(403, b"This page is for this machine only.", "text/plain")
        elif not self.server.knows(arguments.pop("token", "")):
            self._send(403, _NO_TOKEN, "text/plain")
        elif path == "/":
            self._send(200, page().encode(), "text/html; charset=utf-8")
        else:
            self._send(*self._answered(path, arguments))

    def _answered(
        self, path: str, arguments: Mapping[str, str]
    ) -> tuple[int, bytes, str]:
        """Return status, content and type of the answer; an error is an answer too."""
        status = 200
        try:
            answer = self.server.answer(path, arguments)
            if isinstance(answer, bytes):
                return status, answer, _PICTURE
            text = _json(answer)
        except Exception as error:  # noqa: BLE001 - a dataset may come from anybody
            clear = isinstance(error, (ValueError, LookupError, ImportError, OSError))
            status = 400
            message = str(error) if clear else f"{type(error).__name__}: {error}"
            text = _json({"error": message})
        return status, text.encode(), "application/json"

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        """Print nothing."""


@contextmanager
def redirection(address: str) -> Iterator[str]:
    """Yield the address of a file that leads a browser to another address.

    The arguments of a program, such as a browser's, can be read by every user of the
    machine. The file cannot.
    """
    with NamedTemporaryFile("w", prefix="marl-collect-", suffix=".html") as file:
        file.write(_REDIRECTION.format(address))
        file.flush()
        yield Path(file.name).as_uri()


_REDIRECTION: Final = (
    '<!doctype html><meta charset="utf-8"><title>marl-collect view</title>'
    '<meta http-equiv="refresh" content="0;url={}">'
)
_NO_TOKEN: Final = (
    b"This address lacks the token: open the one that marl-collect view printed."
)
_HOSTS: Final = ("127.0.0.1", "localhost")
_MOST: Final = 2**53
"""The numbers of requests are smaller; numpy cannot index with much larger ones."""


def _json(answer: Any) -> str:
    return json.dumps(answer, allow_nan=False, separators=(",", ":"))


def _answer(answers: Answers, path: str, arguments: Mapping[str, str]) -> Any:
    """Return the answer to a request such as ``"/episode?number=3&begin=0"``.

    Raises:
        LookupError: if there is no such page.
        ValueError: if an argument is not a number, or too large.
    """
    if path not in answers:
        raise LookupError(f"There is no page {path}.")
    numbers = {name: int(value) for name, value in arguments.items()}
    for name, number in numbers.items():
        if not 0 <= number < _MOST:
            raise ValueError(f"{name} is {number}, but expected 0 to {_MOST - 1}.")
    return answers[path](**numbers)


def _wait(answer: Any) -> Any:
    return answer.result() if isinstance(answer, Future) else answer
