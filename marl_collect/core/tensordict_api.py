"""The TensorDict methods of environments: ``reset``, ``step``, ``rollout`` and others.

They step the same ``EnvBatch`` as the engine, on memory of their own. They return
copies, so a returned TensorDict never changes later.
"""

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.utils import expand_as_right

from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import Key
from marl_collect.core.gradients import recording_writes, without_gradients
from marl_collect.core.random_actions import RandomPolicy
from marl_collect.core.seeding import checked_seed, draw_seed, episode_seeds, next_seed
from marl_collect.core.tensordicts import assemble

Policy = Callable[[TensorDictBase], TensorDictBase]


@final
class TensorDictAPI:
    """TensorDict methods over a batch of environments."""

    def __init__(self, engine: EnvBatch, batch_size: tuple[int, ...]) -> None:
        """Step ``engine``; a ``batch_size`` of ``()`` drops the batch dimension."""
        description = engine.description
        self._engine = engine
        self._batch = batch_size
        self._description = description
        self._n_agents = description.group_sizes
        self._memory = engine.allocate()
        with recording_writes():
            self._tensors = {
                key: torch.from_numpy(array).reshape((*batch_size, *array.shape[1:]))
                for key, array in self._memory.items()
            }
        self._seed = draw_seed(description.pinned_seed)
        self._episodes = [0] * engine.size
        self._started = [False] * engine.size
        engine.bind(self._memory)

    def set_seed(self, seed: int, *, static_seed: bool) -> int:
        """Derive the seeds of all further episodes from ``seed``."""
        self._seed = checked_seed(seed)
        self._episodes = [0] * self._engine.size
        return seed if static_seed else next_seed(seed)

    def reset(self, tensordict: TensorDictBase | None) -> TensorDict:
        """Begin episodes in all environments, or in those of ``"_reset"``."""
        indices = list(range(self._engine.size))
        if tensordict is not None:
            _require_tensordict("reset", tensordict)
        if tensordict is not None and "_reset" in tensordict.keys():
            chosen = tensordict.get("_reset").reshape(-1).tolist()
            indices = [k for k in indices if chosen[k] or not self._started[k]]
        self._reset(indices)
        return self._root()

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step and write ``next``."""
        _require_tensordict("step", tensordict)
        indices = None
        if self._batch and "_step" in tensordict.keys():
            indices = tensordict.get("_step").reshape(-1).nonzero().flatten().tolist()
        self._check_running(indices)
        for key in self._description.actions():
            self._tensors[key].copy_(self._action(tensordict, key))
        if indices is not None:
            for key in self._description.outcome():
                self._memory[key].fill(0)
        if indices is None:
            self._engine.step()
        else:
            self._engine.step_some(indices)
        keys = [*self._description.observed(), *self._description.outcome()]
        following: TensorDictBase = self._copy(keys)
        if "next" in tensordict.keys():
            # The policy may have written to the next frame, such as its hidden state.
            following = tensordict.get("next").update(following)
        tensordict.set("next", following)
        return tensordict

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDict]:
        """Step, and begin new episodes where one ended."""
        self.step(tensordict)
        return tensordict, self._following_root(tensordict)

    def rand_action(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        """Write random legal actions."""
        if tensordict is None:
            self._check_running(None)
            tensordict = self._root()
        _require_tensordict("rand_action", tensordict)
        return RandomPolicy(self._description)(tensordict)

    def acting(self, policy: Policy | None, *, moves: bool) -> Policy:
        """Return ``policy``, or random actions.

        Args:
            policy: the user's; None for random actions.
            moves: call it on the device of its parameters.
        """
        if policy is None:
            return RandomPolicy(self._description)
        return _on_its_device(policy) if moves else policy

    def first_root(
        self, tensordict: TensorDictBase | None, *, resets: bool
    ) -> TensorDictBase:
        """Return the root of a rollout's first frame, after a reset if ``resets``."""
        if resets:
            return self.reset(tensordict)
        if tensordict is None:
            return self._root()
        # The result of a step has rewards; a root has none.
        rewards = [(group, "reward") for group in self._description.groups]
        return tensordict.exclude("next", *rewards)

    def frames(
        self,
        act: Policy,
        root: TensorDictBase,
        callback: Callable[[TensorDictBase], object],
    ) -> Iterator[tuple[TensorDictBase, bool, bool]]:
        """Step for ever, and call ``callback`` with each frame.

        Yields:
            A frame; whether an environment is done in it; whether every environment has
            been done.
        """
        finished = torch.zeros((*self._batch, 1), dtype=torch.bool, device="cpu")
        while True:
            with without_gradients():
                frame = self.step(act(root))
                callback(frame)
            done = frame.get(("next", "done"))
            finished |= done
            yield frame, bool(done.any()), bool(finished.all())
            with without_gradients():
                root = self._following_root(frame)

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the root of the frame after ``tensordict``, without its actions."""
        _require_tensordict("step_mdp", tensordict)
        if "next" not in tensordict.keys():
            raise KeyError(
                "step_mdp() takes what step() returned, but there is no next, only "
                f"{sorted(map(str, tensordict.keys()))}."
            )
        actions = self._description.actions()
        root = tensordict.exclude("next", *actions)
        return root.update(tensordict.get("next").exclude(*self._description.outcome()))

    def fake_tensordict(self) -> TensorDict:
        """Return zeros with the keys of one frame."""
        d = self._description
        tensors = {key: self._zeros(key) for key in [*d.observed(), *d.actions()]}
        following = [*d.observed(), *d.outcome()]
        tensors |= {("next", *key): self._zeros(key) for key in following}
        return assemble(tensors, self._batch, self._n_agents)

    def _reset(self, indices: list[int]) -> None:
        numbers = np.array([self._episodes[k] for k in indices])
        seeds = episode_seeds(self._seed, np.array(indices), numbers).tolist()
        self._engine.reset(indices, seeds)
        for k in indices:
            self._episodes[k] += 1
            self._started[k] = True

    def _root(self) -> TensorDict:
        return self._copy(list(self._description.observed()))

    def _copy(self, keys: list[Key]) -> TensorDict:
        tensors = {key: self._tensors[key].clone() for key in keys}
        return assemble(tensors, self._batch, self._n_agents)

    def _zeros(self, key: Key) -> torch.Tensor:
        return torch.zeros_like(self._tensors[key])

    def _following_root(self, frame: TensorDictBase) -> TensorDict:
        """Return the root after ``frame``, with the values that the policy carries."""
        # A copy, because resets clear the flags in the memory.
        done = self._memory["done",].reshape(-1).astype(np.bool_)
        if done.any():
            self._reset(np.flatnonzero(done).tolist())
        root = self._root()
        known = {*self._description.row(), ("next",)}
        carried = frame.get("next").exclude(*known) if "next" in frame.keys() else None
        if carried is not None and not carried.is_empty():
            keep = torch.from_numpy(~done).reshape(self._batch)
            carried = carried.apply(lambda x: x * expand_as_right(keep, x))
            root.update(carried)
        return root

    def _set_truncated(self, frame: TensorDictBase) -> None:
        for key in [(), *((name,) for name in self._n_agents)]:
            at = ("next", *key)
            done, truncated = frame.get((*at, "done")), frame.get((*at, "truncated"))
            truncated |= ~done
            done.fill_(True)

    def stacked(
        self,
        frames: list[TensorDictBase],
        out: TensorDictBase | None,
        *,
        contiguous: bool,
        truncated: bool,
    ) -> TensorDictBase:
        """Return frames as ``[*batch_size, T]``; see ``TensorDictEnv.rollout``."""
        if truncated:
            self._set_truncated(frames[-1])
        dim = len(self._batch)
        if contiguous:
            stacked: TensorDictBase = torch.stack(frames, dim)
        else:
            stacked = TensorDict.lazy_stack(frames, dim)
        if out is not None:
            stacked = out.update_(stacked)
        stacked.names = [*([None] * dim), "time"]
        return stacked

    def _check_running(self, indices: list[int] | None) -> None:
        done = self._memory["done",].reshape(-1)
        for k in range(self._engine.size) if indices is None else indices:
            if not self._started[k]:
                raise RuntimeError(
                    f"Environment {k} was not reset: call reset() first."
                )
            if done[k]:
                raise RuntimeError(
                    f"The episode of environment {k} is over: call reset(), or use "
                    "step_and_maybe_reset(), which resets automatically."
                )

    def _action(self, tensordict: TensorDictBase, key: Key) -> torch.Tensor:
        """Return an action, after checking its shape and that nothing is cut off."""
        memory = self._tensors[key]
        action = tensordict.get(key, None)
        where = "/".join(key)
        if action is None:
            raise KeyError(
                f"Environment {self._description.name} expects the action {where}, "
                f"{list(memory.shape)}, but found only the keys "
                f"{sorted(map(str, tensordict.keys(True, True)))}."
            )
        if action.shape != memory.shape:
            raise ValueError(
                f"{where} of environment {self._description.name}: expected shape "
                f"{list(memory.shape)}, but found {list(action.shape)}."
            )
        one_hot = self._description.groups[key[0]].one_hot
        if action.is_floating_point() > memory.is_floating_point() and not one_hot:
            raise TypeError(
                f"{where} of environment {self._description.name} has dtype "
                f"{action.dtype}: expected integers, {memory.dtype}. Take the argmax, "
                "or sample from a distribution."
            )
        return action


def _require_tensordict(method: str, value: Any) -> None:
    if not is_tensor_collection(value):
        raise TypeError(
            f"{method}() takes a TensorDict, as reset() and rand_action() return it, "
            f"but got {value!r:.100}."
        )


def _on_its_device(policy: Policy) -> Policy:
    """Return a call of a policy on the device of its parameters."""
    parameters: Any = getattr(policy, "parameters", tuple)()
    device = next((p.device for p in parameters), torch.device("cpu"))
    return lambda tensordict: policy(tensordict.to(device)).to("cpu")
