"""Draws pairs of faults and checks that the first one is the one that is reported.

A pair is a fault in one process, and a second one: in the close of the same process,
in the close of another one, in another process a moment later, or a full disk. After
each pair it checks that

- the error names the first fault, its worker and its phase;
- it is raised soon, and later uses raise the same error or ``ClosedError``;
- no process, no forked helper of an environment, and no open file is left.

Full disks are file systems of 1 MiB, which only root can mount.
"""

import contextlib
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.clocks import Clock
from support.internals import pool_of
from support.processes import wait_until, wait_until_gone
from workloads.counting import CountingEnv, Fault, raise_unpicklable

from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.distributed import RayCollector
from marl_collect.errors import ClosedError, worker_error_of
from marl_collect.evaluation.evaluator import Evaluator
from marl_collect.parallel_env import ParallelEnv
from marl_collect.processes.worker_handle import WorkerHandle
from marl_collect.storage import DatasetDescription, Writer

TIMEOUT: Final = 1.0
"""Seconds without progress that count as a hang, if the first fault is one."""

PATIENCE: Final = 100.0
"""The same otherwise: a process of a busy machine may stand still for long."""

PROMISED: Final = 5.0
"""Seconds from an error to its report that docs/faults.md promises."""

LATER: Final = 0.3
"""Seconds between both faults on Ray, if the second one is no close. Elsewhere it comes
as soon as the trainer has noticed the first one, which may take any time."""

MIB: Final = 1 << 20

OURS: Final = [Path(__file__).stem]
"""Preloaded: each process of ParallelEnv would import it, with torch, for seconds."""


def exceed_a_limit() -> None:
    """Use all memory that a limit of the process allows, and keep it."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 64 * MIB, resource.RLIM_INFINITY))
    _memory.extend(bytes(MIB) for _ in range(1000))


_memory: list[bytes] = []


def leave_a_helper(folder: Path) -> None:
    """Fork a process that never ends, and holds all files of this one."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    (folder / f"helper-{pid}").touch()


OUT_OF_MEMORY: Final = "killed by SIGKILL (often the out-of-memory killer"

FIRST: Final[dict[str, tuple[Fault, str]]] = {
    "raise in step": (Fault("raise", at=3), "fault in step"),
    "raise in reset": (Fault("raise", "reset"), "fault in reset"),
    "hang in step": (Fault("hang", at=3), "hung 1 s in step"),
    "hang in reset": (Fault("hang", "reset"), "hung 1 s in reset"),
    "kill in step": (Fault("kill", at=3), OUT_OF_MEMORY),
    "kill in reset": (Fault("kill", "reset"), OUT_OF_MEMORY),
    "abort in step": (Fault("kill", at=3, signal=signal.SIGABRT), "SIGABRT"),
    "segfault in step": (Fault("kill", at=3, signal=signal.SIGSEGV), "SIGSEGV"),
    "exit in step": (Fault("exit", at=3), "exit code 3"),
    "raise what cannot be pickled": (Fault(raise_unpicklable, at=3), "holds a lock"),
    "stop in step": (Fault("kill", at=3, signal=signal.SIGSTOP), "hung 1 s in step"),
    "memory": (Fault(exceed_a_limit, at=3), "MemoryError"),
    "fork and kill": (Fault("kill", at=3), OUT_OF_MEMORY),
    "interrupt": (Fault("hang", at=3), "KeyboardInterrupt"),
    "full disk": (Fault("hang", at=100_000), "No space left"),
    "lost actor": (Fault("hang", at=3), "lost with actor"),
}
"""A fault, and what its error says."""

EXIT_CODES: Final = {
    OUT_OF_MEMORY: -signal.SIGKILL,
    "SIGABRT": -signal.SIGABRT,
    "SIGSEGV": -signal.SIGSEGV,
    "exit code 3": 3,
}
"""Of a worker whose error says so."""

ONLY: Final = {"full disk": "Writer", "lost actor": "Ray"}
"""Faults of one subject, which no environment causes."""

IN_CLOSE: Final[dict[str, Callable[[], None]]] = {
    "raise": Fault("raise", "close").strike,
    "hang": Fault("hang", "close").strike,
    "exit": Fault("exit", "close").strike,
    "kill": Fault("kill", "close").strike,
    "stop": Fault("kill", "close", signal=signal.SIGSTOP).strike,
    "memory": exceed_a_limit,
}

