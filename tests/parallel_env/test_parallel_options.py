"""Options of ParallelEnv are checked before any process starts."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from workloads.counting import CountingEnv

from marl_collect.options import parse
from marl_collect.parallel_env import ParallelEnv, SerialEnv
from marl_collect.parallel_env import options as module
from marl_collect.parallel_env.cpus import effective_cpus
from marl_collect.parallel_env.env_processes import spread_rows
from marl_collect.parallel_env.options import ParallelOptions


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (ValueError, {"groups": 0}, "groups must be an integer of at least 1"),
        (ValueError, {"groups": 5}, "groups=5 is more than the 4 environments"),
        (ValueError, {"num_processes": 5}, "num_processes=5 is more than the 4 env"),
        (ValueError, {"envs_per_process": 0}, "envs_per_process must be an integer"),
        (ValueError, {"envs_per_process": 3, "num_processes": 2}, "make 6 envir"),
        (ValueError, {"timeout": 0}, "timeout must be a positive number of seconds"),
        (ValueError, {"start_timeout": -1.0}, "start_timeout must be a positive"),
        (ValueError, {"num_sub_threads": 0}, "num_sub_threads must be an integer"),
        (ValueError, {"start_method": "fork"}, "is not supported"),
        (TypeError, {"num_processes": True}, "num_processes must be an integer"),
        (TypeError, {"preload": "numpy"}, "preload must be a sequence of strings"),
        (TypeError, {"timeout": "a"}, "timeout must be a positive number of seconds"),
        (TypeError, {"start_timeout": None}, "start_timeout must be a positive number"),
        (TypeError, {"pin_processes": 1}, "pin_processes must be True or False"),
        (TypeError, {"create_env_kwargs": 3}, "create_env_kwargs must be a mapping"),
        (TypeError, {"shared_memory": False}, "share memory in any case"),
        (TypeError, {"use_buffers": False}, "share memory in any case"),
        (TypeError, {"share_individual_td": True}, "have the same keys"),
        (TypeError, {"shutdown_timeout": 3.0}, "waits for 10 seconds"),
        (TypeError, {"num_proceses": 2}, "Did you mean num_processes"),
    ],
)
def test_bad_options_are_refused(error: Any, options: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        ParallelEnv(4, CountingEnv, **options)


MUST: Any = (ValueError, "num_workers must be an integer")
REFUSED: list[tuple[Any, ...]] = [
    (2, CountingEnv(), TypeError, r"`lambda: CountingEnv\(\.\.\.\)`"),
    (2, [CountingEnv, CountingEnv()], TypeError, r"create_env_fn\[1\]"),
    *((0, CountingEnv, *MUST), (-1, CountingEnv, *MUST)),
    *((number, CountingEnv, TypeError, MUST[1]) for number in (2.0, True)),
    (4, [CountingEnv] * 2, ValueError, "has 2 factories, but num_workers"),
    (
        2,
        [CountingEnv, lambda: CountingEnv(n_hunters=4)],
        ValueError,
        "same groups and spaces",
    ),
    (2, lambda: 3, TypeError, "factory of environment 0 must return"),
    (1, lambda: SerialEnv(2, CountingEnv), TypeError, "the batch SerialEnv"),
]


@pytest.mark.parametrize(("number", "factories", "error", "words"), REFUSED)
@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_factories_that_make_no_batch_are_refused(
    kind: Any, number: Any, factories: Any, error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        kind(number, factories)


def test_environments_of_every_process_are_compared() -> None:
    factories = [CountingEnv, CountingEnv, lambda: CountingEnv(n_hunters=4)]
    with pytest.raises(ValueError, match="in the environments of process 2 and"):
        ParallelEnv(3, factories, num_processes=3)


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_a_list_of_kwargs_must_have_one_per_environment(kind: Any) -> None:
    with pytest.raises(ValueError, match="create_env_kwargs has 1 entries"):
        kind(2, CountingEnv, create_env_kwargs=[{}])


def test_the_number_of_processes_follows_from_the_arguments() -> None:
    cpus = effective_cpus()
    assert ParallelOptions(64, CountingEnv).processes == min(64, cpus)
    assert ParallelOptions(1, CountingEnv).processes == 1
    assert ParallelOptions(7, CountingEnv, envs_per_process=3).processes == 3
    assert ParallelOptions(7, CountingEnv, num_processes=5).processes == 5


@pytest.mark.parametrize("rationed", [False, True])
def test_no_process_spins_if_processor_time_is_limited(
    monkeypatch: pytest.MonkeyPatch, rationed: bool
) -> None:
    monkeypatch.setattr(module, "effective_cpus", lambda: 4)
    monkeypatch.setattr(module, "is_rationed", lambda: rationed)
    spin = module.spin_seconds
    assert spin(3) > 0.0
    assert (spin(4) > 0.0) == (spin(64) > 0.0) == (not rationed)


def test_threads_of_this_process_are_set_on_request_only() -> None:
    before = torch.get_num_threads()
    with ParallelEnv(1, CountingEnv):
        assert torch.get_num_threads() == before
    try:
        with pytest.raises(ValueError, match="has 1 factories"):
            ParallelEnv(2, [CountingEnv], num_threads=before + 1)
        assert torch.get_num_threads() == before
        with ParallelEnv(1, CountingEnv, num_threads=before + 1):
            assert torch.get_num_threads() == before + 1
        with ParallelEnv(
            1, CountingEnv, num_threads=before + 2, serial_for_single=True
        ):
            assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="num_threads must be an integer"):
        ParallelEnv(1, CountingEnv, num_threads=0)


def noting_threads() -> CountingEnv:
    """Build an environment that knows the number of torch's threads in its factory."""
    env = CountingEnv()
    vars(env)["threads"] = torch.get_num_threads()
    return env


