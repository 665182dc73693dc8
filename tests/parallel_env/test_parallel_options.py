"""Options of ParallelEnv are checked before any process starts."""

from typing import Any

import numpy as np
import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect.parallel_env import ParallelEnv, SerialEnv
from marl_collect.parallel_env import options as module
from marl_collect.parallel_env.cpus import effective_cpus
from marl_collect.parallel_env.options import ParallelOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 0}, "groups must be an integer of at least 1"),
        ({"groups": 5}, "groups=5 is more than the 4 environments"),
        ({"num_processes": 5}, "num_processes=5 is more than the 4 environments"),
        ({"envs_per_process": 0}, "envs_per_process must be an integer"),
        ({"envs_per_process": 3, "num_processes": 2}, "make 6 environments"),
        ({"timeout": 0}, "timeout must be a positive number of seconds"),
        ({"start_timeout": -1.0}, "start_timeout must be a positive"),
        ({"num_sub_threads": 0}, "num_sub_threads must be an integer"),
        ({"start_method": "fork"}, "is not supported"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallelEnv(4, CountingEnv, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_processes": True}, "num_processes must be an integer"),
        ({"preload": "numpy"}, "preload must be a sequence of strings"),
        ({"timeout": "a"}, "timeout must be a positive number of seconds"),
        ({"start_timeout": None}, "start_timeout must be a positive number"),
        ({"pin_processes": 1}, "pin_processes must be True or False"),
        ({"create_env_kwargs": 3}, "create_env_kwargs must be a mapping"),
        ({"shared_memory": False}, "share memory in any case"),
        ({"use_buffers": False}, "share memory in any case"),
        ({"share_individual_td": True}, "have the same keys"),
        ({"shutdown_timeout": 3.0}, "waits for 10 seconds"),
        ({"num_proceses": 2}, "Did you mean num_processes"),
    ],
)
def test_wrong_types_and_names_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        ParallelEnv(4, CountingEnv, **options)


def test_integers_of_numpy_are_accepted() -> None:
    n_envs: Any = np.int64(2)
    n_processes: Any = np.int64(1)
    with ParallelEnv(n_envs, CountingEnv, num_processes=n_processes) as env:
        assert env.batch_size == (2,)


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
class TestFactories:
    def test_an_instance_is_refused_with_the_factory_to_write(self, kind: Any) -> None:
        with pytest.raises(TypeError, match=r"`lambda: CountingEnv\(\.\.\.\)`"):
            kind(2, CountingEnv())

    def test_an_instance_in_a_list_is_refused_by_its_place(self, kind: Any) -> None:
        with pytest.raises(TypeError, match=r"create_env_fn\[1\]"):
            kind(2, [CountingEnv, CountingEnv()])

    @pytest.mark.parametrize("number", [0, -1, 2.0, True])
    def test_the_number_of_environments_must_be_positive(
        self, kind: Any, number: Any
    ) -> None:
        error = ValueError if type(number) is int else TypeError
        with pytest.raises(error, match="num_workers must be an integer"):
            kind(number, CountingEnv)

    def test_a_list_must_have_one_factory_per_environment(self, kind: Any) -> None:
        with pytest.raises(ValueError, match="has 2 factories, but num_workers"):
            kind(4, [CountingEnv] * 2)

    def test_a_list_of_kwargs_must_have_one_per_environment(self, kind: Any) -> None:
        with pytest.raises(ValueError, match="create_env_kwargs has 1 entries"):
            kind(2, CountingEnv, create_env_kwargs=[{}])

    def test_environments_must_be_alike(self, kind: Any) -> None:
        factories = [CountingEnv, lambda: CountingEnv(n_hunters=4)]
        with pytest.raises(ValueError, match="same groups and spaces"):
            kind(2, factories)

    def test_a_factory_must_return_an_environment(self, kind: Any) -> None:
        with pytest.raises(TypeError, match=r"factory of environment 0 must return"):
            kind(2, lambda: 3)

    def test_a_factory_must_not_return_a_batch(self, kind: Any) -> None:
        with pytest.raises(TypeError, match="the batch SerialEnv"):
            kind(1, lambda: SerialEnv(2, CountingEnv))


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
    with start(
        2, CountingEnv, mp_start_method="spawn", use_buffers=True, daemon=False
    ) as env:
        assert env.rollout(3).shape == (2, 3)
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