LATER_FAULTS: Final[dict[str, Callable[[], None]]] = {
    "raise": Fault("raise").strike,
    "hang": Fault("hang").strike,
    "kill": Fault("kill").strike,
    "exit": Fault("exit").strike,
}


@dataclass(frozen=True)
class Pair:
    """Two faults of a subject.

    Attributes:
        subject: name of what fails; see ``SUBJECTS``.
        first: see ``FIRST``.
        second: "fork" or one of ``IN_CLOSE``, and of ``LATER_FAULTS`` in a step; "none"
            if the first fault is the only one.
        where: of the second fault: "same close", "other close", "other step", or
            "full disk" while the dataset is closed; "" if there is none.
        worker: of the first fault.
    """

    subject: str
    first: str
    second: str = "none"
    where: str = ""
    worker: int = 1

    def __str__(self) -> str:
        return (
            f"{self.subject}: {self.first} of {self.worker}, then {self.second} in "
            f"{self.where}"
        )


DRAWN: Final = (
    *("Collector", "MultiSync", "MultiAsync", "ParallelEnv", "groups"),
    *("Evaluator", "Writer"),
)


def draw(seed: int) -> Pair:
    """Return the pair of a seed, which can be told from its error."""
    random_ = random.Random(seed)
    subject = DRAWN[seed % len(DRAWN)]
    if subject == "Collector":
        # Faults of its only process end the trainer, so only errors are drawn.
        first = random_.choice(["raise in step", "raise in reset"])
        return Pair(subject, first, "raise", "same close", 0)
    first = random_.choice([fault for fault in FIRST if fault not in ONLY])
    where = random_.choice(["same close", "other close", "other step"])
    if FIRST[first][0].kind == "hang" or first == "stop in step":
        # Before the limit has passed, a hang is no fault that could come first.
        where = random_.choice(["same close", "other close"])
    closes = [*IN_CLOSE, "fork"]
    second = random_.choice([*LATER_FAULTS] if where == "other step" else closes)
    return Pair(subject, first, second, where, random_.randrange(2))


def in_close(pair: Pair, folder: Path) -> Callable[[], None]:
    """Return what is done in a close."""
    if pair.second == "fork":
        return partial(leave_a_helper, folder)
    return IN_CLOSE[pair.second]


def wait_for_the_first(pair: Pair, folder: Path) -> None:
    """Wait in a step until the first fault has come first; see ``LATER``."""
    on_ray = pair.subject == "Ray"
    while not (folder / ("struck" if on_ray else "noticed")).exists():
        threading.Event().wait(0.005)
    if on_ray:
        threading.Event().wait(LATER)


def factories(pair: Pair, folder: Path) -> list[Callable[[], CountingEnv]]:
    """Return the factories of both environments."""
    fault, _ = FIRST[pair.first]
    struck = folder / "struck"

    def marked() -> None:
        if pair.first == "fork and kill":
            leave_a_helper(folder)
        struck.touch()
        fault.strike()

    def later() -> None:
        wait_for_the_first(pair, folder)
        LATER_FAULTS[pair.second]()

    def broken() -> CountingEnv:
        env = CountingEnv(deaths=False, fault=Fault(marked, fault.phase, at=fault.at))
        if pair.where == "same close":
            env.close = in_close(pair, folder)  # type: ignore[method-assign]
        return env

    def other() -> CountingEnv:
        if pair.where == "other step":
            return CountingEnv(deaths=False, fault=Fault(later, "step", at=3))
        env = CountingEnv(deaths=False)
        if pair.where == "other close":
            env.close = in_close(pair, folder)  # type: ignore[method-assign]
        return env

    return [broken, other] if pair.worker == 0 else [other, broken]


@contextlib.contextmanager
def collected(kind: Any, pair: Pair, folder: Path) -> Iterator[Any]:
    """Yield a collector's process ids and what to call until it fails."""
    env_factories = factories(pair, folder)
    options: dict[str, Any] = {"frames_per_batch": 40}
    if kind is Collector:
        env_factories = env_factories[:1]
    else:
        options["timeout"] = timeout(pair)
    collector = kind(env_factories, **options)
    yield getattr(collector, "worker_pids", ()), collector.next
    collector.shutdown()


