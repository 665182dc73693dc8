"""The page of questions and errors quotes messages that the package prints."""

import importlib
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from support.commands import error_of
from support.packages import hide, skip_without
from workloads.counting import CountingEnv, Fault, stuck

from marl_collect import EnvWrapper, MultiSyncCollector, play, write_video
from marl_collect.cli.tasks import find_factory

pytest.importorskip("mpe2", reason="needs the extra mpe")

from marl_collect.envs import PettingZooEnv

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[1] / "docs" / "faq.md"
TABLE = PAGE.read_text("utf-8").partition("## Errors")[2].partition("## Trouble")[0]
QUOTES = re.findall(r"^\| `(.+?)` \|", TABLE, re.MULTILINE)
SPREAD: Any = partial(PettingZooEnv, "simple_spread_v3")


def command(*arguments: str) -> None:
    """Run a command; its output is the message."""
    raise RuntimeError(error_of(*arguments))


def collect(**options: Any) -> None:
    factory = options.pop("factory", CountingEnv)
    with MultiSyncCollector(factory, **options) as collector:
        for _ in collector:
            pass


def without(package: str, then: Callable[[], Any]) -> None:
    """Call ``then`` as if a package were not installed."""
    parts = [name for name in sys.modules if name.partition(".")[0] == package]
    with pytest.MonkeyPatch.context() as patch:
        hide(patch, package)
        for name in {*parts, package}:
            patch.setitem(sys.modules, name, None)
        then()


def without_roms() -> None:
    from marl_collect.envs.pettingzoo import tasks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "_missing_roms", lambda: tasks.DOWNLOAD_ROMS)
        find_factory("atari/pong_v3", {})


def without_bots() -> None:
    from marl_collect.envs.meltingpot import settings

    lacking = [n for n in settings.scenarios() if settings.lacks_bots(n)]
    if not lacking:
        pytest.skip("the bots are installed")
    command("info", lacking[0])


def killed() -> None:
    with MultiSyncCollector(CountingEnv, frames_per_batch=10) as collector:
        collector.next()
        os.kill(collector.worker_pids[0], signal.SIGKILL)
        while True:
            collector.next()


def wrong_weights(folder: Path) -> None:
    import torch

    torch.save({"weight": torch.zeros(1)}, folder / "weights.pt")
    command("play", "simple_spread_v3", "--policy", str(folder / "weights.pt"))


def runs_already(folder: Path) -> None:
    from marl_collect.training.comparison import check_folder

    run_folder = folder / "ippo-local-shared" / "seed_0"
    run_folder.mkdir(parents=True)
    (run_folder / "config.json").write_text("{}")
    (run_folder / "result.json").write_text("{}")
    check_folder(folder, resume=False)


def other_files(folder: Path) -> None:
    (folder / "thesis.tex").touch()
    command("collect", "simple_spread_v3", "--out", str(folder))


def without_pyarrow() -> None:
    def imported_anew() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(sys.modules, "marl_collect.storage.arrow", raising=False)
            importlib.import_module("marl_collect.storage.arrow")

    without("pyarrow", imported_anew)


PROVOKED: dict[str, Callable[[Path], Any]] = {
    "There is no task": lambda _: find_factory("simple_spraed_v3", {}),
    "No task contains": lambda _: command("envs", "zzz"),
    "... needs ...: pip install": lambda _: without(
        "meltingpot", lambda: find_factory("meltingpot/coins", {})
    ),
    "... needs: AutoROM --accept-license": lambda _: without_roms(),
    "The bots of scenario ... are not installed": lambda _: without_bots(),
    "got an unexpected keyword argument": lambda _: command(
        "info", "simple_spread_v3", "--env", "foo=3"
    ),
    "group_map must be": lambda _: SPREAD(group_map="one"),
    "frames_per_batch must be given": lambda _: collect(),
    "frames_per_batch=... is rounded up": lambda _: collect(
        factory=[CountingEnv] * 2, frames_per_batch=3, total_frames=3
    ),
    "has no argument": lambda _: collect(frames_per_batch=3, total_frame=3),
    "The environments 0 and 1 of one process share": lambda _: collect(
        factory=partial(EnvWrapper, CountingEnv()),
        frames_per_batch=4,
        envs_per_worker=2,
    ),
    "create_env_fn must be": lambda _: collect(
        factory=CountingEnv(), frames_per_batch=3
    ),
    "Worker 0 ... failed in create": lambda _: collect(
        factory=partial(int, "x"), frames_per_batch=3
    ),
    "Worker 0 ... killed by SIGKILL": lambda _: killed(),
    "Environment ... doesn't exist": lambda _: collect(
        factory=lambda: gymnasium.make("Registered-v0"), frames_per_batch=3
    ),
    "made no progress": lambda _: collect(
        factory=lambda: CountingEnv(fault=Fault(stuck, at=2)),
        frames_per_batch=10,
        timeout=2.0,
    ),
    "does not fit the policy": wrong_weights,
    "There is no setting": lambda _: command(
        "compare", "simple_spread_v3", "--set", "lr=3"
    ),
    "has runs already": runs_already,
    "A dataset needs pyarrow": lambda _: without_pyarrow(),
    "holds no dataset, but": other_files,
    "A video needs imageio": lambda _: without(
        "imageio", lambda: write_video("x.mp4", iter([]))
    ),
    "renders no picture": lambda _: next(play(SPREAD)),
}


def test_every_quoted_message_is_provoked() -> None:
    assert sorted(QUOTES) == sorted(PROVOKED)
    assert len(QUOTES) == 23


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_what_the_package_says(quote: str, tmp_path: Path) -> None:
    if "imageio" in quote:
        pytest.importorskip("imageio", reason="needs the extra video")
    if "AutoROM" in quote:
        pytest.importorskip("multi_agent_ale_py", reason="needs the extra atari")
    if "bots" in quote:
        skip_without("meltingpot", "needs the extra meltingpot")
    with pytest.raises(BaseException) as excinfo:  # noqa: PT011, PT012 - text below
        warnings.simplefilter("error", UserWarning)
        PROVOKED[quote](tmp_path)
    texts: list[str] = []
    error: BaseException | None = excinfo.value
    while error is not None:
        texts.append(" ".join(str(error).split()))
        error = error.__cause__
    pattern = ".*?".join(re.escape(fragment) for fragment in quote.split("..."))
    assert re.search(pattern, " ".join(texts)), texts
