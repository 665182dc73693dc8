"""PettingZoo environments, by task name or the user's own, behind the contract."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray
from pettingzoo import AECEnv, ParallelEnv

from marl_collect.core.description import EnvDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.keywords import options_of
from marl_collect.envs.pettingzoo.aec import AECDriver
from marl_collect.envs.pettingzoo.description import PettingZooOptions, Zoo, describe
from marl_collect.envs.pettingzoo.fast_path import fast_parallel
from marl_collect.envs.pettingzoo.leaked_state import leak_cleaner
from marl_collect.envs.pettingzoo.masks import MaskSource
from marl_collect.envs.pettingzoo.parallel import ParallelDriver
from marl_collect.envs.pettingzoo.tasks import find_task


class PettingZooBase(MultiAgentEnv):
    """What ``PettingZooEnv`` and ``PettingZooWrapper`` have in common."""

    def __init__(
        self, env: Zoo, name: str, options: PettingZooOptions, *, fast: bool
    ) -> None:
        """Own ``env``; subclasses say where it comes from."""
        self._env = env
        self._closed = False
        self._clear_leaks = leak_cleaner(env.unwrapped)
        self._description, specs = describe(env, name, options)
        one_hot = not options.categorical_actions
        found = options.action_mask == "auto"
        self._driver: ParallelDriver | AECDriver
        if isinstance(env, ParallelEnv):
            quick = fast_parallel(env) if fast else None
            self._fast = quick is not None
            self._driver = ParallelDriver(
                quick or env,
                self._description,
                specs,
                one_hot=one_hot,
                watch_masks=found and quick is None,
            )
        else:
            self._fast = False
            self._driver = AECDriver(
                env, self._description, specs, one_hot=one_hot, watch_masks=found
            )

    @final
    @property
    def description(self) -> EnvDescription:
        """Groups, spaces and promises."""
        return self._description

    @final
    @property
    def env(self) -> Zoo:
        """The PettingZoo environment."""
        return self._env

    @final
    @property
    def is_parallel(self) -> bool:
        """Whether agents act together; otherwise they take turns (AEC)."""
        return isinstance(self._driver, ParallelDriver)

    @final
    @property
    def is_fast(self) -> bool:
        """Whether the world under PettingZoo's conversion is stepped directly."""
        return self._fast

    @final
    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._closed

    @final
    def bind(self, row: Row) -> None:
        """Read actions from and write everything else to ``row`` from now on."""
        self._driver.bind(row)

    @final
    def reset_row(self, seed: int) -> None:
        """Begin the episode of ``seed``."""
        if self._clear_leaks is not None:
            self._clear_leaks(self._env.unwrapped)
        self._driver.reset(seed)

    @final
    def step_row(self) -> None:
        """Step with the row's actions."""
        self._driver.step()

    @final
    def audit(self) -> Iterable[str]:
        """Return what is wrong with the last answer of the PettingZoo environment."""
        return self._driver.audit()

    @final
    def render(self) -> NDArray[np.uint8] | None:
        """Return an image ``[height, width, 3]``, with ``render_mode="rgb_array"``."""
        if getattr(self._env, "render_mode", None) is None:
            return None
        image = self._env.render()
        return (
            cast("NDArray[np.uint8]", image) if isinstance(image, np.ndarray) else None
        )

    @final
    def close(self) -> None:
        """Close the PettingZoo environment."""
        if not self._closed:
            self._closed = True
            self._env.close()


