"""Check what a user of pip gets: build, install in clean environments, and run.

    python scripts/check_package.py               # the wheel and the sdist
    python scripts/check_package.py video ray     # and the wheel with each extra alone
    python scripts/check_package.py --every-extra # with each extra of pyproject.toml
    python scripts/check_package.py --readme      # the README's commands for pip users

Wheel and sdist are built from the tracked files of the checkout, without a network if
setuptools is installed here. Each environment is new, lies outside the checkout, and is
deleted afterwards. That of an extra begins as a copy of the one with the plain package,
which saves installing torch again. With `--system-site-packages` it sees this
interpreter's packages, so that only our package is installed: this checks it in a
minute, without a download.
One failure does not end the run; a summary comes last.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_DEADLINE = 900.0
"""Seconds that one command may take."""
_SLOW = 10.0
"""Seconds after which the end of a command is printed, to show where a run stands."""
_LEFT_SECONDS = 15.0
"""Seconds within which the processes of a command must end after it."""

TRY = """
import marl_collect, marl_collect.envs, marl_collect.models, pathlib, sys
home = pathlib.Path(marl_collect.__file__).resolve()
assert not home.is_relative_to(sys.argv[1]), f"imported from the checkout: {home}"
assert (home.parent / "py.typed").exists()
assert (home.parent / "cli" / "viewer" / "page.html").exists()
from marl_collect import Collector
from workloads.counting import CountingEnv
batch = next(iter(Collector(CountingEnv, frames_per_batch=10, total_frames=10)))
assert batch.shape == (1, 10)
print(marl_collect.__version__, home)
"""
COUNTING = "workloads.counting:CountingEnv"

_INFO = "marl-collect info {}"
_RAY = """
from marl_collect.distributed import RayCollector
from workloads.counting import CountingEnv
with RayCollector(
    CountingEnv, frames_per_batch=20, total_frames=20, ray_init_config={"num_cpus": 2}
) as collector:
    assert sum(batch.numel() for batch in collector) == 20
"""
_TORCHRL = """
from marl_collect.interop.torchrl import to_torchrl
from workloads.counting import CountingEnv
assert to_torchrl(CountingEnv()).rollout(5).shape[-1] == 5
"""
_BENCHMARL = """
from benchmarl.algorithms import MappoConfig
from marl_collect.interop.benchmarl import Experiment
print(Experiment, MappoConfig.get_from_yaml())
"""
_VIDEO = """
import numpy as np
from marl_collect import write_video
for name in ("some.mp4", "some.gif"):
    print(write_video(name, [np.zeros((32, 32, 3), np.uint8)] * 5, fps=5))
"""
_VAULT = """
import tensorstore
from marl_collect.storage import import_vault
print(import_vault)
"""
_COMPARE = f"""marl-collect compare {COUNTING} --setup ippo-local-shared --seeds 1 \
    --frames 200 --workers 1 --set frames_per_batch=100 --set eval_interval=100 \
    --set eval_episodes=2 --set final_episodes=2"""
_LAB2D = """
from marl_collect.envs.lab2d.provider import FAMILY
print(FAMILY.available_tasks())
"""
USES: dict[str, tuple[str, ...]] = {
    "pettingzoo": (
        _INFO.format("multiwalker_v9"),
        _INFO.format("connect_four_v3"),
        _INFO.format("pistonball_v6"),
        _INFO.format("matrix/climbing"),
    ),
    "mpe": (_INFO.format("simple_spread_v3"),),
    "magent2": (_INFO.format("battle_v4"),),
    "atari": ("marl-collect envs atari",),
    "meltingpot": (_INFO.format("meltingpot/coins"),),
    "dmlab2d": (_LAB2D, "import dmlab2d"),
    "jaxmarl": (_INFO.format("jaxmarl/MPE_simple_spread_v3"),),
    "lbforaging": (_INFO.format("lbforaging/Foraging-8x8-2p-3f-v3"),),
    "openspiel": (_INFO.format("openspiel/kuhn_poker"),),
    "mamujoco": (_INFO.format("mamujoco/Ant-4x2"),),
    "overcooked": (_INFO.format("overcooked/cramped_room"),),
    "rware": (_INFO.format("rware/rware-tiny-2ag-v2"),),
    "vmas": (_INFO.format("vmas/navigation"),),
    "ray": (_RAY,),
    "torchrl": (_TORCHRL,),
    "benchmarl": (_BENCHMARL,),
    "compare": (_COMPARE,),
    "video": (_VIDEO,),
    "datasets": ("marl-collect inspect {data}",),
    "minari": ("marl-collect export {data} --format minari --out x-v0",),
    "vault": (_VAULT,),
    "cloud": ("import s3fs", "marl-collect copy {data} memory://store/data"),
    "plot": ("marl-collect inspect {data} --plot histograms.png",),
    "bench": ("import matplotlib, psutil, torchrl", _INFO.format("multiwalker_v9")),
    "dev": ("import hypothesis, mkdocs, pytest, ruff",),
}
"""What works with each extra alone: commands, or Python to run. ``{data}`` is a dataset
that is collected before."""
DATA = "collected"
"""Its folder; the README's commands use other names."""
NOT_IN_ALL = ("benchmarl", "jaxmarl", "overcooked")
OTHER_VERSIONS = {"benchmarl": ("tensordict", "torchrl")}
"""Packages of which an extra needs other versions than constraints.txt has."""


