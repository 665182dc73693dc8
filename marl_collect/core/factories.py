"""Turns ``create_env_fn`` into the environments of each worker."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces

from marl_collect.core.batch import EnvBatch, SerialBatch
from marl_collect.core.batched import BatchedEnv
from marl_collect.core.description import EnvDescription, leaf_spaces
from marl_collect.core.env import TensorDictEnv, factory_for, require_factory
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.core.sharing import simulators
from marl_collect.errors import unpicklable, warn
from marl_collect.options import one_for_each

_BATCH_ADVICE = {
    False: "the factories of its environments instead",
    True: "it to a collector instead, and num_workers to step several of them in "
    "parallel",
}
"""By whether it consists of the worlds of one simulator."""

BUILD_ANEW = (
    "A factory must build everything anew in each call, such as `lambda: "
    "PettingZooWrapper(MyEnv())`; not `raw = MyEnv()` and then `lambda: "
    "PettingZooWrapper(raw)`."
)
"""What to do if two environments share something."""

_NUMBERS = {2: "two", 3: "three"}

Factory = Callable[[], Any]
Kwargs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


def check_function(name: str, function: Any, call: str, result: str) -> None:
    """Check a function of the user that workers call.

    Args:
        name: of the argument.
        function: its value.
        call: a call, such as ``"assign(seed, agents)"``.
        result: what the function returns.

    Raises:
        TypeError: if it is no function of these arguments, or cannot be pickled.
    """
    if not callable(function):
        raise TypeError(
            f"{name} must be a function {call} that returns {result}, but is "
            f"{function!r}."
        )
    number = call.count(",") + 1
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError as error:
        raise TypeError(
            f"{name} must take {_NUMBERS[number]} arguments, {call}, but has the "
            f"signature {inspect.signature(function)}."
        ) from error
    except ValueError:
        pass  # It has no signature that could be read.
    try:
        cloudpickle.dumps(function)
    except Exception as error:
        raise TypeError(
            f"{name} cannot be sent to the workers, because it cannot be pickled "
            f"({type(error).__name__}: {error}, in {unpicklable(function)}). Use a "
            "function that refers to plain data only."
        ) from error


def spread(
    create_env_fn: Factory | Sequence[Factory],
    num_workers: int | None,
    envs_per_worker: int,
    create_env_kwargs: Kwargs = None,
) -> list[list[Factory]]:
    """Return the factories of each worker's environments.

    A single factory is used for all ``num_workers x envs_per_worker`` environments. In
    a list, each entry belongs to one worker and is used ``envs_per_worker`` times. A
    list with more entries than ``num_workers`` is divided evenly among the workers, in
    order.

    Raises:
        TypeError: if an environment was passed. The message shows the factory to
            write.
        ValueError: if the length of a list does not match the other arguments.
    """
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        factories = list(create_env_fn)
        if not factories:
            raise ValueError(
                "create_env_fn must contain at least one factory, but is empty."
            )
        for index, factory in enumerate(factories):
            require_factory(factory, f"create_env_fn[{index}]")
        workers = _deal(factories, num_workers, envs_per_worker)
    else:
        require_factory(create_env_fn, "create_env_fn")
        workers = [[create_env_fn] * envs_per_worker for _ in range(num_workers or 1)]
    chosen = {} if create_env_kwargs is None else create_env_kwargs
    kwargs = one_for_each("create_env_kwargs", chosen, len(workers))
    return [
        [partial(factory, **extra) if extra else factory for factory in members]
        for members, extra in zip(workers, kwargs, strict=True)
    ]


def _ignore(_: object) -> None:
    """Ignore what is noted."""


def build(
    factories: Sequence[Factory],
    first: int = 0,
    *,
    building: Callable[[int], None] = _ignore,
    failing: Callable[[BaseException], None] = _ignore,
) -> EnvBatch:
    """Build environments in this process.

    Args:
        factories: one per environment.
        first: index of the first environment, as the user counts them.
        building: called with each index before its environment is built.
        failing: called with an error before the environments built so far are closed.

    Raises:
        TypeError: if a factory returns something other than an environment, or if two
            environments share a simulator.
        ValueError: if the environments differ in groups or spaces.
    """
    built = build_singles(
        factories,
        range(first, first + len(factories)),
        building=building,
        failing=failing,
        batches=True,
    )
    return built[0].engine() if built[0].batch_size else SerialBatch(built, first)


def build_singles(
    factories: Sequence[Factory],
    indices: Sequence[int],
    *,
    building: Callable[[int], None] = _ignore,
    failing: Callable[[BaseException], None] = _ignore,
    batches: bool = False,
) -> list[Any]:
    """Build the single environments of a batch in this process, as ``build`` does.

    Args:
        factories: one per environment.
        indices: of the environments, as the user counts them.
        building: as for ``build``.
        failing: as for ``build``.
        batches: whether an only factory may return a batch.

    Raises:
        TypeError: also if a factory returns a batch.
    """
    built: list[Any] = []
    owners: dict[int, int] = {}
    try:
        for index, factory in zip(indices, factories, strict=True):
            building(index)
            built.append(_built(factory, index))
            _claim(built[-1], index, owners)
            who, reference = f"environment {index}", f"environment {indices[0]}"
            check_alike(built[0].description, built[-1].description, who, reference)
        for index, env in zip(indices, built, strict=True):
            if env.batch_size and not (batches and len(built) == 1):
                number = len(built)
                raise TypeError(_unexpected_batch(env, index, number, batches=batches))
    except BaseException as error:
        failing(error)
        for env in built:
            with suppress(Exception):  # It must not hide the first.
                env.close()
        raise
    return built


def check_alike(
    expected: EnvDescription, actual: EnvDescription, who: str, reference: str
) -> None:
    """Check that two environments can be in the same batch.

    Bounds of observations, and time limits, may differ.

    Raises:
        ValueError: if a key, the agents of a group, the number or the bounds of
            actions, or the rule by which episodes end differs. The message names the
            first one.
    """
    a, b = _alike(expected), _alike(actual)
    for name in [*a, *(n for n in b if n not in a)]:
        if a.get(name) != b.get(name):
            raise ValueError(
                "All environments of a collector must have the same groups and spaces, "
                f"but {name} is {b.get(name)} in {who} and {a.get(name)} in "
                f"{reference}. Use one collector per kind of environment."
            )


def _alike(description: EnvDescription) -> dict[str, Any]:
    """Return what environments of the same batch have in common."""
    common: dict[str, Any] = {
        "/".join(key): field for key, field in description.row().items()
    }
    for name, group in description.groups.items():
        common[f"the agents of {name}"] = list(group.agents)
        for key, space in leaf_spaces(group.action, (name, "action")):
            n = getattr(space, "nvec", getattr(space, "n", None))
            common[f"the number of {'/'.join(key)}"] = np.asarray(n).tolist()
            if isinstance(space, spaces.Box):  # Random actions are drawn for all.
                bounds = [space.low.tolist(), space.high.tolist()]
                common[f"the interval of {'/'.join(key)}"] = bounds
    return common | {"done_on_any": description.done_on_any}


def warn_if_pinned(description: EnvDescription, environments: int) -> None:
    """Warn if a factory passes the same seed to every environment."""
    if description.pinned_seed is not None and environments > 1:
        warn(
            f"The factory pins seed={description.pinned_seed} for all {environments} "
            "environments. Collectors ignore it: every episode has its own seed, "
            "derived from the collector's. Pass seed= to the collector, not to the "
            "environment."
        )


def _deal(
    factories: list[Factory], num_workers: int | None, envs_per_worker: int
) -> list[list[Factory]]:
    workers = len(factories) if num_workers is None else num_workers
    if workers == len(factories):
        return [[factory] * envs_per_worker for factory in factories]
    share, left = divmod(len(factories), workers)
    if left or envs_per_worker not in (1, share):
        raise ValueError(
            f"create_env_fn has {len(factories)} factories, which does not match "
            f"num_workers={workers} and envs_per_worker={envs_per_worker}. Pass one "
            "factory per worker, or one per environment."
        )
    return [factories[i * share : (i + 1) * share] for i in range(workers)]


def _claim(env: TensorDictEnv, index: int, owners: dict[int, int]) -> None:
    """Note that environment ``index`` owns the simulators inside ``env``.

    Args:
        env: the environment.
        index: of the environment, as the user counts them.
        owners: identity of each simulator to the index of its environment.

    Raises:
        TypeError: if another environment owns one. The message names its class.
    """
    for simulator in simulators(env):
        owner = owners.setdefault(id(simulator), index)
        if owner != index:
            raise TypeError(
                f"The environments {owner} and {index} of one process share one "
                f"{type(simulator).__name__} object, so each would reset and step the "
                f"other's episodes. {BUILD_ANEW}"
            )


def _built(factory: Factory, index: int) -> TensorDictEnv:
    env = factory()
    if not isinstance(env, TensorDictEnv):
        if env is None:
            raise TypeError(
                f"The factory of environment {index} must return an environment, but "
                "returned None: add `return`."
            )
        kind = f"{type(env).__module__}.{type(env).__name__}"
        advice = "Wrap it, for example `lambda: PettingZooWrapper(MyEnv())`; see "
        page = 'the page "Environments" of the documentation.'
        written = factory_for(env)
        if written:
            advice = f"Wrap it: `{written}`; see "
        if kind.startswith("torchrl.") or "TorchRLWrapper" in written:
            advice += "marl_collect.interop.torchrl and "
            page = 'the page "Coming from TorchRL" of the documentation.'
        raise TypeError(
            f"The factory of environment {index} must return a marl_collect "
            f"environment, but returned {kind}. {advice}{page}"
        )
    return env


def _unexpected_batch(env: Any, index: int, number: int, *, batches: bool) -> str:
    kind = type(env).__name__
    if batches:
        return (
            f"A {kind} is a batch, so its factory must be the only one in its process, "
            f"but this process has {number} factories. Build one batch with more "
            "worlds or environments, use envs_per_worker=1, and for several batches a "
            "collector with worker processes, such as "
            "MultiSyncCollector(num_workers=...)."
        )
    return (
        f"The factory of environment {index} must return a single environment, but "
        f"returned the batch {kind}. Pass "
        f"{_BATCH_ADVICE[isinstance(env, (BatchedEnv, EnvWrapper))]}."
    )
