"""What researchers write, as they write it: scripts without a main guard."""

import os
import re
import signal
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.processes import SOON, wait_until
from support.scripts import run_python
from tensordict.nn import TensorDictModule

pytest.importorskip("pettingzoo")
from support.zoo import Script, ScriptedEnv

from marl_collect import Collector, MultiSyncCollector
from marl_collect.collectors import collector as collector_module
from marl_collect.envs import PettingZooWrapper
from marl_collect.errors import ClosedError
from marl_collect.models import MultiAgentMLP

pytestmark = pytest.mark.processes


def scripted(bug: str = "") -> ScriptedEnv:
    """Return an environment of two agents, with a mistake."""
    env = ScriptedEnv(Script(n_agents=2, action=spaces.Discrete(4)))
    step = env.step

    def step_with_array(actions: dict[str, Any]) -> Any:
        observations, rewards, *others = step(actions)
        return observations, rewards | {"agent_1": np.ones(2)}, *others

    if bug == "reset":
        vars(env)["reset"] = lambda **_: {}
    if bug == "reward":
        vars(env)["step"] = step_with_array
    return env


def line(bug: str = "") -> Callable[[], PettingZooWrapper]:
    return lambda: PettingZooWrapper(scripted(bug))


def network(
    *, features: int = 3, n_agents: int = 2, group: str = "agent"
) -> TensorDictModule:
    return TensorDictModule(
        MultiAgentMLP(features, 4, n_agents, centralised=False, share_params=True),
        in_keys=[(group, "observation")],
        out_keys=[("agent", "action")],
    )


def act(shape: tuple[int, ...], value: float) -> Callable[[Any], Any]:
    return lambda td: td.set(("agent", "action"), torch.full((len(td), *shape), value))


WRONG_TYPES: dict[str, dict[str, Any]] = {
    "must be a factory, but is an instance of PettingZooWrapper.*lambda": {
        "create_env_fn": line()()
    },
    r"is 'simple_spread_v3' of type str.*lambda: PettingZooEnv\('simple_spread_v3'": {
        "create_env_fn": "simple_spread_v3"
    },
    "The environment factory is the first argument, the policy the second.": {
        "create_env_fn": network(),
        "policy": line(),
    },
    r"lambda: PettingZooWrapper\(ScriptedEnv\(": {"create_env_fn": ScriptedEnv()},
    r"PettingZooWrapper\(ScriptedEnv\(": {"create_env_fn": ScriptedEnv},
    "is the class MultiAgentMLP": {"policy": MultiAgentMLP},
    "takes no arguments.* pass it as policy_factory": {"policy": network},
    "factory of environment 0 must return an environment, but returned None: add": {
        "create_env_fn": lambda: None
    },
    "policy_factory returned None: return the policy": {"policy_factory": lambda: None},
    "agent/action has dtype float32, but scripted_v0 expects integers": {
        "policy": act((2,), 0.7)
    },
    "frames_per_batch must be an integer of at least 1 .*, but is 20.0": {
        "frames_per_batch": 20.0
    },
    r"seed must be an integer of at least 0 and at most 2\*\*63 - 1 or None": {
        "seed": "one"
    },
    "postproc must be callable or None, but is 3": {"postproc": 3},
    "exploration_type must be one of InteractionType.MODE.* but is 'best'": {
        "exploration_type": "best"
    },
    r"reset\(\) must return \(observations, infos\)": {"create_env_fn": line("reset")},
}
WRONG_VALUES: dict[str, dict[str, Any]] = {
    "n_agents=5 .* found the shape": {"policy": network(n_agents=5)},
    "expected 9 features per agent, but found 3": {"policy": network(features=9)},
    "reads .*b/observation.* provides .*agent/observation": {
        "policy": network(group="b")
    },
    r"agent/action has shape \[2, 4\] .* expects \[2\], int64. Take the argmax": {
        "policy": network()
    },
    "The action 9 of agent agent_0 in agent/action: expected an integer from 0": {
        "policy": act((2,), 9)
    },
    "The reward of agent agent_1 must be a number, but is array.*objective": {
        "create_env_fn": line("reward")
    },
}


@pytest.mark.parametrize("message", [*WRONG_TYPES, *WRONG_VALUES])
def test_a_mistake_is_an_error_that_says_what_to_do(message: str) -> None:
    kinds = TypeError if message in WRONG_TYPES else (ValueError, KeyError)
    mistake = (WRONG_TYPES | WRONG_VALUES)[message]
    options: Any = {"create_env_fn": line(), "frames_per_batch": 20} | mistake
    with (
        pytest.raises(kinds, match=f"(?s){message}"),
        MultiSyncCollector(**options) as collector,
    ):
        collector.next()


