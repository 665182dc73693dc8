"""Installs dm-meltingpot, with the archive of its bots where that can be had.

dm-meltingpot has no wheel: building it fetches an archive of trained bots, without a
deadline. Only the named scenarios need it. So this script fetches the archive itself,
within a deadline. If that fails, it builds with an archive of an empty folder: then all
substrates work, and scenarios do once the script has run again with a network.

    python scripts/install_meltingpot.py -c constraints.txt
    python scripts/install_meltingpot.py --assets meltingpot-assets-2.3.0.tar.gz
    python scripts/install_meltingpot.py --no-assets

The build downloads nothing if the archive is in the folder for temporary files.
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
DEADLINE = 1800.0  # seconds for the download
SILENCE = 20.0  # seconds without a byte after which the server counts as unreachable
CHUNK = 1 << 20


def main() -> None:
    """Builds and installs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-c", "--constraint", help="constraints file given to pip")
    parser.add_argument("--assets", type=Path, help="an archive fetched beforehand")
    parser.add_argument("--no-assets", action="store_true", help="do without the bots")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.add_argument("--force", action="store_true", help="install once more")
    options = parser.parse_args()
    distributions = importlib.metadata.distributions(name="dm-meltingpot")
    installed = VERSION in {distribution.version for distribution in distributions}
    if installed and not options.force:
        print(f"dm-meltingpot {VERSION} is installed already.")
        return
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
        pip += ["install", *(["--force-reinstall", "--no-deps"] if installed else [])]
        pip += ["-c", options.constraint] if options.constraint else []
        _run([*pip, str(wheel)])
    if includes_bots:
        print(f"dm-meltingpot {VERSION} is installed, bots included.")
    else:
        print(
            f"dm-meltingpot {VERSION} is installed without its bots: every substrate "
            "works, named scenarios do not. To add them, run this script again with "
            "--force where the archive can be reached."
        )


def _run(command: list[str], **variables: str) -> None:
    """Runs a command, or raises SystemExit; pip has then said why."""
    code = subprocess.run(command, check=False, env=os.environ | variables).returncode
    if code:
        raise SystemExit(f"{' '.join(command)} failed with {code}.")


def _provide(archive: Path, options: argparse.Namespace) -> bool:
    """Puts an archive where the build looks for it; True if it holds the bots."""
    if options.assets is not None:
        shutil.copyfile(options.assets, archive)
        return True
    if not options.no_assets:
        try:
            _download(archive)
        except (OSError, tarfile.TarError) as error:
            print(f"{URL} cannot be had ({error}).", file=sys.stderr)
        else:
            return True
    folder = tarfile.TarInfo("assets")
    folder.type, folder.mode = tarfile.DIRTYPE, 0o755
    with tarfile.open(archive, "w:gz") as content:
        content.addfile(folder)
    return False


def _download(archive: Path) -> None:
    """Fetches the archive, or raises OSError or TarError within the deadline."""
    begin = time.monotonic()
    with (
        urllib.request.urlopen(URL, timeout=SILENCE) as source,
        archive.open("wb") as target,
    ):
        total = int(source.headers.get("Content-Length") or 0)
        while chunk := source.read(CHUNK):
            target.write(chunk)
            if sys.stderr.isatty():
                text = f"\r{target.tell() / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                print(text, end="", file=sys.stderr, flush=True)
            if time.monotonic() - begin > DEADLINE:
                raise TimeoutError(f"not complete after {DEADLINE:.0f} s")
    with tarfile.open(archive) as content:  # a proxy's error page is not an archive
        if "assets" not in {name.partition("/")[0] for name in content.getnames()}:
            raise tarfile.TarError("the archive holds no folder named assets")


if __name__ == "__main__":
    main()