@contextlib.contextmanager
def stepped(pair: Pair, folder: Path, groups: int = 1) -> Iterator[Any]:
    """The same for a ParallelEnv."""
    options: Any = {"num_processes": 2, "groups": groups, "timeout": timeout(pair)}
    with ParallelEnv(2, factories(pair, folder), preload=OURS, **options) as env:
        engine: Any = env.engine()
        yield engine.pids, lambda: env.rollout(20)


@contextlib.contextmanager
def evaluated(pair: Pair, folder: Path) -> Iterator[Any]:
    """The same for an Evaluator."""
    with Evaluator(None, factories(pair, folder), timeout=timeout(pair)) as evaluator:
        yield evaluator.worker_pids, lambda: evaluator.evaluate(episodes=20)


@contextlib.contextmanager
def written(pair: Pair, folder: Path) -> Iterator[Any]:
    """The same for a collector whose batches are written."""
    env_factories = factories(pair, folder)
    collector = MultiSyncCollector(
        env_factories, frames_per_batch=40, timeout=timeout(pair)
    )
    description = DatasetDescription("pairs", collector.description)
    with contextlib.ExitStack() as stack:
        disk = folder
        if needs_a_disk(pair):
            disk = stack.enter_context(small_disk(folder / "disk"))
        writer = stack.enter_context(Writer(disk / "data", description))

        def add() -> None:
            try:
                batch = collector.next()
                if pair.first == "full disk" and collector.frames == 120:
                    fill(disk)
                    (folder / "struck").touch()
                writer.add(batch)
            except BaseException:
                if pair.where == "full disk":
                    fill(disk)
                with writer:
                    raise

        yield collector.worker_pids, add
    collector.shutdown()


def needs_a_disk(pair: Pair) -> bool:
    """Return whether a disk has to be filled for this pair."""
    return "full disk" in (pair.first, pair.where)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount an empty file system of 1 MiB."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), (disk / "others").open("ab", 0) as file:
        while True:
            file.write(bytes(512))