def test_loading_something_else_than_a_collectors_state_says_so() -> None:
    with Collector(line(), network_that_acts(), frames_per_batch=20) as collector:
        with pytest.raises(
            KeyError, match=r"'workers'.* are missing; found \['weight'"
        ):
            collector.load_state_dict({"weight": torch.zeros(1)})
        with pytest.raises(
            TypeError, match=r"the state_dict\(\) of a .*, but got None"
        ):
            collector.load_state_dict(None)  # type: ignore[arg-type]


def network_that_acts() -> Any:
    return act((2,), 1)


def script(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorials" / "own_environment.md"


def test_own_environment_and_collection_run_from_stdin() -> None:
    """Its classes are those of ``__main__``, which workers do not run."""
    blocks = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.M | re.S)
    process = run_python("-", input="\n".join(blocks))
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("torch.Size([2, 50, 2, 2])") == 2


NEVER_CLOSED = """
    from marl_collect import Collector
    from workloads.counting import CountingEnv

    def say(text):
        print(text)

    class Says(CountingEnv):
        def close(self):
            if not self._closed:
                say("closed")
            super().close()

    collector = Collector(Says, frames_per_batch=10)
    print(collector.next().numel())
"""


def test_a_collector_that_is_never_closed_closes_its_environments(
    tmp_path: Path,
) -> None:
    """At exit, before the modules lose the names that ``close`` uses."""
    process = run_python(script(NEVER_CLOSED, tmp_path))
    assert (process.stdout.split(), process.stderr) == (["10", "closed"], "")


def closing(folder: Path) -> PettingZooWrapper:
    """Return a slow environment that notes its steps and its end."""
    env = scripted()
    step = env.step

    def slow_step(actions: dict[str, Any]) -> Any:
        (folder / f"steps-{os.getpid()}").touch()
        threading.Event().wait(0.05)  # A slow environment.
        return step(actions)

    def close() -> None:
        (folder / f"closed-{os.getpid()}").touch()

    vars(env)["step"] = slow_step
    vars(env)["close"] = close
    return PettingZooWrapper(env)


def test_workers_amid_a_long_batch_close_their_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a worker that gets no processor time for two seconds is killed.
    monkeypatch.setattr(collector_module, "ERROR_CLOSE_SECONDS", SOON)
    collector = MultiSyncCollector(
        [lambda: closing(tmp_path)] * 2, frames_per_batch=4000
    )

    def press_ctrl_c() -> None:
        wait_until(lambda: len(list(tmp_path.glob("steps-*"))) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        threading.Thread(target=press_ctrl_c).start()
        collector.next()
    pids = {f"closed-{pid}" for pid in collector.worker_pids}
    assert len(pids) == 2
    collector.shutdown()
    assert {path.name for path in tmp_path.glob("closed-*")} == pids


@pytest.mark.parametrize("way", ["shutdown", "async_shutdown"])
def test_a_batch_during_which_another_thread_shuts_down_is_not_delivered(
    way: str, tmp_path: Path
) -> None:
    collector = MultiSyncCollector(lambda: closing(tmp_path), frames_per_batch=4000)

    def shut_down() -> None:
        wait_until(lambda: any(tmp_path.glob("steps-*")))
        getattr(collector, way)()

    thread = threading.Thread(target=shut_down)
    thread.start()
    with pytest.raises(ClosedError, match="was shut down"):
        collector.next()
    thread.join()
    assert collector.frames == 0


CACHED = """
    import functools
    import operator
    import sys
    from marl_collect import MultiSyncCollector
    from workloads.counting import CountingEnv

    @functools.cache
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    def scaled(factor):
        @functools.lru_cache(maxsize=3, typed=True)
        def scale(n):
            return factor * n
        return scale

    half = functools.cache(functools.partial(operator.mul, 0.5))

    @functools.lru_cache
    def one():
        return 1

    class Cached(CountingEnv):
        scale = staticmethod(scaled(4))

        @functools.lru_cache(maxsize=None)
        def one_more(self, n):
            return n + one()

        @functools.cached_property
        def number(self):
            return fibonacci(10)

        def numbers(self):
            return self.number, half(self.scale(3)), self.one_more(3)

    with MultiSyncCollector(Cached, frames_per_batch=5, start_method=sys.argv[1]) as it:
        print(it.next().numel(), it.call_env("numbers"))
    assert fibonacci.cache_info().currsize == 0
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_functions_and_properties_of_a_script_may_be_cached(
    start_method: str, tmp_path: Path
) -> None:
    done = run_python(script(CACHED, tmp_path), start_method)
    assert done.stdout == "5 [(55, 6.0, 4)]\n", done.stderr
