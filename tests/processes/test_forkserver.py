"""The fork server: what it preloads and refuses, and pools inside its workers."""

import importlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool_tools import exit_codes, obey
from support.processes import SOON, suspend, wait_until_gone
from support.scripts import run_python

from marl_collect.processes import WorkerPool, launcher

WriteModule = Callable[[str, str], str]


def ask(pool: WorkerPool, question: Any, worker: int = 0) -> Any:
    pool.send(worker, question)
    index, answer = pool.receive([worker])
    assert index == worker
    return answer


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    """Write modules that can be preloaded."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_pools_with_the_same_preload_share_a_server_and_others_do_not(
    module: WriteModule,
) -> None:
    name = module("preload_other", "")
    with (
        WorkerPool(obey, [0]) as first_pool,
        WorkerPool(obey, [0]) as second_pool,
        WorkerPool(obey, [0], preload=(name,)) as preloading_pool,
    ):
        servers = [
            ask(pool, lambda worker, argument: os.getppid())
            for pool in (first_pool, second_pool, preloading_pool)
        ]
    assert servers[0] == servers[1] != servers[2]


OWN = "marl_collect.core.seeding"


def shared_by_the_first(
    module: WriteModule, name: str, *, with_thread: bool
) -> list[bool]:
    """Return whether the second worker of a server finds what the first imported."""
    server = module(f"preload_for_{name}", "")

    def first(worker: Any, argument: Any) -> None:
        stop = threading.Event()
        if with_thread:
            threading.Thread(target=stop.wait).start()
        importlib.import_module(OWN)
        importlib.import_module(name)
        launcher.share_imports()
        stop.set()

    def second(worker: Any, argument: Any) -> Any:
        return [OWN in sys.modules, name in sys.modules]

    with WorkerPool(obey, [0], preload=(server,)) as pool:
        assert ask(pool, second) == [False, False]
        # A busy server finds what is shared and the next request at the same time.
        pid = ask(pool, lambda worker, argument: os.getppid())
        suspend(pid)
        ask(pool, first)
        threading.Timer(0.3, os.kill, (pid, signal.SIGCONT)).start()
        with WorkerPool(obey, [0], preload=(server,)) as other:
            return ask(other, second)


@pytest.mark.parametrize("with_thread", [False, True])
def test_later_workers_inherit_imports_of_this_package_from_one_without_threads(
    with_thread: bool, module: WriteModule
) -> None:
    name = module(f"users_own_{with_thread}", "")
    inherited = shared_by_the_first(module, name, with_thread=with_thread)
    assert inherited == [not with_thread, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("raise LookupError('at import')", "LookupError: at import"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(3)", "ended during its start, with exit code 3"),
    ],
    ids=["missing", "raises", "leaves", "exits"],
)
def test_a_preload_that_fails_is_reported(
    module: WriteModule, text: str, message: str
) -> None:
    name = module(f"preload_{abs(hash(text))}", text)
    with pytest.raises(RuntimeError, match=message):
        WorkerPool(obey, [0], preload=(name,))


def test_a_server_started_ahead_imports_while_we_go_on(
    module: WriteModule, tmp_path: Path
) -> None:
    name = module(
        "preload_ahead",
        "import os, pathlib, time\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
        "pid = os.getpid()",
    )
    launcher.start_server((name,))
    launcher.start_server((name,))
    (tmp_path / "go").touch()
    with WorkerPool(obey, [0], preload=(name,)) as pool:

        def look(worker: Any, argument: Any) -> Any:
            return sys.modules["preload_ahead"].pid, os.getppid()

        first, second = ask(pool, look)
        assert first == second != os.getpid()
        launcher.start_server((name,))  # It runs.
        with WorkerPool(obey, [0], preload=(name,)) as other:
            assert ask(other, look) == (first, second)


def test_a_failure_of_a_server_started_ahead_is_reported_once_by_the_first_pool(
    module: WriteModule,
) -> None:
    name = module("preload_fails_ahead", "raise LookupError('at import')")
    launcher.start_server((name,))
    with pytest.raises(RuntimeError, match="LookupError: at import"):
        WorkerPool(obey, [0], preload=(name,))
    module("preload_fails_ahead", "")
    with WorkerPool(obey, [0], preload=(name,)) as pool:
        assert ask(pool, lambda worker, argument: 3) == 3


def test_a_preload_that_starts_threads_is_refused_by_name(module: WriteModule) -> None:
    good = module("preload_good", "")
    bad = module(
        "preload_threads",
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    )
    with pytest.raises(RuntimeError, match="preloading 'preload_threads' started 1"):
        WorkerPool(obey, [0], preload=(good, bad))


def test_a_preload_that_takes_too_long_is_given_up(module: WriteModule) -> None:
    name = module("preload_slow", "import threading; threading.Event().wait(1000)")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"preload_slow.*start_timeout="):
        WorkerPool(obey, [0], preload=(name,), start_timeout=0.5)
    assert time.monotonic() - start < SOON


def test_a_stopped_server_is_given_up(module: WriteModule) -> None:
    name = module("preload_stopped", "")
    with WorkerPool(obey, [0], preload=(name,)) as pool:
        server = ask(pool, lambda worker, argument: os.getppid())
        suspend(server)
        try:
            with pytest.raises(TimeoutError, match="fork server did not answer"):
                WorkerPool(obey, [0], preload=(name,), start_timeout=0.5)
        finally:
            os.kill(server, signal.SIGCONT)
        assert ask(pool, lambda worker, argument: "alive") == "alive"


def test_workers_inherit_no_files_of_the_server_or_of_each_other() -> None:
    def count(worker: Any, argument: Any) -> Any:
        return len(os.listdir("/proc/self/fd"))

    with WorkerPool(obey, [0]) as single_pool:
        n_files = ask(single_pool, count)
        with WorkerPool(obey, range(8)) as crowd:
            assert ask(crowd, count, worker=7) == n_files


def test_workers_have_one_thread_and_the_file_limit_of_the_trainer(
    module: WriteModule,
) -> None:
    def look(worker: Any, argument: Any) -> Any:
        return (
            len(os.listdir("/proc/self/task")),
            resource.getrlimit(resource.RLIMIT_NOFILE),
        )

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = (limits[1] // 2, limits[1])
    name = module("preload_limits", "")  # A server that starts under this limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, lower)
    try:
        with WorkerPool(obey, [0], preload=(name,)) as pool:
            assert ask(pool, look) == (1, lower)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_pool_in_a_worker_gets_its_processes_from_the_same_server() -> None:
    def nest(worker: Any, argument: Any) -> Any:
        pool = WorkerPool(obey, ["x", "y"], preload=("ignored",))
        pool.broadcast(lambda worker, argument: (argument, os.getppid()))
        inner = dict(pool.receive() for _ in range(2))
        pool.close(timeout=SOON)
        return os.getppid(), inner, exit_codes(pool)

    with WorkerPool(obey, [0]) as pool:
        server, inner, exitcodes = ask(pool, nest)
    assert inner == {0: ("x", server), 1: ("y", server)}
    assert exitcodes == (0, 0)


def test_a_worker_that_returns_closes_its_pools(tmp_path: Path) -> None:
    def close_slowly(worker: Any, path: Any) -> None:
        worker.send("up")
        try:
            worker.receive()
        finally:
            threading.Event().wait(0.1)
            path.touch()

    def nest(worker: Any, argument: Any) -> None:
        cleanup: Any = importlib.import_module("marl_collect.processes.cleanup")
        cleanup._EXIT_SECONDS = SOON  # However slow this machine is.
        pool = WorkerPool(close_slowly, [tmp_path / "closed"])
        vars(sys.modules["marl_collect"])["kept"] = pool  # Until the process ends.
        worker.send(pool.receive())
        worker.receive()

    with WorkerPool(nest, [0]) as pool:
        pool.receive()
        pool.close(timeout=SOON)
        assert exit_codes(pool) == (0,)
    assert (tmp_path / "closed").exists()


def test_many_threads_may_start_pools_at_once() -> None:
    answers: list[int] = []

    def work(name: int) -> None:
        with WorkerPool(obey, [name, name]) as pool:
            answers.append(ask(pool, lambda worker, argument: argument, worker=1))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(8))


def test_a_fork_server_has_one_thread_and_all_modules_that_a_policy_needs() -> None:
    pytest.importorskip("torch")

    def imported_by_a_policy(worker: Any, argument: Any) -> list[str]:
        loaded = set(sys.modules)
        import torch
        from tensordict import TensorDict
        from tensordict.nn import TensorDictModule

        policy = TensorDictModule(torch.nn.Linear(2, 3), ["observation"], ["action"])
        policy(TensorDict({"observation": torch.zeros(4, 2)}, [4]))
        return sorted(set(sys.modules) - loaded)

    with WorkerPool(obey, [0], preload=launcher.COLLECTOR_MODULES) as pool:
        server = ask(pool, lambda worker, argument: os.getppid())
        assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
        assert ask(pool, imported_by_a_policy) == []


def test_a_server_whose_trainer_was_killed_at_once_ends_before_its_preload(
    tmp_path: Path,
) -> None:
    """The socket is closed before the server arms the signal that a hangup sends."""
    (tmp_path / "preload_forever.py").write_text(
        "import threading; threading.Event().wait(1000)"
    )
    code = (
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from marl_collect.processes import launcher\n"
        "launcher.start_server(('preload_forever',))\n"
        "(server,) = launcher._state._servers.values()\n"
        "print(server._popen.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = run_python("-c", code, tmp_path, interpreter=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    server = int(process.stdout)
    try:
        wait_until_gone([server])
    except AssertionError:
        os.kill(server, signal.SIGKILL)
        raise
