"""Ranks exchange values, and an error of one of them is an error of all."""

from pathlib import Path

import pytest
from support.ranks import run_ranks

from marl_collect.core.ranks import Ranks

EXCHANGES = """
import pickle

from marl_collect.core.ranks import Ranks

ranks = Ranks.of(None, None)


def tried(act):
    try:
        print(act(), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def fail():
    if rank == 1:
        raise KeyError("no such part")
    return rank


tried(lambda: ranks.gather(rank * 10, "stats()"))
tried(lambda: ranks.gather(rank, "save()" if rank else "stats()"))
tried(lambda: Ranks(0, 2).gather(rank, "stats()"))
tried(lambda: Ranks(1 - rank, 2).gather(rank, "stats()"))
tried(lambda: Ranks().gather(rank, "stats()"))
tried(lambda: Ranks(rank, 3).gather(rank, "stats()"))
tried(lambda: ranks.together(fail, "save()"))
tried(lambda: ranks.together(lambda: rank + 5, "save()"))
"""


@pytest.mark.processes
def test_errors_of_exchanges_reach_all_ranks(tmp_path: Path) -> None:
    lines = [text.splitlines() for text in run_ranks(tmp_path, EXCHANGES, 2)]
    for rank, texts in enumerate(lines):
        assert texts[0] == "[0, 10]"
        assert "different calls, ['stats()', 'save()']" in texts[1]
        assert "were built as ranks [0, 0]" in texts[2]
        assert "were built as ranks [1, 0]" in texts[3]
        assert "needs the values of 1 ranks, but torch.distributed con" in texts[4]
        assert "needs the values of 3 ranks, but torch.distributed con" in texts[5]
        failed = "RuntimeError: save() failed on rank 1. KeyError: 'no such part'"
        assert texts[6] == ("KeyError: 'no such part'" if rank else failed)
        assert texts[7:] == ["[5, 6]"]


ENDS = """
import datetime
import time
from pathlib import Path

import torch

from marl_collect.core import ranks as module
from marl_collect.core.ranks import Ranks

limit = datetime.timedelta(seconds=250)  # Also of a busy machine's connection.
if arguments[0] != "exit":
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/soon", rank=rank, world_size=world_size,
        timeout=limit,
    )
    dist.get_backend_config = lambda group=None: "cuda:nccl"
ranks = Ranks.of(None, None)
ranks.gather(rank, "stats()")
if arguments[0] != "exit":
    backend = module._group[1]._get_backend(torch.device("cpu"))
    assert backend.options._timeout == limit
    backend._set_default_timeout(datetime.timedelta(seconds=1))
if rank == 1:
    while arguments[0] != "exit" and len(list(Path(folder).glob("ended_*"))) < 2:
        time.sleep(0.01)
    os._exit(3)
try:
    ranks.gather(rank, "stats()")
except RuntimeError as error:
    print(error, flush=True)
Path(folder, f"ended_{rank}").touch()
os._exit(0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["exit", "hang with NCCL"])
def test_an_ended_or_hanging_rank_is_an_error(fault: str, tmp_path: Path) -> None:
    first, _, last = run_ranks(tmp_path, ENDS, 3, fault)
    for rank, text in ((0, first), (2, last)):
        assert f"stats(): rank {rank} of 3 got no values of the others." in text
        assert ("Timed out" in text) or fault == "exit", text


WITHOUT_CPU = """
from marl_collect.core.ranks import Ranks

# As if the ranks were connected by NCCL, which reaches GPUs only.
dist.get_backend_config = lambda group=None: "cuda:nccl"
exchanged, groups = dist.all_gather_object, []


def exchange(values, value, group=None):
    groups.append(group)
    exchanged(values, value, group)


dist.all_gather_object = exchange
print(*Ranks(rank, 2).gather(rank, "stats()"), *Ranks(rank, 2).gather(rank, "stats()"))
first, second = groups
print(first is second, first is not None and dist.get_backend(first))
dist.destroy_process_group()
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world_size
)
print(*Ranks(rank, 2).gather(rank, "stats()"), groups[2] is first)
"""


@pytest.mark.processes
def test_values_of_ranks_with_nccl_are_exchanged_on_the_cpu(tmp_path: Path) -> None:
    for text in run_ranks(tmp_path, WITHOUT_CPU, 2):
        assert text.splitlines() == ["0 1 0 1", "True gloo", "0 1 False"]


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"RANK": "1"}, "RANK and WORLD_SIZE are '1' and not set"),
        ({"WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are not set and '2'"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "RANK and WORLD_SIZE are '1' and not set"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "are 'first' and '2'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "numbered from 0 to world_size - 1"),
    ],
)
def test_variables_that_name_no_rank_are_refused(
    variables: dict[str, str], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.of(None, None) == Ranks(0, 1)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=match):
        Ranks.of(None, None)
    assert Ranks.of(0, 1) == Ranks(0, 1)