@final
class PettingZooEnv(PettingZooBase):
    """A task by its name.

    Example:
        >>> from functools import partial
        >>> factory = partial(PettingZooEnv, "multiwalker_v9", n_walkers=3)
    """

    def __init__(  # noqa: PLR0913 - TorchRL's signature, and a few more
        self,
        task: str,
        parallel: bool = True,  # noqa: FBT001, FBT002 - TorchRL's signature
        *,
        return_state: bool = False,
        group_map: MarlGroupMapType | GroupMap | None = None,
        use_mask: bool = True,
        action_mask: MaskSource = "auto",
        categorical_actions: bool = True,
        seed: int | None = None,
        done_on_any: bool | None = None,
        agent_ids: bool = False,
        info_keys: Sequence[str] | Mapping[str, tuple[int, ...]] = (),
        episode_reward: bool = False,
        repeats: bool = True,
        fast: bool = True,
        device: object = None,
        **kwargs: Any,
    ) -> None:
        """Build the environment.

        Args:
            task: ``"multiwalker_v9"``, ``"sisl/multiwalker_v9"``, or
                ``"module:name"`` of a callable that returns an environment.
            parallel: True for agents that act together, False for agents that take
                turns (AEC).
            return_state: write the environment's ``state()`` at ``"state"``.
            group_map: group to agents, or a ``MarlGroupMapType``. None groups
                agents of a parallel environment by the name before the number,
                apart where their spaces differ, and gives each agent of an AEC
                environment its own group.
            use_mask: write ``(group, "mask")``, the agents that act.
            action_mask: where the masks of legal actions, ``(group, "action_mask")``,
                come from: ``"observation"``, the entry ``action_mask`` of a Dict
                observation; ``"info"``, the entry of this name in infos, where it
                stands for all agents with Discrete actions and one that is missing
                allows every action; None, no masks, and such an entry of an
                observation is kept as any other. ``"auto"`` takes those of
                observations; for other agents those of infos, if the infos of the
                first reset have one; and a mask that nobody reads is an error.
            categorical_actions: False for one-hot Discrete actions.
            seed: seed of this environment when used by hand. Collectors give every
                episode a seed of its own and ignore this one.
            done_on_any: whether the first agent to be done ends the episode; None
                is True for parallel and False for AEC environments.
            agent_ids: append the agent's one-hot identity within its group to flat
                observations; Dict observations get an entry ``agent_id``.
            info_keys: names of infos to write to ``(group, "info", name)``, float32.
                A mapping gives their shapes; otherwise the infos of the first reset
                do, or they are single numbers.
            episode_reward: write each agent's sum of rewards since the reset to
                ``("next", group, "episode_reward")``.
            repeats: whether a seed and the actions determine an episode. Pass False
                for an environment that draws from generators that ``reset(seed=...)``
                does not seed, such as ``np.random``: it begins new episodes where
                others are replayed.
            fast: step the world directly where the data were proven to be the same.
            device: None or ``"cpu"``, where environments are. TorchRL's keyword.
            kwargs: for the task, such as ``n_walkers=3`` or
                ``render_mode="rgb_array"``.

        Raises:
            UnknownTaskError: naming tasks that are close, or where it went.
            MissingPackageError: naming what to install.
            ValueError: naming agents, if groups or spaces do not fit; for a device
                that is not the CPU.
        """
        _require_cpu(device)
        options = options_of(PettingZooOptions, locals())
        env = _check(find_task(task, parallel=parallel)(**kwargs), task)
        super().__init__(env, task, options, fast=fast)


@final
class PettingZooWrapper(PettingZooBase):
    """A ``ParallelEnv`` or ``AECEnv`` of the user's own.

    An environment lives in the process that steps it, so the wrapper is built there
    too, in a factory.

    Example:
        >>> factory = lambda: PettingZooWrapper(MyEnv(), return_state=True)
    """

    def __init__(  # noqa: PLR0913 - as above
        self,
        env: Zoo,
        *,
        return_state: bool = False,
        group_map: MarlGroupMapType | GroupMap | None = None,
        use_mask: bool = True,
        action_mask: MaskSource = "auto",
        categorical_actions: bool = True,
        seed: int | None = None,
        done_on_any: bool | None = None,
        agent_ids: bool = False,
        info_keys: Sequence[str] | Mapping[str, tuple[int, ...]] = (),
        episode_reward: bool = False,
        repeats: bool = True,
        fast: bool = True,
        device: object = None,
    ) -> None:
        """Own ``env``; the keywords are those of ``PettingZooEnv``.

        Raises:
            TypeError: if ``env`` is no PettingZoo environment.
            ValueError: naming agents, if groups or spaces do not fit; for a device
                that is not the CPU.
        """
        _require_cpu(device)
        options = options_of(PettingZooOptions, locals())
        checked = _check(env, "PettingZooWrapper")
        metadata: Mapping[str, Any] = getattr(checked, "metadata", None) or {}
        name = str(metadata.get("name") or type(checked.unwrapped).__name__)
        super().__init__(checked, name, options, fast=fast)


def _require_cpu(device: object) -> None:
    if device is not None and str(device) != "cpu":
        raise ValueError(
            f"Environments are on the CPU, so device={str(device)!r} cannot be had. "
            "Say where data shall go where they are collected: "
            f"Collector(..., storing_device={str(device)!r})."
        )


def _check(env: Any, where: str) -> Zoo:
    if isinstance(env, (ParallelEnv, AECEnv)):
        return env
    if isinstance(env, type) and issubclass(env, (ParallelEnv, AECEnv)):
        raise TypeError(
            f"{where} needs an environment, but got the class {env.__name__}. Build "
            f"it in a factory: lambda: PettingZooWrapper({env.__name__}())."
        )
    raise TypeError(
        f"{where} needs a pettingzoo ParallelEnv or AECEnv, but got {env!r} of type "
        f"{type(env).__name__}."
    )
