"""Check what a user of pip gets: build, install in clean environments, and run.

    python scripts/check_package.py            # the wheel and the sdist
    python scripts/check_package.py video ray  # and the wheel with each extra alone

Wheel and sdist are built from the tracked files of the checkout, without a network if
setuptools is installed here. Each environment is new, lies outside the checkout, and is
deleted afterwards. One failure does not end the run; a summary comes last.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
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
assert (home.parent / "cli" / "viewer" / "page.html").exists()
from marl_collect import Collector
from workloads.counting import CountingEnv
batch = next(iter(Collector(CountingEnv, frames_per_batch=10, total_frames=10)))
assert batch.shape == (1, 10)
print(marl_collect.__version__, home)
"""
COUNTING = "workloads.counting:CountingEnv"

USES: dict[str, str] = {
    "pettingzoo": """
        marl-collect info multiwalker_v9
        marl-collect info connect_four_v3
        marl-collect info pistonball_v6
        marl-collect info matrix/climbing
    """,
    "mpe": "marl-collect info simple_spread_v3",
    "magent2": "marl-collect info battle_v4",
    "atari": "marl-collect envs atari",
    "meltingpot": "marl-collect info meltingpot/coins",
    "dmlab2d": """
        from marl_collect.envs.lab2d.provider import FAMILY
        FAMILY.available_tasks()
        import dmlab2d
    """,
    "jaxmarl": "marl-collect info jaxmarl/MPE_simple_spread_v3",
    "lbforaging": "marl-collect info lbforaging/Foraging-8x8-2p-3f-v3",
    "openspiel": "marl-collect info openspiel/kuhn_poker",
    "mamujoco": "marl-collect info mamujoco/Ant-4x2",
    "overcooked": "marl-collect info overcooked/cramped_room",
    "rware": "marl-collect info rware/rware-tiny-2ag-v2",
    "vmas": "marl-collect info vmas/navigation",
    "ray": """
        from marl_collect.distributed import RayCollector
        from workloads.counting import CountingEnv
        size = {"frames_per_batch": 20, "total_frames": 20}
        ray = {"num_cpus": 2}
        with RayCollector(CountingEnv, ray_init_config=ray, **size) as collector:
            assert sum(batch.numel() for batch in collector) == 20
    """,
    "torchrl": """
        from marl_collect.interop.torchrl import to_torchrl
        from workloads.counting import CountingEnv
        assert to_torchrl(CountingEnv()).rollout(5).shape[-1] == 5
    """,
    "benchmarl": """
        from benchmarl.algorithms import MappoConfig
        from marl_collect.interop.benchmarl import Experiment
        print(Experiment, MappoConfig.get_from_yaml())
    """,
    "compare": (
        f"marl-collect compare {COUNTING} --setup ippo-local-shared --seeds 1 "
        "--frames 200 --workers 1 --set frames_per_batch=100 "
        "--set eval_interval=100 --set eval_episodes=2 --set final_episodes=2"
    ),
    "loggers": """
        from pathlib import Path
        from marl_collect.interop.loggers import RunLogger
        for name in ("csv", "tensorboard"):
            with RunLogger(name, Path("run"), "seed_0", "task") as log:
                log.add({"loss": 0.5}, 100)
                log.write()
    """,
    "video": """
        import numpy as np
        from marl_collect import write_video
        for name in ("some.mp4", "some.gif"):
            print(write_video(name, [np.zeros((32, 32, 3), np.uint8)] * 5, fps=5))
    """,
    "datasets": "marl-collect inspect {data}",
    "minari": "marl-collect export {data} --format minari --out x-v0",
    "vault": "import tensorstore; from marl_collect.storage import import_vault",
    "cloud": """
        import s3fs
        marl-collect copy {data} memory://store/data
    """,
    "plot": "marl-collect inspect {data} --plot histograms.png",
    "bench": """
        import matplotlib, psutil, torchrl
        marl-collect info multiwalker_v9
    """,
    "dev": "import hypothesis, mkdocs, pytest, ruff",
}
"""What works with each extra alone: lines with commands, others with Python to run.
``{data}`` is a dataset that is collected before."""
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
    arguments = [str(argument) for argument in command]
    process = subprocess.run(
        arguments,
        cwd=folder,
        env=ours | variables,
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )
    if process.returncode:
        output = f"{process.stdout}\n{process.stderr}"
        raise SystemExit(f"{' '.join(arguments)} failed:\n{output}")
    return process.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build an sdist from the checkout and a wheel from the sdist; return both."""
    code = "import sys, setuptools.build_meta as b; print(b.{}(sys.argv[1]))"
    copy = folder / "checkout"
    # Files that git does not track must not be needed. The stash is not kept.
    tree = run("git", "stash", "create", folder=ROOT).strip() or "HEAD"
    run("git", "archive", "--output", folder / "checkout.tar", tree, folder=ROOT)
    shutil.unpack_archive(folder / "checkout.tar", copy, filter="data")
    dist = folder / "dist"
    run(sys.executable, "-c", code.format("build_sdist"), dist, folder=copy)
    (sdist,) = dist.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", code.format("build_wheel"), dist, folder=source)
    (wheel,) = dist.glob("*.whl")
    return sdist, wheel


def install(archive: Path, extra: str, environment: Path) -> None:
    """Install an archive with an extra in a new environment."""
    python = environment / "bin" / "python"
    venv.create(environment, with_pip=True)
    constraints = environment / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(True)
    others = OTHER_VERSIONS.get(extra, ())
    constraints.write_text("".join(x for x in lines if x.split("==")[0] not in others))
    if extra in ("meltingpot", "all"):
        # As the README says: its archive of bots may be out of reach.
        script = ROOT / "scripts" / "install_meltingpot.py"
        run(python, script, "--quiet", "-c", constraints, folder=environment)
    options = ["--quiet", "--disable-pip-version-check", "--prefer-binary"]
    pip = [python, "-m", "pip", "install", *options, "--no-compile", "-c", constraints]
    run(*pip, f"{archive}[{extra}]" if extra else archive, folder=environment)


def check(archive: Path, extra: str, folder: Path) -> None:
    """Install an archive in a clean environment and use it.

    Without an extra, the commands that need none run. The first use of an extra that
    reads a dataset collects it before.
    """
    environment = folder / f"env-{archive.suffix[1:]}-{extra or 'plain'}"
    data, used = folder / "data", folder / f"use-{environment.name}"
    used.mkdir()
    variables = {"MINARI_DATASETS_PATH": str(used / "minari")}  # Not in the home.
    try:
        install(archive, extra, environment)
        python, command = (environment / "bin" / x for x in ("python", "marl-collect"))
        print(run(python, "-P", "-c", TRY, ROOT, folder=used).strip())
        if not extra:
            run(command, "--version", folder=used)
            run(command, "info", COUNTING, folder=used)
        names = USES.keys() - set(NOT_IN_ALL) if extra == "all" else {extra}
        for use in (textwrap.dedent(USES[name]) for name in USES if name in names):
            if "{data}" in use and not data.exists():
                amount = ["--frames", "100", "--policy", "random", "--quiet"]
                run(command, "collect", COUNTING, *amount, "--out", data, folder=used)
            lines = use.replace("{data}", str(data)).splitlines()
            commands = [line for line in lines if line.startswith("marl-collect ")]
            code = "\n".join(line for line in lines if line not in commands)
            (used / "use.py").write_text(code)  # Processes of Ray need a file.
            run(python, "-P", "use.py", folder=used)
            for line in commands:
                run(command, *shlex.split(line)[1:], folder=used, **variables)
    finally:
        shutil.rmtree(environment)


def main() -> None:
    """Build and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    text, choices = "to install, one at a time", [[], *USES, "all"]
    parser.add_argument(
        "extras", nargs="*", choices=choices, metavar="EXTRA", help=text
    )
    extras = parser.parse_args().extras
    failures = []
    with tempfile.TemporaryDirectory(prefix="check-package-") as temporary:
        folder = Path(temporary)
        sdist, wheel = build(folder)
        checks = [(sdist, ""), (wheel, ""), *((wheel, extra) for extra in extras)]
        for number, (archive, extra) in enumerate(checks, 1):
            begin, state = time.monotonic(), "works"
            name = f"{archive.name} [{extra}]" if extra else archive.name
            print(f"{number} of {len(checks)}: {name}", flush=True)
            try:
                check(archive, extra, folder)
            except (SystemExit, subprocess.TimeoutExpired) as error:
                state = "FAILED"
                print(error, flush=True)
                failures.append(name)
            print(f"{name} {state}, {time.monotonic() - begin:.0f} s", flush=True)
    if failures:
        raise SystemExit(f"Failed: {', '.join(failures)}.")


if __name__ == "__main__":
    main()
