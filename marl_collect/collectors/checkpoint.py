"""Converts a collector's state to plain data and back."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.collectors.delivery import Source
from marl_collect.collectors.publish import Publisher
from marl_collect.collectors.statistics import Statistics
from marl_collect.core.description import EnvDescription
from marl_collect.core.replay import ACTIONS_DISCARDED, REPLAY_DIVERGED
from marl_collect.errors import counted, warn
from marl_collect.parallel_env.joint import check_name
from marl_collect.rollout.env_calls import calls_of
from marl_collect.rollout.episodes import Episode, left_behind

_ARRAY = "ndarray"
_SECONDS = ("collecting", "rollouts", "resets")
"""Go with the frames, so that frames per second count all runs."""
_KEYS = {
    "frames",
    "batches",
    "episodes",
    "seconds",
    "recent",
    "policy_state_dict",
    "workers",
    "published",
    "policy_version",
    "policy_versions",
    "policy_is_published",
    "trajectories",
    "numbering",
    "level",
}


def pack(source: Source) -> dict[str, Any]:
    """Return counters, weights and the workers' states as plain data."""
    statistics, weights = source.statistics, source.weights
    module = weights.policy.module
    parameters = None
    if isinstance(module, torch.nn.Module):
        parameters = copy.deepcopy(module.state_dict())  # The module is trained on.
    published = weights.weights()
    if all(_same(published[0], other) for other in published[1:]):
        published = published[:1]
    return {
        "frames": statistics.frames,
        "batches": statistics.batches,
        "episodes": statistics.episodes,
        "seconds": {name: getattr(statistics, name) for name in _SECONDS},
        "recent": [asdict(episode) for episode in statistics.recent],
        "policy_state_dict": parameters,
        "workers": [_storable(worker) for worker in source.states()],
        "policy_version": weights.version,
        "policy_versions": weights.versions(),
        "policy_is_published": weights.policy.is_published,
        "published": [
            {name: tensor.clone() for name, tensor in of_worker.items()}
            for of_worker in published
        ],
    }


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one is other or all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def unpack(
    state_dict: Mapping[str, Any],
    source: Source,
    numbering: Mapping[str, int | None],
    level: int | None,
) -> list[Any]:
    """Return the workers' states, after checking all but the trajectories.

    Args:
        state_dict: of a collector with the same arguments.
        source: of the collector, which is to resume from the state.
        numbering: of its environments.
        level: of the curriculum, if there is one.

    Raises:
        TypeError: if it is no mapping.
        KeyError: if the mapping is not the state of a collector.
        AttributeError: if it has a call of a method that is not public.
        ValueError: if its weights do not fit this policy, if its workers, environments
            or their numbers are others, or if only one of the two has a curriculum.
    """
    description = source.description
    if not description.repeats:
        warn(
            f"{description.name} does not repeat its episodes, so its environments "
            "begin new episodes instead of resuming."
        )
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "load_state_dict() needs the state_dict() of a collector, but got "
            f"{state_dict!r:.100}."
        )
    missing = _KEYS - set(state_dict)
    if missing:
        raise KeyError(
            "load_state_dict() needs the state_dict() of a collector, but "
            f"{sorted(missing)} are missing; found {sorted(map(str, state_dict))}. "
            "Pass a policy's weights to update_policy_weights_()."
        )
    _check_weights(state_dict, source.weights)
    workers = [_restored(worker) for worker in state_dict["workers"]]
    for worker in workers:
        for call in calls_of(worker["calls"]).values():
            check_name("state", call.name)
    if description.repeats and any(_lacks_actions(w).any() for w in workers):
        warn(ACTIONS_DISCARDED.format(description.name))
    _check_numbering(state_dict["numbering"], numbering)
    _check_workers(workers, source.sizes)
    if (state_dict["level"] is None) != (level is None):
        which = "collector, but not the state,"
        if level is None:
            which = "state, but not the collector,"
        raise ValueError(
            f"The {which} has a curriculum: build the collector with the arguments the "
            "state was saved with."
        )
    return workers


def restore(state_dict: Mapping[str, Any], source: Source) -> None:
    """Restore counters, the trainer's module, and all workers' weights and versions."""
    statistics, weights = source.statistics, source.weights
    policy, parameters = weights.policy, state_dict["policy_state_dict"]
    if parameters is not None and isinstance(policy.module, torch.nn.Module):
        policy.module.load_state_dict(parameters)
    statistics.frames = state_dict["frames"]
    statistics.batches = state_dict["batches"]
    statistics.episodes = state_dict["episodes"]
    for name in _SECONDS:
        setattr(statistics, name, state_dict["seconds"][name])
    statistics.recent = [Episode(**e) for e in state_dict["recent"]]
    kinds = policy.layout.kinds if policy.layout is not None else ()
    named = list(zip(policy.names, kinds, strict=True))
    published = [
        [vector[name].to(dtype) for name, (_, dtype) in named]
        for vector in state_dict["published"]
    ]
    if not published and policy.module is not None and policy.names:
        published = [policy.tensors()]
    versions = state_dict["policy_versions"]
    workers: list[list[int] | None] = [None]
    if len(published) > 1 or len(set(versions)) > 1:
        workers = [[worker] for worker in range(len(versions))]
    if len(published) == 1:
        published *= len(workers)
    parts = list(zip(published, workers, versions, strict=False))
    weights.restore(parts, state_dict["policy_version"])
    if not state_dict["policy_is_published"]:
        policy.not_published()


