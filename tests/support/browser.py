"""A headless chromium with one page, driven by its DevTools protocol."""

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final, Self

from support.processes import SOON

CHROMIUM: Final = "chromium"
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,800",
    "--remote-debugging-pipe",
)


class Browser:
    """A page; every wait fails after ``SOON``.

    Attributes:
        errors: messages of the console that are errors, and uncaught exceptions.
    """

    def __init__(self, profile: Path) -> None:
        self.errors: list[str] = []
        self._session: str | None = None
        self._id = 0
        self._rest = b""
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # The browser reads commands from descriptor 3 and answers at 4.
        script = f'exec "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", script, "bash", CHROMIUM, *_FLAGS),
                *(f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # All of its processes end together.
        )
        os.close(commands)
        os.close(answers)

    def __enter__(self) -> Self:
        pages: list[str] = []
        deadline = time.monotonic() + SOON
        while not pages:  # The browser answers before it has a page.
            assert time.monotonic() < deadline, "the browser has no page"
            targets = self._command("Target.getTargets")["targetInfos"]
            pages = [t["targetId"] for t in targets if t["type"] == "page"]
        attached = self._command(
            "Target.attachToTarget", targetId=pages[0], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._command(f"{domain}.enable")
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def open(self, address: str) -> None:
        self._command("Page.navigate", url=address)
        self.wait_for(f"location.href === {json.dumps(address)}")

    def resize(self, width: int, height: int) -> None:
        """Give the window's contents a size in pixels."""
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def value(self, expression: str) -> Any:
        """Return the JSON value of an expression of JavaScript on the page."""
        answer = self._command(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true on the page."""
        deadline = time.monotonic() + SOON
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression}; errors: {self.errors}"
            self._read(0.05)

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element of a selector."""
        texts: list[str] = self.value(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            ".map(element => element.innerText)"
        )
        return texts

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, value: str) -> None:
        """Set the value of an input as a user does."""
        self.value(
            f"{{const field = document.querySelector({json.dumps(selector)});"
            f"field.value = {json.dumps(value)};"
            "field.dispatchEvent(new Event('input', {bubbles: true}));}"
        )

    def _command(self, method: str, **parameters: Any) -> Any:
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SOON
        while True:
            for answer in self._read(deadline - time.monotonic()):
                if answer.get("id") == self._id:
                    assert "error" not in answer, answer
                    return answer["result"]
            assert time.monotonic() < deadline, f"no answer to {method}"

    def _read(self, seconds: float) -> list[dict[str, Any]]:
        """Return the messages that arrive within some seconds, and keep errors."""
        if not select.select([self._answers], [], [], max(0.0, seconds))[0]:
            return []
        chunk = os.read(self._answers, 2**20)
        assert chunk, "the browser has ended"
        *texts, self._rest = (self._rest + chunk).split(b"\0")
        messages = [json.loads(part) for part in texts]
        for message in messages:
            parameters = message.get("params", {})
            entry = parameters.get("entry", {})
            wrong = (
                message.get("method") == "Runtime.exceptionThrown"
                or entry.get("level") == "error"
                or (
                    message.get("method") == "Runtime.consoleAPICalled"
                    and parameters["type"] in ("error", "assert")
                )
            )
            if wrong:
                self.errors.append(json.dumps(parameters))
        return messages
