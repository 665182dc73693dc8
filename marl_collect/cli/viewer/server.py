"""Sends the page and its data: to a browser on this machine, or into one HTML file."""

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from typing_extensions import override

from marl_collect.core.atomic import write_atomically

Answers = Mapping[str, Callable[..., Any]]
"""By the path of a request: a function of integers.

It returns JSON, a picture, or the future of a picture that takes time.
"""

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
    data = json.dumps(saved, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")
    return text.replace(_SAVED, _SAVED.replace("null", data))


def save(path: Path, answers: Answers, requests: Iterable[str]) -> None:
    """Write the page with the answers to these requests; it needs no server."""
    saved: dict[str, Any] = {}
    for request in requests:
        answer = _wait(_answer(answers, request))
        if isinstance(answer, bytes):
            code = base64.b64encode(answer).decode()
            answer = f"data:{_kind(answer)};base64,{code}"
        saved[request] = answer
    write_atomically(path, page(saved))


def server(answers: Answers, port: int = 0) -> ThreadingHTTPServer:
    """Return a server for the browsers of this machine.

    It answers one request at a time; the others do not wait for the future of a
    picture.

    Args:
        answers: to the requests of the page.
        port: to listen on; 0 for any that is free.

    Raises:
        OSError: if the port is in use.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in _HOSTS:
                self._send(403, b"This page is for this machine only.", "text/plain")
            elif urlsplit(self.path).path == "/":
                self._send(200, page().encode(), "text/html; charset=utf-8")
            elif urlsplit(self.path).path not in answers:
                self._send(404, b"There is no such page.", "text/plain")
            else:
                self._answer()

        def _answer(self) -> None:
            try:
                with lock:
                    answer = _answer(answers, self.path)
                answer = _wait(answer)
            except (ValueError, LookupError, TypeError, ImportError, OSError) as error:
                text = json.dumps({"error": str(error)})
                self._send(400, text.encode(), "application/json")
                return
            if isinstance(answer, bytes):
                self._send(200, answer, _kind(answer))
            else:
                text = json.dumps(answer, allow_nan=False, separators=(",", ":"))
                self._send(200, text.encode(), "application/json")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
            """Print nothing."""

    return _Server(("127.0.0.1", port), Handler)


class _Server(ThreadingHTTPServer):
    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, but not that a browser no longer waits for an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


_HOSTS: Final = ("127.0.0.1", "localhost")
"""Another name in a request means that a page of another server sends it."""


def _kind(picture: bytes) -> str:
    return "image/png" if picture.startswith(b"\x89PNG") else "image/svg+xml"


def _answer(answers: Answers, request: str) -> Any:
    """Return the answer to a request such as ``"/episode?number=3&begin=0"``."""
    parts = urlsplit(request)
    arguments = {name: int(value) for name, value in parse_qsl(parts.query)}
    return answers[parts.path](**arguments)


def _wait(answer: Any) -> Any:
    return answer.result() if isinstance(answer, Future) else answer
