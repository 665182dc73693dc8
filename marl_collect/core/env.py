"""The environment contract: what the engine drives, and what people call.

*For the engine* an environment writes into memory that it is given once:
``MultiAgentEnv.bind`` hands it one array per key of
``description.row()``, and from then on ``reset_row`` and ``step_row`` fill these
in place: no TensorDict, no torch, no allocation. What stands in the row after
each call:

=============  ===========================================  ====================
call           observations, masks, infos, ``done`` flags   ``(g, "reward")``
=============  ===========================================  ====================
``reset_row``  those of the new episode; flags all False    left as it was
``step_row``   those after the step                         of this step
=============  ===========================================  ====================

``step_row`` reads ``(g, "action")``. After a step that sets the root's ``done``
only ``reset_row`` may follow. Arrays may hold anything before the first
``reset_row``; nothing is kept between steps by reading the row back, except the
flags of agents that are done (see ``marl_collect.core.flags``).

An agent that is done has a row of zeros from the step after its end. It may come back
later in the episode: the step after which it acts again writes its observation, sets
its ``mask`` to True and its flags to False. Call ``Flags.revive`` for that.

*For people* the same class has ``reset``, ``step``, ``rollout`` and the rest, on
TensorDicts; see ``marl_collect.core.tensordict_api``.
"""

import abc
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from marl_collect.core.batch import EnvBatch, SerialBatch
from marl_collect.core.description import EnvDescription, Row

if TYPE_CHECKING:
    import numpy as np
    from gymnasium import spaces
    from numpy.typing import NDArray
    from tensordict import TensorDict, TensorDictBase

    from marl_collect.core.tensordict_api import TensorDictAPI

__all__ = [
    "EnvBatch",
    "EnvFactory",
    "MultiAgentEnv",
    "SerialBatch",
    "TensorDictEnv",
    "require_factory",
]

EnvFactory = Callable[[], "MultiAgentEnv"]
"""Zero-argument callable that builds an environment in the process that steps it."""


class TensorDictEnv(abc.ABC):
    """The face for people, the same for one environment and for a batch of them."""

    @property
    @abc.abstractmethod
    def description(self) -> EnvDescription:
        """Groups, spaces and promises; plain data that pickles."""

    @property
    @abc.abstractmethod
    def batch_size(self) -> tuple[int, ...]:
        """``()`` for one environment, ``(N,)`` for a batch."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back; may be called twice."""

    @property
    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""

    @abc.abstractmethod
    def engine(self) -> EnvBatch:
        """Return what the engine drives."""

    @cached_property
    def _tensordict_api(self) -> "TensorDictAPI":
        from marl_collect.core.tensordict_api import TensorDictAPI

        return TensorDictAPI(self.engine(), self.batch_size)

    def __repr__(self) -> str:
        """Return the name, the groups and the batch size; workers are not asked."""
        kind = type(self).__name__
        try:
            description, batch = self.description, self.batch_size
            closed = ", closed" if self.is_closed else ""
        except Exception:  # noqa: BLE001 - a repr in a traceback must not fail, too
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
    def set_seed(self, seed: int, *, static_seed: bool = False) -> int:
        """Derive all episodes that begin from now on from ``seed``.

        Returns:
            A seed to go on with; ``seed`` itself if ``static_seed``.
        """
        return self._tensordict_api.set_seed(seed, static_seed=static_seed)

    @final
    def reset(self, tensordict: "TensorDictBase | None" = None) -> "TensorDict":
        """Begin an episode and return its first observations, ``[*batch_size]``.

        Args:
            tensordict: may hold ``"_reset"``, bool ``[*batch_size, 1]``: only these
                environments begin anew; for the others its entries are kept.
        """
        return self._tensordict_api.reset(tensordict)

    @final
    def step(self, tensordict: "TensorDictBase") -> "TensorDictBase":
        """Act with the actions in ``tensordict`` and write the result as its ``next``.

        A batch steps only the environments of ``"_step"``, bool ``[*batch_size]``,
        if that entry is there.
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
        """Write uniformly drawn legal actions into ``tensordict``."""
        return self._tensordict_api.rand_action(tensordict)

    @final
    def rand_step(self, tensordict: "TensorDictBase | None" = None) -> "TensorDictBase":
        """Act at random."""
        return self._tensordict_api.step(self._tensordict_api.rand_action(tensordict))

    @final
    def rollout(
        self,
        max_steps: int,
        policy: "Callable[[TensorDictBase], TensorDictBase] | None" = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        break_when_all_done: bool = False,
        set_truncated: bool = False,
        tensordict: "TensorDictBase | None" = None,
    ) -> "TensorDict":
        """Collect at most ``max_steps`` frames, ``[*batch_size, T]``.

        Args:
            max_steps: frames per environment.
            policy: TensorDict to TensorDict; random actions if None.
            auto_reset: begin with a reset; else with ``tensordict``.
            break_when_any_done: stop at the first ``done`` of any environment;
                otherwise episodes that end are followed by new ones.
            break_when_all_done: stop when every environment has been done.
            set_truncated: flag the last frame as truncated.
            tensordict: first root, when ``auto_reset`` is False.
        """
        return self._tensordict_api.rollout(
            max_steps,
            policy,
            auto_reset=auto_reset,
            break_when_any_done=break_when_any_done,
            break_when_all_done=break_when_all_done,
            set_truncated=set_truncated,
            tensordict=tensordict,
        )

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` needs to go on exactly from here.

        Plain data and tensors: seeds, episode numbers, and the actions that were
        taken in the running episodes.
        """
        return self._tensordict_api.state_dict()

    @final
    def load_state_dict(self, state: "Mapping[str, Any]") -> None:
        """Go on from ``state_dict``: running episodes are replayed.

        ``rollout(..., auto_reset=False)`` goes on with them. Environments that do
        not repeat begin new episodes, with a warning, and so do those whose episode
        has more actions than are kept (64 MB), or which, replayed, arrive at other
        observations than those recorded.

        Raises:
            ValueError: if the state is of another number of environments.
        """
        self._tensordict_api.load_state_dict(state)

    @final
    def fake_tensordict(self) -> "TensorDict":
        """Return zeros with the keys, shapes and dtypes of one frame."""
        return self._tensordict_api.fake_tensordict()

    @final
    def __enter__(self) -> Self:
        """Return this environment; leaving the block closes it."""
        return self

    @final
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


