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


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an environment for a factory": (
        lambda: run(line()()),
        TypeError,
        r"must be a factory, but is an instance of PettingZooWrapper.*lambda",
    ),
    "a task's name for a factory": (
        lambda: run("simple_spread_v3"),
        TypeError,
        r"is 'simple_spread_v3' of type str.*lambda: PettingZooEnv\('simple_spread_v3'",
    ),
    "policy and environments swapped": (
        lambda: run(network(), line()),
        TypeError,
        "The environment factory is the first argument, the policy the second.",
    ),
    "no wrapper, and no factory": (
        lambda: run(ScriptedEnv()),
        TypeError,
        r"lambda: PettingZooWrapper\(ScriptedEnv\(",
    ),
    "no wrapper": (
        lambda: run(ScriptedEnv),
        TypeError,
        r"PettingZooWrapper\(ScriptedEnv\(",
    ),
    "a class for a policy": (
        lambda: run(line(), MultiAgentMLP),
        TypeError,
        "is the class MultiAgentMLP",
    ),
    "a factory for a policy": (
        lambda: run(line(), network),
        TypeError,
        "takes no arguments.* pass it as policy_factory",
    ),
    "a factory without return": (
        lambda: run(lambda: None),
        TypeError,
        "factory of environment 0 must return an environment, but returned None: add",
    ),
    "a policy factory without return": (
        lambda: run(line(), policy_factory=lambda: None),
        TypeError,
        "policy_factory returned None: return the policy",
    ),
    "too many agents": (
        lambda: run(line(), network(n_agents=5)),
        ValueError,
        "n_agents=5 .* found the shape",
    ),
    "too many features": (
        lambda: run(line(), network(features=9)),
        ValueError,
        "expected 9 features per agent, but found 3",
    ),
    "a key that is not there": (
        lambda: run(line(), network(group="b")),
        KeyError,
        "reads .*b/observation.* provides .*agent/observation",
    ),
    "logits for actions": (
        lambda: run(line(), network()),
        ValueError,
        r"agent/action has shape \[2, 4\] .* expects \[2\], int64. Take the argmax",
    ),
    "fractions for actions": (
        lambda: run(line(), act((2,), 0.7)),
        TypeError,
        "agent/action has dtype float32, but scripted_v0 expects integers",
    ),
    "an action that does not exist": (
        lambda: run(line(), act((2,), 9)),
        ValueError,
        "The action 9 of agent agent_0 in agent/action: expected an integer from 0",
    ),
    "a fraction of a frame": (
        lambda: run(line(), frames_per_batch=20.0),
        TypeError,
        "frames_per_batch must be an integer of at least 1 .*, but is 20.0",
    ),
    "a seed in words": (
        lambda: run(line(), seed="one"),
        TypeError,
        r"seed must be an integer of at least 0 and at most 2\*\*63 - 1 or None",
    ),
    "a postproc that cannot be called": (
        lambda: run(line(), postproc=3),
        TypeError,
        "postproc must be callable or None, but is 3",
    ),
    "exploration of no kind": (
        lambda: run(line(), exploration_type="best"),
        TypeError,
        "exploration_type must be one of InteractionType.MODE.* but is 'best'",
    ),
    "a reset without infos": (
        lambda: run(line("reset")),
        TypeError,
        r"reset\(\) must return \(observations, infos\)",
    ),
    "a reward that is no number": (
        lambda: run(line("reward")),
        ValueError,
        "The reward of agent agent_1 must be a number, but is array.*objective",
    ),
}


def run(*args: Any, **options: Any) -> None:
    with MultiSyncCollector(*args, **({"frames_per_batch": 20} | options)) as collector:
        collector.next()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_to_do(mistake: str) -> None:
    make, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=f"(?s){message}"):
        make()


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
import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv
from marl_collect import MultiSyncCollector
from marl_collect.envs import PettingZooWrapper

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
def box():
    return Box(0, 100, (2,), np.float32)

class Cached(ParallelEnv):
    metadata = {"name": "cached"}
    possible_agents = ["a_0", "a_1"]
    scale = staticmethod(scaled(4))

    @functools.lru_cache(maxsize=None)
    def observation_space(self, agent):
        return box()

    @functools.lru_cache(maxsize=None)
    def action_space(self, agent):
        return Discrete(3)

    @functools.cached_property
    def number(self):
        return fibonacci(10)

    def everybody(self, value):
        return dict.fromkeys(self.possible_agents, value)

    def observations(self):
        pair = np.array([self.number, half(self.scale(self.steps))], np.float32)
        return self.everybody(pair)

    def reset(self, seed=None, options=None):
        self.agents, self.steps = self.possible_agents[:], 0
        return self.observations(), self.everybody({})

    def step(self, actions):
        self.steps += 1
        over = self.steps >= 4
        if over:
            self.agents = []
        flags = self.everybody(False), self.everybody(over)
        return self.observations(), self.everybody(0.0), *flags, self.everybody({})

make = lambda: PettingZooWrapper(Cached())
with MultiSyncCollector(make, frames_per_batch=5, start_method=sys.argv[1]) as it:
    print(it.next()["a", "observation"][0, :, 1].tolist())
assert fibonacci.cache_info().currsize == 0
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_functions_and_properties_of_a_script_may_be_cached(
    start_method: str, tmp_path: Path
) -> None:
    done = run_python(script(CACHED, tmp_path), start_method)
    expected = [[55.0, 2.0 * step] for step in (0, 1, 2, 3, 0)]
    assert done.stdout == f"{expected}\n", done.stderr
