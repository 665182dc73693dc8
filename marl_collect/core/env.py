"""The environment contract: ``MultiAgentEnv`` and the TensorDict methods it inherits.

*For the engine*, an environment writes into memory that it receives once.
``MultiAgentEnv.bind`` passes one array per key of ``description.row()``. From then on
``reset_row`` and ``step_row`` fill these arrays in place, without TensorDicts, torch or
allocation. Contents of the row after each call:

=============  ===========================================  ====================
call           observations, masks, infos, ``done`` flags   ``(g, "reward")``
=============  ===========================================  ====================
``reset_row``  those of the new episode; flags all False    unchanged
``step_row``   those after the step                         of this step
=============  ===========================================  ====================

``step_row`` reads ``(g, "action")``. After a step that sets the root's ``done``, only
``reset_row`` may follow. The arrays may contain anything before the first
``reset_row``. An environment must not read the row back to keep state between steps,
except for the flags of agents that are done (see ``marl_collect.core.flags``).

An agent that is done has a row of zeros from the step after its end. It may return
later in the episode: the step after which it acts again writes its observation, sets
its ``mask`` to True and its flags to False. Call ``Flags.revive`` for that.

*For users*, the same class has ``reset``, ``step``, ``rollout`` and others that work on
TensorDicts; see ``marl_collect.core.tensordict_api``.
"""

import abc
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

from marl_collect.core.batch import EnvBatch, SerialBatch
from marl_collect.core.closing import Closing
from marl_collect.core.description import EnvDescription, Row
from marl_collect.core.torchrl_names import advice_on, missing_attribute
from marl_collect.errors import ClosedError
from marl_collect.options import Option, require

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gymnasium import spaces
    from numpy.typing import NDArray
    from tensordict import TensorDict, TensorDictBase

    from marl_collect.core.tensordict_api import TensorDictAPI