class MultiAgentEnv(TensorDictEnv):
    """One environment. Subclasses implement the engine's face and are final."""

    @abc.abstractmethod
    def bind(self, row: Row) -> None:
        """Read actions from and write everything else to ``row`` from now on.

        May be called again with other memory; the next call is then ``reset_row``.

        Args:
            row: an array for each key of ``description.row()``.
        """

    @abc.abstractmethod
    def reset_row(self, seed: int) -> None:
        """Begin an episode that ``seed``, in ``[0, 2**31)``, and actions determine."""

    @abc.abstractmethod
    def step_row(self) -> None:
        """Step with the row's actions."""

    @abc.abstractmethod
    def render(self) -> "NDArray[np.uint8] | None":
        """Return an image ``[height, width, 3]``, or None where there is none."""

    def audit(self) -> Iterable[str]:
        """Return what is wrong underneath that the row does not show, a sentence each.

        ``check_env`` asks after every call; nobody else does.
        """
        return ()

    def __getattr__(self, name: str) -> Any:
        """Explain TorchRL's specs to whoever looks for them."""
        if name.endswith("_spec"):
            raise AttributeError(
                f"{type(self).__name__} has no {name}: it has observation_space and "
                "action_space, Gymnasium spaces nested like the keys. See "
                "docs/coming_from_torchrl.md."
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    @final
    @property
    def batch_size(self) -> tuple[int, ...]:
        """``()``: this is one environment."""
        return ()

    @final
    def engine(self) -> EnvBatch:
        """Return a batch of this environment alone."""
        return SerialBatch([self])


def require_factory(factory: Any, where: str) -> None:
    """Check that ``factory`` is a callable that builds environments.

    Raises:
        TypeError: showing the factory to write, if an environment was given.
    """
    written = _factory_of(factory)
    if written:
        raise TypeError(
            f"{where} must be a factory, but is an instance of "
            f"{type(factory).__name__}. An environment is built in the process that "
            f"steps it, so pass a callable: `{written}`. See "
            "docs/coming_from_torchrl.md."
        )
    if hasattr(factory, "in_keys") and hasattr(factory, "out_keys"):
        raise TypeError(
            f"{where} must be a callable that builds an environment, but is the "
            f"policy {type(factory).__name__}: the environments come first."
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


def _factory_of(thing: Any) -> str:
    """Return the factory to write where ``thing`` is an environment, else ``""``."""
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