@contextlib.contextmanager
def on_ray(pair: Pair, folder: Path) -> Iterator[Any]:
    """The same for a collector on Ray, with an actor for each environment."""
    collector = RayCollector(
        factories(pair, folder),
        frames_per_batch=40,
        sync=True,
        timeout=timeout(pair),
        max_restarts=0,
    )
    actors = [actor["pid"] for actor in collector.actors]
    if pair.first == "lost actor":

        def kill() -> None:
            wait_until((folder / "struck").exists)
            os.kill(actors[pair.worker], signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    yield [*actors, *pool_of(collector).pids], collector.next
    collector.shutdown()


Subject = Callable[[Pair, Path], contextlib.AbstractContextManager[Any]]
SUBJECTS: Final[dict[str, Subject]] = {
    "Collector": lambda pair, folder: collected(Collector, pair, folder),
    "MultiSync": lambda pair, folder: collected(MultiSyncCollector, pair, folder),
    "MultiAsync": lambda pair, folder: collected(MultiAsyncCollector, pair, folder),
    "ParallelEnv": stepped,
    "groups": lambda pair, folder: stepped(pair, folder, groups=2),
    "Evaluator": evaluated,
    "Writer": written,
    "Ray": on_ray,
}


STEPPED: Final = ("ParallelEnv", "groups")
_INTERRUPTIONS: Final = 5


@contextlib.contextmanager
def noting_failures(noticed: Path) -> Iterator[None]:
    """Create a file when the trainer reads the failure or the end of a worker."""
    read_ahead = WorkerHandle.read_ahead

    def read_and_note(handle: WorkerHandle, *most: int) -> None:
        try:
            read_ahead(handle, *most)
        except Exception:
            noticed.touch()
            raise

    with mock.patch.object(WorkerHandle, "read_ahead", read_and_note):
        yield


def check(pair: Pair, slack: float, clock: Clock | None = None) -> float:
    """Let a pair of faults happen and check what follows; return the seconds.

    Args:
        pair: the faults.
        slack: seconds that the machine may add to what is promised.
        clock: for hangs, in place of the true one.

    Raises:
        AssertionError: the first cause was not reported, or not soon, or something is
            left.
    """
    before = open_files()
    with TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # About the second fault.
        folder = Path(name)
        if clock is not None and expected(pair) == "hung":
            clock.runs_when = lambda: (
                (folder / "struck").exists() and clock.quiet == {pair.worker}
            )
        with (
            noting_failures(folder / "noticed"),
            SUBJECTS[pair.subject](pair, folder) as (pids, use),
        ):
            error, seconds = first_error(pair, folder, use)
            check_cause(pair, error, pids)
            limit = PROMISED + slack + (TIMEOUT if expected(pair) == "hung" else 0.0)
            assert seconds < limit, f"reported after {seconds:.1f} s"
            # Before an interrupted step ends, ParallelEnv can still be used.
            if pair.first != "interrupt" or pair.subject not in STEPPED:
                check_closed(pair, folder, use, error)
        helpers = [int(path.name[7:]) for path in folder.glob("helper-*")]
        wait_until_gone([*pids, *helpers])
        error.__traceback__ = None  # Its frames hold what is checked next.
        del use, error
    gc.collect()  # An error whose frames hold it keeps its files until then.
    wait_until(lambda: open_files() <= before, f"{open_files()} files, not {before}")
    return seconds


def timeout(pair: Pair) -> float:
    """Return the limit for processes without progress."""
    return TIMEOUT if expected(pair) == "hung" else PATIENCE


def expected(pair: Pair) -> str:
    """Return the first word of what the error says."""
    return FIRST[pair.first][1].split()[0]


def first_error(
    pair: Pair, folder: Path, use: Callable[[], object]
) -> tuple[BaseException, float]:
    """Use what fails until it does; return the error and the seconds it took."""
    struck = folder / "struck"

    def interrupt() -> None:
        wait_until(struck.exists)
        os.kill(os.getpid(), signal.SIGINT)

    deadline = time.monotonic() + PATIENCE
    try:
        if pair.first == "interrupt":
            threading.Thread(target=interrupt, daemon=True).start()
        # An async collector may yield any number of batches of the other worker first.
        while time.monotonic() < deadline:
            use()
    except BaseException as error:  # noqa: BLE001 - checked by the caller
        raised = time.time()
        return error, raised - struck.stat().st_mtime
    raise AssertionError("no error was raised")


def check_cause(pair: Pair, error: BaseException, pids: Sequence[int]) -> None:
    """Check that an error is about the first fault, in one of these processes."""
    text = f"{type(error).__name__}: {error}"
    assert FIRST[pair.first][1] in text, f"raised {text}"
    if pair.first in ("interrupt", "full disk") or pair.subject == "Collector":
        return
    cause = worker_error_of(error)
    assert cause is not None, f"raised {text}"
    if pair.first == "lost actor":
        assert cause.worker == pair.worker, text
        return
    assert cause.pid in pids, text
    phase = FIRST[pair.first][0].phase
    reported = (cause.worker, cause.environment, cause.phase)
    assert reported == (pair.worker, pair.worker, phase), f"{reported} in {text}"
    assert cause.exitcode == EXIT_CODES.get(FIRST[pair.first][1], cause.exitcode), text
    if pair.subject == "Ray":
        notes = [*getattr(error, "__notes__", ()), *getattr(cause, "__notes__", ())]
        assert any(f"actor {pair.worker}" in note for note in notes), notes
    if pair.first.startswith("raise"):
        assert f"{phase}_row" in cause.remote_traceback, cause.remote_traceback


def check_closed(
    pair: Pair, folder: Path, use: Callable[[], object], first: BaseException
) -> None:
    """Check that later uses raise the same error, or that it is closed.

    An async collector that was interrupted between two batches, not while it waited,
    can still be used, so it is interrupted again.
    """
    repeats = (pair.subject, pair.first) == ("MultiAsync", "interrupt")
    try:
        for number in range(_INTERRUPTIONS if repeats else 1):
            if number:
                check_cause(pair, first_error(pair, folder, use)[0], ())
            use()
    except ClosedError:
        return
    except Exception as error:
        if type(error) is type(first):
            return
        raise AssertionError(f"later {type(error).__name__}: {error}") from error
    raise AssertionError("it can still be used")


def open_files() -> int:
    """Count the open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def prepare() -> None:
    """Start the fork servers, whose files stay open, and allow no core dumps."""
    # A shell lets commands that it starts in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    MultiSyncCollector(CountingEnv, frames_per_batch=1).shutdown()
    ParallelEnv(1, CountingEnv, preload=OURS).close()
