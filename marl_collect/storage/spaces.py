"""Converts Gymnasium spaces to JSON values and back."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Json = dict[str, Any]


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


def describe_space(space: spaces.Space[Any]) -> str:
    """Return a short text for a space; a Box shows its lowest and highest bound."""
    if isinstance(space, spaces.Dict):
        inner = (f"{name}: {describe_space(s)}" for name, s in space.spaces.items())
        return "\n".join(inner)
    if isinstance(space, spaces.Box):
        low, high = space.low.min(), space.high.max()
        return f"Box {list(space.shape)} {space.dtype} in [{low:g}, {high:g}]"
    return str(space)


def _integer(data: Mapping[str, Any]) -> Any:
    """Return the dtype of an integer space; older files do not name it."""
    return np.dtype(data.get("dtype", "int64")).type


def _bound(bound: NDArray[Any]) -> Any:
    """Return one number if all are equal; an image has about 100,000 bounds."""
    first = bound.flat[0]
    if (bound == first).all():
        return _number(first.item())
    return [_number(value) for value in bound.ravel().tolist()]


def _number(value: float) -> float | str:
    """Return infinity and NaN as strings, because JSON has neither."""
    return value if math.isfinite(value) else str(value)


def _array(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    values = [bound] * math.prod(shape) if not isinstance(bound, list) else bound
    return np.array(
        [float(v) if isinstance(v, str) else v for v in values], dtype
    ).reshape(shape)
