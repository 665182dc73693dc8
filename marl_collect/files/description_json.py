"""Converts descriptions of environments, and spaces, to JSON values and back."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, GroupDescription

Json = dict[str, Any]
_MOST_BOUNDS: Final = 2**26
"""Elements of the largest Box; a damaged file must not fill the memory."""


def environment_to_json(description: EnvDescription) -> dict[str, Any]:
    """Return an environment's description as JSON values."""
    return {
        "name": description.name,
        "groups": {
            name: {
                "agents": list(group.agents),
                "observation": space_to_json(group.observation),
                "action": space_to_json(group.action),
                "categorical_actions": group.categorical_actions,
                "action_mask": group.action_mask,
                "mask": group.mask,
                "info": {key: list(shape) for key, shape in group.info.items()},
                "episode_reward": group.episode_reward,
            }
            for name, group in description.groups.items()
        },
        "root": {key: space_to_json(space) for key, space in description.root.items()},
        "done_on_any": description.done_on_any,
        "repeats": description.repeats,
        "time_limit": description.time_limit,
    }


def environment_from_json(data: Mapping[str, Any]) -> EnvDescription:
    """Return the description from the output of ``environment_to_json``."""
    groups = {
        name: GroupDescription(
            agents=tuple(group["agents"]),
            observation=space_from_json(group["observation"]),
            action=space_from_json(group["action"]),
            categorical_actions=group["categorical_actions"],
            action_mask=group["action_mask"],
            mask=group["mask"],
            info={key: tuple(shape) for key, shape in group["info"].items()},
            episode_reward=group["episode_reward"],
        )
        for name, group in data["groups"].items()
    }
    return EnvDescription(
        name=data["name"],
        groups=groups,
        root={key: space_from_json(space) for key, space in data["root"].items()},
        done_on_any=data["done_on_any"],
        repeats=data["repeats"],
        time_limit=data["time_limit"],
    )


def space_to_json(space: spaces.Space[Any]) -> Json:
    """Return JSON values from which ``space_from_json`` builds the same space.

    Raises:
        TypeError: if the space's values are not arrays of fixed shape.
    """
    if isinstance(space, spaces.Box):
        return {
            "kind": "Box",
            "shape": list(space.shape),
            "dtype": np.dtype(space.dtype).name,
            "low": _bound(space.low),
            "high": _bound(space.high),
        }
    if isinstance(space, spaces.Discrete):
        return {
            "kind": "Discrete",
            "n": int(space.n),
            "start": int(space.start),
            "dtype": np.dtype(space.dtype).name,
        }
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "kind": "MultiDiscrete",
            "nvec": space.nvec.tolist(),
            "start": space.start.tolist(),
            "dtype": np.dtype(space.dtype).name,
        }
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        inner = {name: space_to_json(s) for name, s in space.spaces.items()}
        return {"kind": "Dict", "spaces": inner}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "spaces": [space_to_json(s) for s in space.spaces]}
    raise TypeError(
        f"The space {space} cannot be stored: expected Box, Discrete, "
        "MultiDiscrete, MultiBinary, or Dict and Tuple of these."
    )


def space_from_json(data: Mapping[str, Any]) -> spaces.Space[Any]:
    """Build the space that ``data`` describes.

    Raises:
        ValueError: if this version does not know the kind of space.
    """
    kind = data["kind"]
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        low, high = (_array(data[name], shape, dtype) for name in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"], dtype=_integer(data))
    if kind == "MultiDiscrete":
        start = np.array(data["start"]) if "start" in data else None
        return spaces.MultiDiscrete(np.array(data["nvec"]), _integer(data), start=start)
    if kind == "MultiBinary":
        return spaces.MultiBinary(tuple(data["shape"]))
    if kind == "Dict":
        inner = {name: space_from_json(s) for name, s in data["spaces"].items()}
        return spaces.Dict(inner)
    if kind == "Tuple":
        return spaces.Tuple([space_from_json(s) for s in data["spaces"]])
    raise ValueError(
        f"Unknown kind of space {kind!r}: a newer version of marl_collect wrote it. "
        "Install that version."
    )


def _integer(data: Mapping[str, Any]) -> Any:
    """Return the dtype of an integer space; older files do not name it."""
    return np.dtype(data.get("dtype", "int64")).type


def _bound(bound: NDArray[Any]) -> Any:
    """Return one number if all are equal; an image has about 100,000 bounds."""
    values = bound.ravel().tolist()
    if values and (bound == values[0]).all():
        return _number(values[0])
    return list(map(_number, values))


def _number(value: float) -> float | str:
    """Return infinity and NaN as strings, because JSON has neither."""
    return value if math.isfinite(value) else str(value)


def _array(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if math.prod(shape) > _MOST_BOUNDS:
        raise ValueError(
            f"A Box has the shape {list(shape)}, but at most {_MOST_BOUNDS:,} elements "
            "are expected."
        )
    if not isinstance(bound, list):
        return np.full(shape, float(bound) if isinstance(bound, str) else bound, dtype)
    values = [float(v) if isinstance(v, str) else v for v in bound]
    return np.array(values, dtype).reshape(shape)