def note_resumed(
    statistics: Statistics,
    description: EnvDescription,
    resumed: Iterable[tuple[range, Any, Sequence[int]]],
) -> None:
    """Count the episodes of loaded states that were not resumed.

    Args:
        statistics: in which they are counted.
        description: of the environments.
        resumed: of each rollout: the indices of its environments, the state that it has
            loaded, and the numbers of their running episodes afterwards.

    Warns:
        UserWarning: if some were not although they could be repeated.
    """
    diverged = False
    for environments, state, running in resumed:
        lost = left_behind(state["environments"], running)
        episodes = state["environments"]["episode"][lost].tolist()
        statistics.cut([environments[k] for k in lost], episodes)
        diverged |= bool((~_lacks_actions(state)[lost]).any())
    if description.repeats and diverged:
        warn(REPLAY_DIVERGED.format(description.name))


def _check_weights(state_dict: Mapping[str, Any], weights: Publisher) -> None:
    versions = state_dict["policy_versions"]
    several = len(set(versions)) > 1 or len(state_dict["published"]) > 1
    if several and len(versions) != weights.workers:
        raise ValueError(
            f"The state has separate weights for {len(versions)} workers, but this "
            f"collector has {weights.workers}. Build the collector with the arguments "
            "it was saved with."
        )
    policy = weights.policy
    parameters, module = state_dict["policy_state_dict"], policy.module
    pairs = []
    if parameters is not None and isinstance(module, torch.nn.Module):
        pairs.append((_shapes(parameters), _shapes(module.state_dict())))
    shapes: dict[str, str] = {}
    if (layout := policy.layout) is not None:
        lists = [str(list(shape)) for shape, _ in layout.kinds]
        shapes = dict(zip(layout.names, lists, strict=True))
    pairs += [(_shapes(published), shapes) for published in state_dict["published"]]
    for saved, expected in pairs:
        for name in {**expected, **saved}:
            there, here = saved.get(name, "missing"), expected.get(name, "missing")
            if there != here:
                raise ValueError(
                    f"The weights in the state do not fit this policy: {name} is "
                    f"{there} in the state, but {here} in the policy. Build the "
                    "collector with the arguments it was saved with."
                )


def _shapes(weights: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{list(getattr(w, 'shape', ()))}" for name, w in weights.items()}


def _check_numbering(
    saved: Mapping[str, int | None], current: Mapping[str, int | None]
) -> None:
    """Check that a state is resumed with the numbers of environments it was saved with.

    The states of some workers of a collector may be loaded into one that has the number
    of these workers: ``worker_idx`` is compared only if both have one.
    """
    ranks = ("rank", "world_size")
    indices = {saved["worker_idx"], current["worker_idx"]} - {None}
    if any(saved[name] != current[name] for name in ranks) or len(indices) > 1:
        raise ValueError(
            f"The state was saved by {_numbered(saved)}, but this is "
            f"{_numbered(current)}, whose environments are numbered differently: "
            "resume each collector from its own state, on as many ranks."
        )


def _numbered(numbering: Mapping[str, int | None]) -> str:
    if numbering["worker_idx"] is not None:
        return f"worker_idx {numbering['worker_idx']}"
    return f"rank {numbering['rank']} of {numbering['world_size']}"


def _check_workers(states: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> None:
    """Check that states are those of workers with these numbers of environments."""
    saved = [len(state["environments"]["begun"]) for state in states]
    there, here = (
        f"{counted(len(n), 'worker')} with {list(n)}" for n in (saved, sizes)
    )
    if there != here:
        raise ValueError(
            f"The state has {there} environments, but this collector has {here}: build "
            "the same kind of collector with the arguments it was saved with."
        )


def _lacks_actions(worker: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Return whose actions were discarded, bool ``[K]``."""
    lacks: NDArray[np.bool_] = worker["actions"]["lengths"] < 0
    return lacks


def _storable(state: Any) -> Any:
    """Convert arrays in a worker's state, because ``torch.load`` reads tensors only."""
    if isinstance(state, np.ndarray):
        # Unpickled arrays without elements share one address, and torch.save refuses
        # tensors of several dtypes at one address.
        return {_ARRAY: torch.from_numpy(state if state.size else state.copy())}
    if isinstance(state, dict):
        return {key: _storable(part) for key, part in state.items()}
    return state


def _restored(state: Any) -> Any:
    """Undo ``_storable``."""
    if isinstance(state, dict):
        if _ARRAY in state:
            return state[_ARRAY].numpy()
        return {key: _restored(part) for key, part in state.items()}
    return state
