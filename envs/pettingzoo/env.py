"""``PettingZooEnv`` and ``PettingZooWrapper``: tasks by name, and custom ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast, final

import numpy as np
from numpy.typing import NDArray
from pettingzoo import AECEnv, ParallelEnv
from typing_extensions import override

from marl_collect.core.description import EnvDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.common import (
    closed_on_error,
    options_of,
    reset_options,
    task_setter,
)
from marl_collect.envs.pettingzoo.actions import Actions
from marl_collect.envs.pettingzoo.description import (
    Absent,
    PettingZooOptions,
    Zoo,
    describe,
)
from marl_collect.envs.pettingzoo.drivers import AECDriver, ParallelDriver
from marl_collect.envs.pettingzoo.fast_path import fast_parallel
from marl_collect.envs.pettingzoo.groups import MaskSource
from marl_collect.envs.pettingzoo.rows import Rows
from marl_collect.envs.pettingzoo.tasks import find_task
from marl_collect.options import Option, method, require

_LEAKS = "pettingzoo.butterfly.knights_archers_zombies.knights_archers_zombies"
"""Module of an environment that keeps state across episodes.

An episode must be determined by its seed and its actions, so this state is cleared
before every reset. ``check_env`` finds such environments.
"""


class PettingZooBase(MultiAgentEnv):
    """Base class of ``PettingZooEnv`` and ``PettingZooWrapper``."""

    _reads_options = False  # The libraries ignore the options of a reset.

    def __init__(
        self, env: Zoo, name: str, options: PettingZooOptions, *, fast: bool
    ) -> None:
        """Own ``env``.

        If this raises, what a subclass has built must be closed. The user's own
        environment stays open, for another attempt.
        """
        self._env, self._options = env, options
        self._description, self._specs = describe(env, name, options)
        self._driver: ParallelDriver | AECDriver
        world = None
        if isinstance(env, ParallelEnv):
            world = fast_parallel(env) if fast else None
            self._driver = ParallelDriver(world or env, name)
        else:
            self._driver = AECDriver(env, name)
        self._fast = world is not None
        self._reset_options: dict[str, Any] = {}

    @final
    @property
    @override
    def description(self) -> EnvDescription:
        return self._description

    @final
    @property
    def env(self) -> Zoo:
        """The PettingZoo environment."""
        return self._env

    @final
    @property
    def is_parallel(self) -> bool:
        """Whether agents act simultaneously; False if turn-based (AEC)."""
        return isinstance(self._driver, ParallelDriver)

    @final
    @property
    def is_fast(self) -> bool:
        """Whether steps bypass PettingZoo's AEC-to-parallel conversion."""
        return self._fast

    @final
    @override
    def bind(self, row: Row) -> None:
        options = self._options
        rows = Rows(
            row,
            self._description,
            self._specs,
            watch_masks=options.action_mask == "auto" and not self._fast,
            absent_wait=options.absent == "waiting",
        )
        one_hot = not options.categorical_actions
        self._driver.bind(rows, Actions(row, self._specs, one_hot=one_hot))

    @final
    @override
    def reset_row(self, seed: int) -> None:
        raw: Any = self._env.unwrapped
        if type(raw).__module__ == _LEAKS:
            raw.zombie_spawn_interval.reset()
            raw.kill_list = []  # Agents that died in an unfinished cycle.
        self._driver.reset(seed, self._reset_options)

    @override
    def set_task(self, task: Any) -> None:
        """Pass a task to the environment's ``set_task``, or to its resets.

        Args:
            task: if the environment has no method ``set_task``, a mapping for
                ``reset(seed, options=task)``.

        Raises:
            TypeError: the environment has no ``set_task``, and the task is no mapping
                or ``reset`` takes no options.
        """
        setter = task_setter(self._env)
        if setter is not None:
            setter(task)
        elif not self._reads_options:
            super().set_task(task)
        else:
            self._reset_options = {"options": reset_options(self._env, task)}

    @final
    @override
    def step_row(self) -> None:
        self._driver.step()

    @final
    @override
    def audit(self) -> Iterable[str]:
        return self._driver.audit()

    @final
    @override
    def render(self) -> NDArray[np.uint8] | None:
        """Return the image ``[height, width, 3]`` of the environment, or None.

        PettingZoo's environments have one with ``render_mode="rgb_array"``. An
        environment without this attribute decides itself.
        """
        if getattr(self._env, "render_mode", "undeclared") is None:
            return None
        try:
            image = self._env.render()
        except NotImplementedError:
            return None
        return (
            cast("NDArray[np.uint8]", image) if isinstance(image, np.ndarray) else None
        )

    @final
    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._env.close()

    if not TYPE_CHECKING:  # As in the base class.

        def __getattr__(self, name: str) -> Any:
            """Return a public attribute of the PettingZoo environment."""
            env = self.__dict__.get("_env")
            ours = name.startswith("_") or hasattr(type(self), name)
            if ours or not hasattr(env, name):
                return super().__getattr__(name)
            return getattr(env, name)


