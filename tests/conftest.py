"""What every test run needs: quiet libraries, markers that skip, no silent skip."""

import gc
import importlib.util
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["support.by_value", "support.processless"]

# Variables of torchrun would make collectors of tests ranks of a job.
for _variable in (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
):
    os.environ.pop(_variable, None)
if sys.platform == "linux":
    # Gloo would look up the host's name, which not every machine can resolve.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

# Read when the libraries are first imported, in workers too.
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Small networks on busy cores: a second thread costs more than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Most of the time of JaxMARL's tests is compilation; later runs read its results.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Programs that tests start import `workloads.counting` too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1] / "benchmarks")]
    + [path for path in [os.environ.get("PYTHONPATH")] if path]
)

# No deadline: a slow machine is not a failing test. The same examples in every run.
hypothesis.settings.register_profile("repo", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repo")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare garbage collections what the imports made, and let them be rarer.

    These are more than a million objects, which every full collection would read, in
    half a second. Collections also take a quarter of the time of tests that compile,
    because most of what a compiler makes stays until it has finished.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


_entropy = random.Random()
"""What NumPy's generators begin with if nobody seeds them."""


@pytest.fixture(scope="session", autouse=True)
def _no_entropy_of_the_system() -> Iterator[None]:
    """Let NumPy take the entropy of unseeded generators from ``_entropy``.

    Environments have such generators until they are reset with a seed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numpy.random.bit_generator.randbits", _entropy.getrandbits)
        yield


@pytest.fixture(autouse=True)
def _the_same_draws_in_every_run() -> None:
    """Make weights, environments and random actions of a test the same in every run.

    Without it they depend on the tests before it, and which these are varies: tests are
    handed to processes as these become free.
    """
    import numpy as np
    import torch

    # Without a GPU in use, `torch.manual_seed` spends a millisecond on formatting the
    # stack, for an error of CUDA.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - Environments use the global generator.
    _entropy.seed(0)


@pytest.fixture(scope="session", autouse=True)
def _time_to_die() -> Iterator[None]:
    """Let closing wait until killed workers have ended.

    It waits for 3 seconds otherwise, in which a busy machine may not get to it.
    """
    from marl_collect.processes import closing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closing, "_KILL_SECONDS", 100.0)
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Restore the handlers: an interrupted command leaves signals ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _no_accelerator() -> bool:
    import torch

    return not torch.cuda.is_available()


def _no_bots() -> bool:
    spec = importlib.util.find_spec("meltingpot")
    if spec is None or spec.origin is None:
        return True
    return not (Path(spec.origin).parent / "assets" / "saved_models").is_dir()


def _no_roms() -> bool:
    spec = importlib.util.find_spec("multi_agent_ale_py")
    if spec is None or spec.origin is None:
        return True
    return not any((Path(spec.origin).parent / "roms").glob("*.bin"))


def _no_mounts() -> bool:
    try:
        # What the tests do with it, but for the mount itself.
        process = subprocess.run(["unshare", "-Urm", "true"], capture_output=True)
    except FileNotFoundError:
        return True
    return process.returncode != 0


MISSING: dict[str, Callable[[], bool]] = {
    "accelerator": _no_accelerator,
    "bots": _no_bots,
    "mounts": _no_mounts,
    "roms": _no_roms,
}


def _expected_skips() -> dict[str, str]:
    """Marker -> reason, from the committed list."""
    text = (Path(__file__).parent / "expected_skips.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.removesuffix("]").split(" [") for line in lines]
    return {marker: reason for reason, marker in pairs}


REASONS = _expected_skips()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in MISSING.items():
        if item.get_closest_marker(marker) and missing():
            pytest.skip(REASONS[marker])


class UnexpectedSkips:
    """Fails a run in which something was skipped that nobody had agreed to."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "?"
        reason = reason.removeprefix("Skipped: ")
        if reason not in REASONS.values():
            self.found.append(f"{report.nodeid}: {reason}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        if self.found:
            terminalreporter.section("unexpected skips", red=True)
            terminalreporter.write_line("Not listed in tests/expected_skips.txt:")
            for line in self.found:
                terminalreporter.write_line(f"  {line}")


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets what it starts in the background ignore Ctrl-C, and so do all the
    # processes that tests start, and interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("CI", "").lower() in ("1", "true"):
        config.pluginmanager.register(UnexpectedSkips(), "unexpected-skips")