def run(*command: object, folder: Path, **variables: str) -> str:
    """Run a command outside the checkout and return what it prints.

    Raises:
        SystemExit: if it fails.
    """
    ours = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    ours["PYTHONPATH"] = str(ROOT / "benchmarks")  # It has an environment to try.
    command_text = " ".join(str(argument) for argument in command)
    begin = time.monotonic()
    process = subprocess.run(
        [str(argument) for argument in command],
        cwd=folder,
        env=ours | variables,
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )
    seconds = time.monotonic() - begin
    if seconds > _SLOW:
        print(f"{seconds:.0f} s: {command_text:.200}", flush=True)
    if process.returncode:
        raise SystemExit(f"{command_text} failed:\n{process.stdout}\n{process.stderr}")
    return process.stdout


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


def install(archive: Path, extras: str, *, system: bool, folder: Path) -> Path:
    """Install an archive with extras in a new environment; return its folder."""
    name = extras.replace(",", "-") or "plain"
    environment = folder / f"env-{archive.suffix[1:]}-{name}"
    python = environment / "bin" / "python"
    plain = folder / f"env-{archive.suffix[1:]}-plain"
    if plain.exists():
        # Links suffice: pip replaces files and writes into none.
        shutil.copytree(plain, environment, symlinks=True, copy_function=os.link)
        for script in (environment / "bin").glob("pip*"):
            script.unlink()  # Its first line names the other environment.
    else:
        venv.create(environment, with_pip=True)
    if system:  # An environment inside another one does not see its packages.
        (site,) = (environment / "lib").glob("python*/site-packages")
        for old in site.glob("setuptools*"):  # It would hide the newer one.
            shutil.rmtree(old)
        (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["--quiet", "--disable-pip-version-check", "--prefer-binary"]
    if system:
        options += ["--no-deps", "--no-build-isolation", "--force-reinstall"]
    else:
        options += ["--no-compile"]
        constraints = folder / "constraints.txt"
        constraints.write_text(tested_versions(extras.split(",")))
        options += ["-c", str(constraints)]
        if {"meltingpot", "all"} & set(extras.split(",")):
            # As the README says: its archive of bots may be out of reach.
            script = ROOT / "scripts" / "install_meltingpot.py"
            run(python, script, "--quiet", "-c", constraints, folder=folder)
    if plain.exists() and not system and environment != plain:
        reinstall = ["--no-deps", "--force-reinstall"]  # For the paths in its scripts.
        run(
            python, "-m", "pip", "install", *options, *reinstall, archive, folder=folder
        )
    target = f"{archive}[{extras}]" if extras else str(archive)
    run(python, "-m", "pip", "install", *options, target, folder=folder)
    return environment


def tested_versions(extras: list[str]) -> str:
    """Return constraints.txt without the packages of which extras need others."""
    excluded = {name for extra in extras for name in OTHER_VERSIONS.get(extra, ())}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(True)
    return "".join(line for line in lines if line.split("==")[0] not in excluded)


def check(archive: Path, extra: str, *, system: bool, folder: Path) -> None:
    """Install an archive in a clean environment and use it.

    Without an extra, the commands that need none run. The first use of an extra that
    reads a dataset collects it before.
    """
    environment = install(archive, extra, system=system, folder=folder)
    try:
        python, command = (
            environment / "bin" / "python",
            environment / "bin" / "marl-collect",
        )
        print(run(python, "-P", "-c", TRY, ROOT, folder=folder).strip())
        if not extra:
            run(command, "--version", folder=folder)
            run(command, "info", COUNTING, folder=folder)
        uses = [use for name in USES if name not in NOT_IN_ALL for use in USES[name]]
        chosen = uses if extra == "all" else USES.get(extra, ())
        if any("{data}" in use for use in chosen) and not (folder / DATA).exists():
            amount = ["--frames", "100", "--policy", "random", "--quiet"]
            run(command, "collect", COUNTING, *amount, "--out", DATA, folder=folder)
        for use in chosen:
            execute(
                use.replace("{data}", DATA),
                environment,
                folder / f"use-{environment.name}",
            )
    finally:
        if extra or archive.suffix != ".whl":
            shutil.rmtree(environment)


def execute(use: str, environment: Path, folder: Path) -> None:
    """Run one use of an extra: a command of ours, or Python."""
    folder.mkdir(exist_ok=True)
    if not (folder / DATA).exists():
        (folder / DATA).symlink_to(folder.parent / DATA)
    variables = {"MINARI_DATASETS_PATH": str(folder / "minari")}  # Not in the home.
    if use.startswith("marl-collect "):
        _name, *arguments = shlex.split(use)
        program = environment / "bin" / "marl-collect"
        run(program, *arguments, folder=folder, **variables)
    else:
        (folder / "use.py").write_text(use)
        python = environment / "bin" / "python"
        run(python, "-P", "use.py", folder=folder, **variables)


def check_processes(folder: Path) -> None:
    """Check that no process runs from below ``folder``, and end those that do.

    Raises:
        SystemExit: if there are any after some seconds; names them.
    """
    end = time.monotonic() + _LEFT_SECONDS
    while remaining := processes_of(folder):
        if time.monotonic() > end:
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise SystemExit(
                f"Processes were left behind: {sorted(remaining.values())}."
            )
        time.sleep(0.5)  # noqa: TID251 - no child of ours


def processes_of(folder: Path) -> dict[int, str]:
    """Return the commands that mention ``folder``, by process id; needs /proc."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in command:
                commands[int(path.parent.name)] = command
    return commands


def check_readme(wheel: Path, *, system: bool, folder: Path) -> None:
    """Install as the README says, and run its script and commands."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    extras = dict.fromkeys(
        re.findall(r'^pip .*"marl-collect\[([\w,]+)\]"', readme, re.M)
    )
    (script,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    commands = re.findall(r"^(marl-collect [^#\n]+)", readme, re.MULTILINE)
    first = next(iter(extras))
    for extra in extras:
        environment = install(wheel, extra, system=system, folder=folder)
        use_folder = folder / f"use-{environment.name}"
        run(environment / "bin" / "marl-collect", "info", COUNTING, folder=folder)
        if extra == first:
            execute(script, environment, use_folder)
            for command in commands:
                if command.split()[1] != "compare":  # It takes hours.
                    execute(command, environment, use_folder)
        shutil.rmtree(environment)
        print(f"The README's commands work with [{extra}].")


def main() -> None:
    """Build and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", help="extras to install, one at a time")
    parser.add_argument("--every-extra", action="store_true")
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--system-site-packages", action="store_true")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared_extras = project["optional-dependencies"]
    extras = sorted(declared_extras) if arguments.every_extra else arguments.extras
    unknown_extras = sorted(set(extras) - declared_extras.keys())
    if unknown_extras:
        raise SystemExit(
            f"There are no extras {unknown_extras}: expected {sorted(declared_extras)}."
        )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme_extras = re.findall(r'"marl-collect\[([\w,]+)\]"', readme)
    wrong = sorted(
        {e for names in readme_extras for e in names.split(",")}
        - declared_extras.keys()
    )
    if wrong:
        raise SystemExit(f"The README installs extras that do not exist: {wrong}.")
    failures = []
    with tempfile.TemporaryDirectory(prefix="check-package-") as temporary:
        folder = Path(temporary)
        sdist, wheel = build(folder)
        settings: dict[str, Any] = {
            "system": arguments.system_site_packages,
            "folder": folder,
        }
        checks = {
            f"{archive.name}{f' [{extra}]' if extra else ''}": partial(
                check, archive, extra, **settings
            )
            for archive, extra in [
                (sdist, ""),
                (wheel, ""),
                *((wheel, e) for e in extras),
            ]
        }
        if arguments.readme:
            checks["the README"] = partial(check_readme, wheel, **settings)
        for number, (name, check_step) in enumerate(checks.items()):
            begin = time.monotonic()
            print(f"{number + 1} of {len(checks)}: {name}", flush=True)
            state = "works"
            for step in (check_step, partial(check_processes, folder)):
                try:
                    step()
                except (SystemExit, subprocess.TimeoutExpired) as error:
                    state = "FAILED"
                    print(error, flush=True)
            if state == "FAILED":
                failures.append(name)
            print(f"{name} {state}, {time.monotonic() - begin:.0f} s", flush=True)
    if failures:
        raise SystemExit(f"Failed: {', '.join(failures)}.")


if __name__ == "__main__":
    main()
