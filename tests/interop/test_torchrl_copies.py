"""TorchRLWrapper over an environment on a device: one copy each way per call."""

from typing import Any

import pytest
import torch
from support.far_device import FAR, pinned_for_far

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from marl_collect import Collector
from marl_collect.core.tensordicts import flatten
from marl_collect.interop.torchrl import TorchRLWrapper


class Lights(EnvBase):
    """Two agents, each with two observations, an action mask and an info."""

    def __init__(self, worlds: tuple[int, ...], device: torch.device) -> None:
        super().__init__(device=device, batch_size=worlds)
        agents = (*worlds, 2)
        self.observation_spec = Composite(
            agents=Composite(
                lamp=Unbounded((*agents, 3)),
                picture=Unbounded((*agents, 2, 2), dtype=torch.uint8),
                action_mask=Binary(shape=(*agents, 4), dtype=torch.bool),
                info=Composite(luck=Unbounded(agents), shape=agents),
                shape=agents,
            ),
            state=Unbounded((*worlds, 2), dtype=torch.float64),
            shape=worlds,
        ).to(device)
        choices = Composite(action=Categorical(4, agents), shape=agents)
        self.action_spec = Composite(agents=choices, shape=worlds).to(device)
        reward = Composite(reward=Unbounded((*agents, 1)), shape=agents)
        self.reward_spec = Composite(agents=reward, shape=worlds).to(device)
        flag = Categorical(2, (*worlds, 1), dtype=torch.bool).to(device)
        self.done_spec = Composite(done=flag, shape=worlds, device=device)
        self.number = torch.zeros(agents, dtype=torch.int64, device=device)
        self.steps = torch.zeros((*worlds, 1), dtype=torch.int64, device=device)

    def _set_seed(self, seed: int) -> None:
        self.seed = seed % 1009

    def _look(self, **entries: Any) -> Any:
        number = self.number
        lamp = torch.stack([number, number % 7, number % 3], -1) / 16
        picture = (number[..., None, None] % 200).expand(*number.shape, 2, 2)
        choices = torch.arange(4, device=self.device)
        agents = TensorDict(
            lamp=lamp,
            picture=picture.to(torch.uint8),
            action_mask=(number % 4)[..., None] >= choices,
            info=TensorDict(luck=number / 8, batch_size=number.shape),
            batch_size=number.shape,
        )
        if "reward" in entries:
            agents["reward"] = entries["reward"]
        state = torch.cat([self.steps, number.sum(-1, keepdim=True)], -1).double()
        done = self.steps >= 3 + self.number[..., :1] % 3
        td = TensorDict(agents=agents, state=state, done=done, terminated=done)
        td.batch_size = self.batch_size
        return td.to(self.device)

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        due = torch.ones_like(self.steps, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():
            due = tensordict["_reset"].reshape(self.steps.shape)
        offset = torch.arange(self.number.numel(), device=self.device)
        new = (self.seed + 31 * offset.reshape(self.number.shape)) % 1009
        self.number = torch.where(due, new, self.number)
        self.steps = torch.where(due, 0, self.steps)
        return self._look()

    def _step(self, tensordict: Any) -> Any:
        action = tensordict["agents", "action"]
        self.number = (31 * self.number + action + action.sum(-1, keepdim=True)) % 1009
        self.steps = self.steps + 1
        return self._look(reward=self.number[..., None] / 4)


@pytest.mark.parametrize("worlds", [(), (3,)])
def test_a_call_is_one_pinned_copy_each_way(
    monkeypatch: pytest.MonkeyPatch, worlds: tuple[int, ...]
) -> None:
    keywords: Any = {"frames_per_batch": 24, "seed": 5}
    cpu = torch.device("cpu")
    with Collector(lambda: TorchRLWrapper(Lights(worlds, cpu)), **keywords) as one:
        expected = [one.next().clone() for _ in range(3)]
    calls = 0

    def counted(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(EnvBase, "reset", counted(EnvBase.reset))
    monkeypatch.setattr(Lights, "_step", counted(Lights._step))
    with (
        pinned_for_far(monkeypatch) as far,
        Collector(lambda: TorchRLWrapper(Lights(worlds, FAR)), **keywords) as two,
    ):
        for batch in expected:
            calls = 0
            far.sent.clear()
            far.received.clear()
            actual = flatten(two.next())
            for key, value in flatten(batch).items():
                assert torch.equal(actual[key], value), key
            # TorchRL checks a few flags by itself, without pinned memory.
            assert sum(copy.pinned for copy in far.received) == calls
            assert sum(copy.pinned for copy in far.sent) <= calls