@pytest.mark.parametrize("options", [{}, {"num_threads": 1}])
def test_factories_have_the_threads_of_the_worker(options: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    try:
        with ParallelEnv(
            1, noting_threads, num_sub_threads=3, preload=["torch"], **options
        ) as env:
            assert env.threads == [3]
    finally:
        torch.set_num_threads(before)


def test_torchrls_keywords_mean_the_same_here() -> None:
    start: Any = ParallelEnv
    plain = {"num_workers": 2, "create_env_fn": CountingEnv}
    theirs = plain | {"mp_start_method": "spawn", "use_buffers": True, "daemon": False}
    ours = plain | {"start_method": "spawn"}
    parsed = [parse(ParallelOptions, "", (), names) for names in (theirs, ours)]
    assert parsed[0] == parsed[1]
    with pytest.raises(ValueError, match="start_method must be .* 'fork'"):
        start(2, CountingEnv, mp_start_method="fork")
    with pytest.raises(TypeError, match="start_method and its other name mp_start"):
        start(2, CountingEnv, mp_start_method="spawn", start_method="spawn")


@pytest.mark.parametrize(("number", "kind"), [(1, SerialEnv), (2, ParallelEnv)])
def test_a_single_environment_may_stay_in_this_process(number: int, kind: Any) -> None:
    start: Any = ParallelEnv
    with start(number, CountingEnv, serial_for_single=True) as env:
        assert type(env) is kind
        assert env.rollout(3).shape == (number, 3)
    with pytest.raises(TypeError, match="serial_for_single must be True or False"):
        start(1, CountingEnv, serial_for_single=1)
    with pytest.raises(ValueError, match="groups=2 is more than the 1 environments"):
        start(1, CountingEnv, serial_for_single=True, groups=2)


@given(
    environments=st.integers(1, 40),
    processes=st.integers(1, 12),
    groups=st.integers(1, 4),
)
def test_environments_are_spread_evenly(
    environments: int, processes: int, groups: int
) -> None:
    processes, groups = min(processes, environments), min(groups, environments)
    rows = spread_rows(environments, processes, groups)
    assert [len(group) for group in rows] == [processes] * groups
    for group in rows:
        assert max(map(len, group)) - min(map(len, group)) <= 1
    indices = [k for group in rows for part in group for k in part]
    assert indices == list(range(environments))
    sizes = [sum(map(len, group)) for group in rows]
    assert max(sizes) - min(sizes) <= 1
    loads = [sum(len(group[p]) for group in rows) for p in range(processes)]
    assert max(loads) - min(loads) <= 1
    assert min(loads) >= 1
