"""Installs dm-meltingpot, with the archive of its bots where that can be had.

dm-meltingpot has no wheel: building it fetches an archive of trained bots from a
storage bucket, without a deadline. The substrates need nothing from that archive; only
the named scenarios do. So this script fetches the archive itself, within a deadline,
and where that fails builds with an archive that holds an empty folder: all substrates
work, `scenario.build(name)` does not until the script is run again with a network.

    python scripts/install_meltingpot.py -c constraints.txt
    python scripts/install_meltingpot.py --assets meltingpot-assets-2.3.0.tar.gz
    python scripts/install_meltingpot.py --no-assets

The build looks for the archive, under the name it would download it to, in the folder
for temporary files before it downloads anything; that is how both kinds reach it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path

VERSION = "2.4.1"
ARCHIVE = "meltingpot-assets-2.3.0.tar.gz"  # the name that setup.py of 2.4.1 looks for
URL = f"https://storage.googleapis.com/dm-meltingpot/{ARCHIVE}"
SILENCE = 20.0  # seconds without a byte after which the server counts as unreachable
CHUNK = 1 << 20


def main() -> int:
    """Builds and installs; returns the exit code."""
    options = _parse()
    if not options.force and _installed() == VERSION:
        print(f"dm-meltingpot {VERSION} is installed already.")
        return 0
    with tempfile.TemporaryDirectory(prefix="meltingpot-") as folder:
        archive = Path(folder) / ARCHIVE
        print("1 of 3: the archive of bots", flush=True)
        includes_bots = _provide(archive, options)
        print("2 of 3: building the wheel", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        pip += ["--quiet"] if options.quiet else []
        build = ["wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", folder]
        _run([*pip, *build, f"dm-meltingpot=={VERSION}"], TMPDIR=folder)
        wheel = next(Path(folder).glob("dm_meltingpot-*.whl"))
        print("3 of 3: installing it", flush=True)
        constraints = ["-c", options.constraint] if options.constraint else []
        reinstall = (
            ["--force-reinstall", "--no-deps"] if _installed() == VERSION else []
        )
        _run([*pip, "install", *constraints, *reinstall, str(wheel)])
    if includes_bots:
        print(f"dm-meltingpot {VERSION} is installed, bots included.")
    else:
        print(
            f"dm-meltingpot {VERSION} is installed without its bots: every substrate "
            "works, named scenarios do not. To add them, run this script again with "
            "--force where the archive can be reached."
        )
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-c", "--constraint", help="constraints file given to pip")
    parser.add_argument("--assets", type=Path, help="an archive fetched beforehand")
    parser.add_argument("--no-assets", action="store_true", help="do without the bots")
    parser.add_argument(
        "--deadline", type=float, default=1800.0, help="seconds for the download"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.add_argument("--force", action="store_true", help="install once more")
    return parser.parse_args()


def _run(command: list[str], **variables: str) -> None:
    """Runs a command, or raises SystemExit; pip has then said why."""
    code = subprocess.run(command, check=False, env=os.environ | variables).returncode
    if code:
        raise SystemExit(f"{' '.join(command)} failed with {code}.")


def _installed() -> str | None:
    try:
        return importlib.metadata.version("dm-meltingpot")
    except importlib.metadata.PackageNotFoundError:
        return None


def _provide(archive: Path, options: argparse.Namespace) -> bool:
    """Puts an archive where the build looks for it; True if it holds the bots."""
    if options.assets is not None:
        shutil.copyfile(options.assets, archive)
        return True
    if not options.no_assets:
        try:
            _download(archive, options.deadline)
        except (OSError, tarfile.TarError) as error:
            print(f"{URL} cannot be had ({error}).", file=sys.stderr)
        else:
            return True
    _write_empty(archive)
    return False


def _download(archive: Path, deadline: float) -> None:
    """Fetches the archive, or raises OSError or TarError within the deadline."""
    begin = time.monotonic()
    with (
        urllib.request.urlopen(URL, timeout=SILENCE) as source,
        archive.open("wb") as target,
    ):
        total = int(source.headers.get("Content-Length") or 0)
        while chunk := source.read(CHUNK):
            target.write(chunk)
            seconds = time.monotonic() - begin
            if sys.stderr.isatty():
                of = f" of {total / 1e6:,.0f}" if total else ""
                text = f"{target.tell() / 1e6:,.0f}{of} MB"
                print(f"\r{text}", end="", file=sys.stderr, flush=True)
            if seconds > deadline:
                raise TimeoutError(f"not complete after {deadline:.0f} s")
    with tarfile.open(archive) as content:  # a proxy's error page is not an archive
        if "assets" not in {name.partition("/")[0] for name in content.getnames()}:
            raise tarfile.TarError("the archive holds no folder named assets")
    print(f"{archive.stat().st_size / 1e6:,.0f} MB in {seconds:.0f} s", file=sys.stderr)


def _write_empty(archive: Path) -> None:
    folder = tarfile.TarInfo("assets")
    folder.type = tarfile.DIRTYPE
    folder.mode = 0o755
    with tarfile.open(archive, "w:gz") as content:
        content.addfile(folder)


if __name__ == "__main__":
    raise SystemExit(main())