class TensorDictEnv(Closing):
    """The TensorDict methods of a single environment and of a batch of environments."""

    _closed = False

    @property
    @abc.abstractmethod
    def description(self) -> EnvDescription:
        """Groups, spaces and guarantees; plain data that can be pickled."""

    @property
    @abc.abstractmethod
    def batch_size(self) -> tuple[int, ...]:
        """``()`` for one environment, ``(N,)`` for a batch."""

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called, if that sets ``_closed``."""
        return self._closed

    @abc.abstractmethod
    def engine(self) -> EnvBatch:
        """Return the batch that the engine steps."""

    @cached_property
    def _unchecked_api(self) -> "TensorDictAPI":
        from marl_collect.core.tensordict_api import TensorDictAPI

        return TensorDictAPI(self.engine(), self.batch_size)

    @property
    def _tensordict_api(self) -> "TensorDictAPI":
        if self._closed:
            raise ClosedError(f"This {type(self).__name__} is closed: build a new one.")
        return self._unchecked_api

    def __repr__(self) -> str:
        """Return the name, the groups and the batch size, without asking workers."""
        kind = type(self).__name__
        try:
            description, batch = self.description, self.batch_size
            closed = ", closed" if self.is_closed else ""
        except Exception:  # noqa: BLE001 - a repr in a traceback must not fail
            return f"{kind}(not started)"
        groups = ", ".join(f"{g} x {o.n_agents}" for g, o in description.groups.items())
        many = "".join(f"{size} x " for size in batch)
        return f'{kind}({many}"{description.name}": {groups}{closed})'

    @final
    def _repr_html_(self) -> str:
        """Show groups and spaces as a table, in notebooks."""
        return self.description._repr_html_()

    @final
    @property
    def group_map(self) -> dict[str, list[str]]:
        """Group name to agent names, in the order of their rows."""
        return self.description.group_map

    @final
    @property
    def observation_space(self) -> "spaces.Dict":
        """Gymnasium spaces of one environment's observations, nested like the keys."""
        return self.description.observation_space

    @final
    @property
    def action_space(self) -> "spaces.Dict":
        """Gymnasium spaces of one environment's actions, nested like the keys."""
        return self.description.action_space

    @final
    @property
    def batch_dims(self) -> int:
        """Number of batch dimensions: 0 for one environment, 1 for a batch."""
        return len(self.batch_size)

    @final
    @property
    def n_agents(self) -> int:
        """Number of agents of one environment, over all groups."""
        return sum(len(agents) for agents in self.group_map.values())

    @final
    @property
    def action_keys(self) -> list[tuple[str, ...]]:
        """Key of the actions of each group, and of each array of nested actions."""
        return list(self.description.actions())

    @final
    @property
    def action_key(self) -> tuple[str, ...]:
        """Key of the actions, if there is one.

        Raises:
            KeyError: if there are several; ``action_keys`` lists them.
        """
        return _only("action", self.action_keys)

    @final
    @property
    def reward_keys(self) -> list[tuple[str, str]]:
        """Key of each group's rewards under ``next``."""
        return [(group, "reward") for group in self.group_map]

    @final
    @property
    def reward_key(self) -> tuple[str, ...]:
        """Key of the rewards under ``next``, if there is one.

        Raises:
            KeyError: if there are several; ``reward_keys`` lists them.
        """
        return _only("reward", self.reward_keys)

    @final
    @property
    def device(self) -> "torch.device":
        """The CPU, where all environments run."""
        import torch

        return torch.device("cpu")

    @final
    def to(self, device: Any) -> Self:
        """Return this environment if ``device`` is the CPU.

        Raises:
            ValueError: if it is another device; only policies and batches can move.
        """
        import torch

        if torch.device(device).type != "cpu":
            raise ValueError(
                f"{type(self).__name__} runs on the CPU and cannot move to {device}. "
                "In collectors, policy_device and storing_device choose where the "
                "policy acts and where batches are delivered."
            )
        return self

    def _refuse_transforms(self, _: object = None) -> NoReturn:
        raise missing_attribute(
            type(self).__name__, "transform", advice_on("transform")
        )

    # ``TransformedEnv`` of TorchRL sets this attribute first.
    _inplace_update = property(_refuse_transforms, _refuse_transforms)

    if not TYPE_CHECKING:  # It raises: editors shall report a name that is missing.

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the replacement of TorchRL's attribute."""
            if hasattr(type(self), name):
                # A property raised an AttributeError: raise it again, it is the cause.
                return object.__getattribute__(self, name)
            raise missing_attribute(type(self).__name__, name, advice_on(name))

    @final
    def set_seed(self, seed: int, *, static_seed: bool = False) -> int:
        """Derive the seeds of all further episodes from ``seed``.

        Returns:
            The seed to use next; ``seed`` itself if ``static_seed``.
        """
        return self._tensordict_api.set_seed(seed, static_seed=static_seed)

    @final
    def reset(
        self, tensordict: "TensorDictBase | None" = None, *, seed: int | None = None
    ) -> "TensorDict":
        """Begin an episode and return its first observations, ``[*batch_size]``.

        Args:
            tensordict: may contain ``"_reset"``, bool ``[*batch_size, 1]``. Then only
                these environments are reset, and the others keep their episodes.
            seed: passed to ``set_seed`` first.
        """
        if seed is not None:
            self.set_seed(seed)
        return self._tensordict_api.reset(tensordict)

    @final
    def step(self, tensordict: "TensorDictBase") -> "TensorDictBase":
        """Step with the actions in ``tensordict`` and write the result to ``next``.

        If ``"_step"``, bool ``[*batch_size]``, is present, a batch steps only these
        environments.
        """
        return self._tensordict_api.step(tensordict)

    @final
    def step_and_maybe_reset(
        self, tensordict: "TensorDictBase"
    ) -> "tuple[TensorDictBase, TensorDict]":
        """Step, and begin new episodes where one ended.

        Returns:
            ``tensordict`` with its ``next``, and the root of the following frame.
        """
        return self._tensordict_api.step_and_maybe_reset(tensordict)

    @final
    def rand_action(
        self, tensordict: "TensorDictBase | None" = None
    ) -> "TensorDictBase":
        """Write uniformly random legal actions into ``tensordict``."""
        return self._tensordict_api.rand_action(tensordict)

    @final
    def rand_step(self, tensordict: "TensorDictBase | None" = None) -> "TensorDictBase":
        """Step with random legal actions."""
        return self._tensordict_api.step(self._tensordict_api.rand_action(tensordict))

    @final
    def rollout(  # noqa: PLR0913 - TorchRL's keywords
        self,
        max_steps: int,
        policy: "Callable[[TensorDictBase], TensorDictBase] | None" = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        break_when_all_done: bool = False,
        set_truncated: bool = False,
        tensordict: "TensorDictBase | None" = None,
        callback: "Callable[[Any, TensorDictBase], Any] | None" = None,
        return_contiguous: bool = True,
        out: "TensorDictBase | None" = None,
        auto_cast_to_device: bool = False,
        trust_policy: bool | None = None,
    ) -> "TensorDictBase":
        """Collect at most ``max_steps`` frames, ``[*batch_size, T]``.

        Args:
            max_steps: frames per environment.
            policy: TensorDict to TensorDict; random actions if None.
            auto_reset: start with a reset; if False, start from ``tensordict``.
            break_when_any_done: stop at the first ``done`` of any environment; if
                False, a new episode follows each one that ends.
            break_when_all_done: stop once every environment has been done.
            set_truncated: mark the last frame as truncated.
            tensordict: the first root if ``auto_reset`` is False.
            callback: called with this environment and each frame ``[*batch_size]``,
                after the step.
            return_contiguous: False returns a lazy stack of the frames.
            out: TensorDict ``[*batch_size, T]`` to write the frames into.
            auto_cast_to_device: move each frame to the device of the policy's
                parameters, and its actions back.
            trust_policy: in TorchRL, whether the policy does not change its input. Here
                it has no effect, because every call gets a copy.

        Raises:
            TypeError: if ``max_steps`` is no integer.
            ValueError: if it is less than 1, or ``out`` is combined with
                ``return_contiguous=False``.
        """
        del trust_policy
        max_steps = require("max_steps", max_steps, int, Option("", at_least=1))
        if out is not None and not return_contiguous:
            raise ValueError(
                "out receives contiguous frames: leave return_contiguous=False out."
            )
        api = self._tensordict_api
        act = api.acting(policy, moves=auto_cast_to_device)
        root = api.first_root(tensordict, resets=auto_reset)
        frames: list[TensorDictBase] = []
        after = partial(callback, self) if callback is not None else lambda _: None
        for frame, any_done, all_done in api.frames(act, root, after):
            frames.append(frame)
            if (
                (break_when_any_done and any_done)
                or (break_when_all_done and all_done)
                or len(frames) == max_steps
            ):
                break
        return api.stacked(
            frames, out, contiguous=return_contiguous, truncated=set_truncated
        )

    @final
    def step_mdp(self, tensordict: "TensorDictBase") -> "TensorDictBase":
        """Return the root of the frame that follows ``tensordict``.

        It has the entries of ``next`` except rewards, and the other entries of the root
        except actions. Episodes that ended are not reset.
        """
        return self._unchecked_api.step_mdp(tensordict)

    @final
    def fake_tensordict(self) -> "TensorDict":
        """Return zeros with the keys, shapes and dtypes of one frame."""
        return self._unchecked_api.fake_tensordict()


