"""Check what a user of pip gets: build, install in clean environments, and run.

    python scripts/check_package.py               # the wheel and the sdist
    python scripts/check_package.py video ray     # and the wheel with each extra alone

Wheel and sdist are built from the tracked files of the checkout, without a network if
setuptools is installed here. Each environment is new, lies outside the checkout, and is
deleted afterwards. With `--system-site-packages` it sees this interpreter's packages,
so that only our package is installed: this checks it in a minute, without a download.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_DEADLINE = 900.0
"""Seconds that one command may take."""

TRY = """
import marl_collect, marl_collect.envs, marl_collect.models, pathlib, sys
home = pathlib.Path(marl_collect.__file__).resolve()
assert not home.is_relative_to(sys.argv[1]), f"imported from the checkout: {home}"
assert (home.parent / "py.typed").exists()
from marl_collect import Collector
from marl_collect.testing.counting import CountingEnv
batch = next(iter(Collector(CountingEnv, frames_per_batch=10, total_frames=10)))
assert batch.shape == (1, 10)
print(marl_collect.__version__, home)
"""
COUNTING = "marl_collect.testing.counting:CountingEnv"


def run(*command: object, folder: Path, **variables: str) -> str:
    """Run a command outside the checkout and return what it prints.

    Raises:
        SystemExit: if it fails.
    """
    kept = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )
    if done.returncode:
        shown = " ".join(str(part) for part in command)
        raise SystemExit(f"{shown} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build an sdist from the checkout and a wheel from the sdist; return both."""
    code = (
        "from setuptools import build_meta as b; import sys; print(b.{}(sys.argv[1]))"
    )
    copy = folder / "checkout"
    names = run("git", "ls-files", folder=ROOT).splitlines()
    for name in names:  # Files that git does not track must not be needed.
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_file():
            shutil.copy2(source, target)
    dist = folder / "dist"
    run(sys.executable, "-c", code.format("build_sdist"), dist, folder=copy)
    (sdist,) = dist.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", code.format("build_wheel"), dist, folder=source)
    (wheel,) = dist.glob("*.whl")
    return sdist, wheel


def check(archive: Path, extra: str, *, system: bool, folder: Path) -> None:
    """Install an archive in a clean environment and use it."""
    where = folder / f"env-{archive.suffix[1:]}-{extra or 'plain'}"
    venv.create(where, with_pip=True)
    python = where / "bin" / "python"
    if system:  # An environment inside another one does not see its packages.
        (site,) = (where / "lib").glob("python*/site-packages")
        for old in site.glob("setuptools*"):  # It would hide the newer one.
            shutil.rmtree(old)
        (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["--quiet", "--disable-pip-version-check", "--prefer-binary"]
    if system:
        options += ["--no-deps", "--no-build-isolation", "--force-reinstall"]
    else:
        options += ["-c", str(ROOT / "constraints.txt")]
    target = f"{archive}[{extra}]" if extra else str(archive)
    run(python, "-m", "pip", "install", *options, target, folder=folder)
    print(run(python, "-P", "-c", TRY, ROOT, folder=folder).strip())
    command = where / "bin" / "marl-collect"
    run(command, "--version", folder=folder)
    run(command, "info", COUNTING, folder=folder)
    out = f"data-{where.name}"
    amount = ["--frames", "100", "--policy", "random", "--quiet", "--out", out]
    run(command, "collect", COUNTING, *amount, folder=folder)
    run(command, "inspect", out, folder=folder)
    shutil.rmtree(where)


def main() -> None:
    """Build and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", help="extras to install, one at a time")
    parser.add_argument("--system-site-packages", action="store_true")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project["optional-dependencies"]
    unknown = sorted(set(arguments.extras) - known.keys())
    if unknown:
        raise SystemExit(f"There are no extras {unknown}: expected {sorted(known)}.")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r'"marl-collect\[([\w,]+)\]"', readme)
    wrong = sorted({e for names in named for e in names.split(",")} - known.keys())
    if wrong:
        raise SystemExit(f"The README installs extras that do not exist: {wrong}.")
    with tempfile.TemporaryDirectory(prefix="check-package-") as temporary:
        folder = Path(temporary)
        sdist, wheel = build(folder)
        system = arguments.system_site_packages
        for archive, extra in [
            (sdist, ""),
            (wheel, ""),
            *((wheel, extra) for extra in arguments.extras),
        ]:
            check(archive, extra, system=system, folder=folder)
            print(f"{archive.name} {f'[{extra}] ' if extra else ''}works")


if __name__ == "__main__":
    main()
