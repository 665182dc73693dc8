"""One system in processes of its own, commanded by lines, every answer with a deadline.

The processes run ``serve.py`` with an interpreter that may be another environment's.
A line with seconds goes in, a line of JSON comes back.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, final

from harness import processes
from harness.windows import Answer, together

HERE = Path(__file__).resolve().parents[1]
SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
    "SDL_VIDEODRIVER": "dummy",
    "SDL_AUDIODRIVER": "dummy",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "RAY_DEDUP_LOGS": "0",
    "PYTHONWARNINGS": "ignore",
}


LEAD_SECONDS = 0.4
"""Untimed warm-up after resuming a paused system."""


class FailedError(RuntimeError):
    """A system did not start, ended, or did not answer in time."""


@final
@dataclass(frozen=True)
class System:
    """What to run.

    Attributes:
        runner: module with ``build(system)``, such as ``"limits.stock"``.
        workload: name in ``workloads.table``.
        policy: ``"random"`` or ``"mlp"``.
        workers: processes that step environments.
        copies: processes that are measured at once, each a system by itself.
        options: of the runner.
        python: the interpreter; this one if empty.
        pause: stop it while others are measured: for what works without being asked.
    """

    runner: str
    workload: str = ""
    policy: str = "random"
    workers: int = 2
    copies: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    python: str = ""
    pause: bool = False

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def shares(self, processes: int) -> int:
        """Return how many of ``options["environments"]`` each process has.

        Raises:
            ValueError: if they do not go into as many equal parts.
        """
        count: int = self.options.get("environments", processes)
        if count % processes:
            raise ValueError(f"{count} environments cannot be shared by {processes}.")
        return count // processes


@final
class Served:
    """A system's processes, from start to end."""

    def __init__(self, system: System) -> None:
        """Start them; `wait_until_ready` waits."""
        self.system = system
        self.mark = uuid.uuid4().hex
        self._begin = time.monotonic()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        self._buffers: dict[int, bytes] = {}
        self._members: list[int] = []
        self._paused = False
        path = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        surroundings = os.environ | SURROUNDINGS | {processes.VARIABLE: self.mark}
        surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        # A benchmark is not a place for an unbuffered log of somebody's prints.
        surroundings.pop("PYTHONUNBUFFERED", None)
        self._processes = [
            subprocess.Popen(
                [
                    system.python or sys.executable,
                    str(HERE / "serve.py"),
                    json.dumps(system.plain() | {"copy": copy}),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=surroundings,
                start_new_session=True,
            )
            for copy in range(system.copies)
        ]

    def wait_until_ready(self, timeout: float) -> float:
        """Wait for the start of all copies; return its seconds.

        Raises:
            FailedError: with the end of what they wrote to stderr.
        """
        end = self._begin + timeout
        for process in self._processes:
            self._answer(process, end - time.monotonic())
        self._members = processes.find(self.mark)
        return time.monotonic() - self._begin

    def measure(self, seconds: float, timeout: float) -> Answer:
        """Measure for ``seconds``, all copies at once.

        Raises:
            FailedError: if one ends, or if an answer takes longer than ``timeout``.
        """
        if self._paused:
            self.resume()
            # What was ready before, and pauses that ended meanwhile, do not count.
            self._window(LEAD_SECONDS, timeout)
        cpu = processes.cpu_seconds(self._members)
        result = self._window(seconds, timeout)
        cpu_spent = processes.cpu_seconds(self._members) - cpu
        self.pause()
        return result | {"cpu_seconds": cpu_spent}

    def memory_mb(self) -> float:
        """Return the proportional memory of all its processes, in MB."""
        return processes.memory_mb(processes.find(self.mark))

    def pause(self) -> None:
        """Stop it, if it would work on by itself."""
        if self.system.pause and not self._paused:
            self._paused = True
            processes.send(self.mark, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        if self._paused:
            self._paused = False
            processes.send(self.mark, signal.SIGCONT)

    def close(self, patience: float = 5.0) -> None:
        """End everything that it has started: asked first, then killed."""
        if self._log.closed:
            return
        self.resume()
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except OSError:
                continue
        end = time.monotonic() + patience
        for process in self._processes:
            try:
                process.wait(max(0.01, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        processes.kill(self.mark)
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._log.close()

    def _window(self, seconds: float, timeout: float) -> Answer:
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{seconds}\n".encode())
                process.stdin.flush()
            except OSError:
                raise FailedError(self._with_log("ended")) from None
        end = time.monotonic() + timeout
        answers = [self._answer(p, end - time.monotonic()) for p in self._processes]
        return together(answers)

    def _answer(self, process: "subprocess.Popen[bytes]", timeout: float) -> Answer:
        assert process.stdout is not None
        source = process.stdout.fileno()
        buffered = self._buffers.pop(source, b"")
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while b"\n" not in buffered:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise FailedError(self._with_log(f"no answer in {timeout:.0f} s"))
                received = os.read(source, 1 << 16)
                if not received:
                    raise FailedError(self._with_log("ended"))
                buffered += received
        line, _, remainder = buffered.partition(b"\n")
        self._buffers[source] = remainder
        answer: Answer = json.loads(line)
        return answer

    def _with_log(self, problem: str) -> str:
        """Return a message with the last lines of stderr that say something."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4000))
        text = self._log.read().decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return f"{self.system.runner}: {problem}. " + " | ".join(lines[-4:])[-700:]