@final
class PettingZooEnv(PettingZooBase):
    """A PettingZoo task by name.

    Example:
        >>> from functools import partial
        >>> factory = partial(PettingZooEnv, "multiwalker_v9", n_walkers=3)
    """

    _reads_options = True

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
        time_limit: int | None = None,
        absent: Absent = "dead",
        repeats: bool = True,
        fast: bool = True,
        device: object = None,
        **kwargs: Any,
    ) -> None:
        """Build the environment.

        Args:
            task: ``"multiwalker_v9"``, ``"sisl/multiwalker_v9"``, or
                ``"module:name"`` of a callable that returns an environment.
            parallel: True for the parallel API, in which agents act simultaneously;
                False for AEC, in which they act in turn. What a ``"module:name"``
                builds is either.
            return_state: whether to write the environment's ``state()`` to ``"state"``.
            group_map: group to agents, or a ``MarlGroupMapType``. None: agents of a
                parallel environment are grouped by the name before the number, and
                split where their spaces differ; each agent of an AEC environment gets
                its own group.
            use_mask: whether to write ``(group, "mask")``, the agents that act.
            action_mask: source of the legal actions, ``(group, "action_mask")``.
                ``"observation"``: the entry ``action_mask`` of Dict observations.
                ``"info"``: the entry ``action_mask`` in the infos of all agents with
                Discrete actions; if it is missing, every action is legal. None: no
                masks; such an entry of an observation stays an ordinary entry.
                ``"auto"``: observations that have the entry; for other agents infos, if
                an info of the first reset has it. A mask that is found anywhere else
                raises an error.
            categorical_actions: False for one-hot Discrete actions.
            seed: seed of this environment outside a collector. Collectors give every
                episode its own seed and ignore this one.
            done_on_any: whether the episode ends when the first agent is done. None:
                True for parallel and False for AEC environments.
            agent_ids: whether to append the agent's one-hot identity within its group
                to flat observations. Dict observations get an entry ``agent_id``.
            info_keys: names of infos to write to ``(group, "info", name)``, float32.
                A mapping gives their shapes. For a sequence, the infos of the first
                reset determine the shapes; an info that is missing there is a number.
            episode_reward: whether to write each agent's sum of rewards since the reset
                to ``("next", group, "episode_reward")``.
            time_limit: frames after which the episode is truncated. For an environment
                that calls its limit a termination, pass the same limit: agents that it
                only terminates in that frame are truncated instead.
            absent: the meaning of an agent that is missing in the environment's
                ``agents`` although it was neither terminated nor truncated. ``"dead"``:
                it is truncated. ``"waiting"``: it does not act, and is not done, until
                it is listed again. Environments written for RLlib, which list only the
                agents that act next, need this.
            repeats: whether a seed and the actions determine an episode. Pass False
                if the environment uses random generators that ``reset(seed=...)`` does
                not seed, such as ``np.random``. New episodes then begin where others
                would be replayed.
            fast: whether to bypass PettingZoo's conversions for tasks that are proven
                to give the same data.
            device: None or ``"cpu"``; environments run on the CPU. TorchRL's keyword.
            kwargs: arguments of the task, such as ``n_walkers=3`` or
                ``render_mode="rgb_array"``.

        Raises:
            UnknownTaskError: if the task is unknown; names similar tasks.
            MissingPackageError: if a package is missing; names what to install.
            TypeError: if a keyword has another type.
            ValueError: if groups or spaces do not fit (names the agents), if the
                device is not the CPU, or if ``parallel`` is False and the task is not.
        """
        _require_cpu(device)
        options = options_of(PettingZooOptions, locals())
        require("parallel", parallel, bool, Option(""))
        require("fast", fast, bool, Option(""))
        env = _check(find_task(task, parallel=parallel)(**kwargs), task)
        with closed_on_error(env):
            if not parallel and isinstance(env, ParallelEnv):
                raise ValueError(
                    f"{task} builds a ParallelEnv, but parallel is False: omit "
                    "parallel, or name a callable that returns an AECEnv."
                )
            super().__init__(env, task, options, fast=fast)


@dataclass(frozen=True)
class WrapperArguments(PettingZooOptions):
    """The arguments of ``PettingZooWrapper``."""

    env: Annotated[Zoo, Option("a ``ParallelEnv`` or an ``AECEnv``", checked=False)]
    _: KW_ONLY
    fast: bool = True
    device: object = None


@final
class PettingZooWrapper(PettingZooBase):
    """Wraps a custom ``ParallelEnv`` or ``AECEnv``.

    The process that steps an environment must build it, so collectors take a factory
    that builds the wrapper.

    Example:
        >>> factory = lambda: PettingZooWrapper(MyEnv(), return_state=True)
    """

    _reads_options = True

    @method(WrapperArguments)
    def __init__(self, arguments: WrapperArguments) -> None:
        """Own ``env``; the keywords mean what they mean to ``PettingZooEnv``.

        Raises:
            TypeError: if ``env`` is not a PettingZoo environment, or a keyword has
                another type.
            ValueError: if groups or spaces do not fit (names the agents), or if the
                device is not the CPU.
        """
        _require_cpu(arguments.device)
        require("fast", arguments.fast, bool, Option(""))
        env = _check(arguments.env, "PettingZooWrapper")
        metadata: Mapping[str, Any] = getattr(env, "metadata", None) or {}
        name = str(metadata.get("name") or type(env.unwrapped).__name__)
        super().__init__(env, name, arguments, fast=arguments.fast)


def _require_cpu(device: object) -> None:
    if device is not None and str(device) != "cpu":
        raise ValueError(
            f"device must be None or 'cpu', but is {str(device)!r}: environments run "
            "on the CPU. To get batches on another device, use Collector(..., "
            f"storing_device={str(device)!r})."
        )


def _check(env: Any, where: str) -> Zoo:
    if isinstance(env, (ParallelEnv, AECEnv)):
        return env
    if isinstance(env, type) and issubclass(env, (ParallelEnv, AECEnv)):
        raise TypeError(
            f"{where} needs an environment, but got the class {env.__name__}. Build an "
            f"instance in a factory: lambda: PettingZooWrapper({env.__name__}())."
        )
    raise TypeError(
        f"{where} needs a pettingzoo ParallelEnv or AECEnv, but got {env!r} of type "
        f"{type(env).__name__}."
    )
