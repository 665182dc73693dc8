"""Run pip and show its progress in one line: packages, megabytes and time so far.

    python scripts/run_pip.py install -c constraints.txt -e ".[all]"

pip's own bar is about one file, and its log has several lines per package. The log is
shown only if pip fails. Without a terminal, one line is printed at the end.
"""

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TextIO, final

_MEGABYTES = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
_FOUND = re.compile(r"\s*(?:Collecting|Requirement already satisfied:) ([\w.-]+)")
_FILE = re.compile(
    r"\s*(?:Downloading|Using cached) (\S+) \(([\d.]+) (bytes|kB|MB|GB)\)"
)
_BUILT = re.compile(r"\s*Building (?:wheel|editable) for ([\w.-]+)")
_LOCAL = re.compile(r"(?:Processing|Obtaining) (\S+)")
_INSTALLED = "Installing collected packages: "


@final
class ProgressLine:
    """One line on stderr that is drawn again; draws nothing without a terminal."""

    def __init__(self) -> None:
        """Note the time at which the work begins."""
        self._begin = time.monotonic()
        self._live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line; what does not fit into the terminal is cut."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[2K{text[:width]}")
            sys.stderr.flush()

    def end(self, text: str) -> None:
        """Replace the line by its last text, which stays; also without a terminal."""
        self.show("")
        print(text, file=sys.stderr, flush=True)

    @property
    def elapsed(self) -> str:
        """Time since the beginning."""
        return minutes(time.monotonic() - self._begin)


@final
class PipLog:
    """Reads what pip prints, and says in one line how far it is."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self.lines: list[str] = []
        self._names: set[str] = set()
        self._files: dict[str, float] = {}
        self._now = "pip starts"
        self._installed = 0

    def read(self, stream: TextIO) -> None:
        """Read the lines of a stream until it ends."""
        for line in stream:
            self.add(line)

    def add(self, line: str) -> None:
        """Read one line."""
        self.lines.append(line)
        if match := _FOUND.match(line):
            self._names.add(match[1].lower())
            self._now = match[1]
        elif match := _FILE.match(line):
            self._files[match[1]] = float(match[2]) * _MEGABYTES[match[3]]
            self._now = f"{match[1].partition('-')[0]}, {match[2]} {match[3]}"
        elif match := _LOCAL.match(line):
            self._names.add(match[1])
        elif match := _BUILT.match(line):
            self._now = f"building {match[1]}"
        elif line.startswith(_INSTALLED):
            self._installed = line.count(",") + 1

    def text(self) -> str:
        """Return how far pip is. The number of packages is known once all are found."""
        size = f"{sum(self._files.values()):,.0f} MB"
        if self._installed:
            return f"step 2 of 2: installing {self._installed} packages, {size}"
        return f"step 1 of 2: {len(self._names)} packages, {size}: {self._now}"

    def summary(self) -> str:
        """Return what was done."""
        return f"{self._installed} packages installed" if self._installed else "done"


def minutes(seconds: float) -> str:
    """Return a duration as ``m:ss``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def run(
    arguments: Sequence[str],
    *,
    quiet: bool = False,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run pip with progress.

    Args:
        arguments: of pip.
        quiet: whether to show nothing unless pip fails.
        env: environment variables; None for this process's.

    Raises:
        SystemExit: if pip fails, after its log was printed.
    """
    line, log = ProgressLine(), PipLog()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command += [*arguments, "--progress-bar", "off"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as pip:
        assert pip.stdout is not None
        reader = threading.Thread(target=log.read, args=(pip.stdout,), daemon=True)
        reader.start()
        while reader.is_alive():
            reader.join(0.5)  # It ends with pip's output.
            if not quiet:
                line.show(f"{line.elapsed} {log.text()}")
    if pip.returncode:
        line.end("".join(log.lines))
        raise SystemExit(f"{' '.join(command)} failed with {pip.returncode}.")
    if not quiet:
        line.end(f"{line.elapsed} {log.summary()}")


if __name__ == "__main__":
    run(sys.argv[1:])
