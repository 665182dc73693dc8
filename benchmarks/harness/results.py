"""The run's JSON: written after every experiment, so that nothing measured is lost."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, final

from marl_collect.files.atomic import write_atomically

FORMAT = 1


@final
class Results:
    """What a run has found so far, on disk."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Begin, or go on where ``path`` ends.

        Raises:
            ValueError: if the file is of another format.
        """
        self.path = path
        self.data: dict[str, Any] = {"format": FORMAT, "experiments": {}}
        if resume and path.exists():
            self.data = load(path)

    def done(self, name: str) -> bool:
        """Return whether this experiment has been measured."""
        entry = self.data["experiments"].get(name)
        return entry is not None and entry["status"] == "ok"

    def note(self, name: str, value: Any) -> None:
        """Write something about the run as a whole."""
        self.data[name] = value
        self._write()

    def add(self, name: str, experiment: dict[str, Any]) -> None:
        """Write an experiment, in place of an earlier attempt."""
        self.data["experiments"].pop(name, None)
        self.data["experiments"][name] = experiment
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, impersonal(json.dumps(self.data, indent=1)))


def impersonal(text: str) -> str:
    """Return a text that does not tell where somebody keeps their files."""
    placeholders = {
        str(Path(__file__).resolve().parents[2]): "<checkout>",
        sys.prefix: "<environment>",
        sys.base_prefix: "<python>",
        tempfile.gettempdir(): "<temporary>",  # noqa: TID251 - no file is made
        str(Path.home()): "<home>",
    }
    for path in sorted(placeholders, key=len, reverse=True):
        text = text.replace(f"{path}/", f"{placeholders[path]}/")
    return text


def load(path: Path) -> dict[str, Any]:
    """Read a run's JSON.

    Raises:
        ValueError: if it is of another format.
    """
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if results.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {results.get('format')!r}, but format {FORMAT} is "
            "expected: measure again with this version."
        )
    return results