class MultiAgentEnv(TensorDictEnv):
    """Base class of a single environment. Subclasses are final."""

    @abc.abstractmethod
    def bind(self, row: Row) -> None:
        """From now on, read actions from ``row`` and write everything else to it.

        May be called again with other memory; ``reset_row`` then follows.

        Args:
            row: an array for each key of ``description.row()``.
        """

    @abc.abstractmethod
    def reset_row(self, seed: int) -> None:
        """Begin the episode of ``seed``, which is in ``[0, 2**31)``."""

    @abc.abstractmethod
    def step_row(self) -> None:
        """Step with the actions in the row."""

    def set_task(self, task: Any) -> None:
        """Prepare ``task``, from a curriculum, for the episodes that begin from now on.

        It is called before ``reset_row``. An episode must depend only on its task, its
        seed and its actions.

        Raises:
            TypeError: the environment takes no tasks, or not this one.
        """
        raise TypeError(
            f"{self.description.name} takes no tasks: implement set_task(task) in "
            f"{type(self).__name__}, or omit curriculum. This task is {task!r:.100}."
        )

    def render(self) -> "NDArray[np.uint8] | None":
        """Return an image ``[height, width, 3]``, or None if there is none."""
        return None

    def close(self) -> None:
        """Release all resources; may be called twice. Overrides set ``_closed``."""
        self._closed = True

    def audit(self) -> Iterable[str]:
        """Return internal errors that the row does not show, one sentence each.

        Only ``check_env`` calls this, after every reset and step.
        """
        return ()

    @final
    @property
    def batch_size(self) -> tuple[int, ...]:
        """``()`` for a single environment."""
        return ()

    @final
    def engine(self) -> EnvBatch:
        """Return a batch that contains only this environment."""
        return SerialBatch([self])


def _only(what: str, keys: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    if len(keys) != 1:
        raise KeyError(
            f"This environment has {len(keys)} {what} keys, {list(keys)}: use "
            f"{what}_keys."
        )
    return keys[0]


def require_factory(factory: Any, where: str) -> None:
    """Check that ``factory`` is a callable that builds environments.

    Raises:
        TypeError: otherwise. If an environment was passed, the message shows the
            factory to write.
    """
    written = factory_for(factory)
    if written:
        raise TypeError(
            f"{where} must be a factory, but is an instance of "
            f"{type(factory).__name__}. An environment is built in the process that "
            f"steps it, so pass a callable: `{written}`."
        )
    if hasattr(factory, "in_keys") and hasattr(factory, "out_keys"):
        raise TypeError(
            f"{where} must be a callable that builds an environment, but is the "
            f"policy {type(factory).__name__}. The environment factory is the first "
            "argument, the policy the second."
        )
    if not callable(factory):
        hint = ""
        if isinstance(factory, str):
            hint = (
                f" For a task of this name pass `lambda: PettingZooEnv({factory!r})`."
            )
        raise TypeError(
            f"{where} must be a callable that builds an environment, but is "
            f"{factory!r} of type {type(factory).__name__}.{hint}"
        )


def factory_for(thing: Any) -> str:
    """Return the factory to suggest if ``thing`` is an environment, else ``""``."""
    kind = f"{type(thing).__name__}(...)"
    if isinstance(thing, TensorDictEnv):
        return f"lambda: {kind}"
    if isinstance(thing, type) or not (
        hasattr(thing, "reset") and hasattr(thing, "step")
    ):
        return ""
    if hasattr(thing, "rand_step"):
        return f"lambda: TorchRLWrapper({kind})"
    if hasattr(thing, "possible_agents"):
        return f"lambda: PettingZooWrapper({kind})"
    return "lambda: MeltingpotWrapper(env=...)" if hasattr(thing, "observables") else ""
