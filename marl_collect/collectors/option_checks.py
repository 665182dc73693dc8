"""Which options make sense, and which go together."""

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from tensordict.nn import InteractionType

if TYPE_CHECKING:
    from marl_collect.collectors.options import CollectorOptions

POLICY = "policy"
"""The only model that acts: what weight schemes are named after."""
_EXPLORATION = ("RANDOM", "MODE", "MEAN", "DETERMINISTIC")


def check(options: "CollectorOptions") -> None:
    """Check every value, and what goes together.

    Raises:
        ValueError: for a value that makes no sense, with what it must be.
        TypeError: for an object of the wrong kind.
    """
    frames: Any = options.frames_per_batch
    listed = isinstance(frames, Sequence) and not isinstance(frames, str)
    for value in frames if listed else [frames]:
        _positive("frames_per_batch", value)
    _positive("envs_per_worker", options.envs_per_worker)
    _positive("num_sub_threads", options.num_sub_threads)
    for name in (
        "num_workers",
        "max_frames_per_traj",
        "num_threads",
        "trajs_per_batch",
        "max_worker_rss",
    ):
        value = getattr(options, name)
        if value is not None:
            _positive(name, value)
    if options.total_frames is not None and options.total_frames != -1:
        _positive("total_frames", options.total_frames)
    for name in ("init_random_frames", "seed", "worker_idx", "max_staleness"):
        value = getattr(options, name)
        if value is not None:
            _natural(name, value)
    for name in ("timeout", "start_timeout"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive seconds, but is {value}.")
    threshold = options.preemptive_threshold
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(
            f"preemptive_threshold must lie between 0 and 1, but is {threshold}."
        )
    _one_of("cat_results", options.cat_results, (None, "stack", 0, -1))
    _one_of("traj_format", options.traj_format, ("padded", "cat"))
    _one_of("on_worker_failure", options.on_worker_failure, ("raise", "restart"))
    _one_of("start_method", options.start_method, ("forkserver", "spawn"))
    _check_calls(options)
    _check_together(options)


def _check_calls(options: "CollectorOptions") -> None:
    for name in ("postproc", "init_fn"):
        value = getattr(options, name)
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be callable, but is {value!r}.")
    chosen: Any = options.exploration_type
    if isinstance(chosen, str) and chosen.upper() not in InteractionType.__members__:
        names = ", ".join(f"ExplorationType.{name}" for name in _EXPLORATION)
        raise ValueError(f"exploration_type must be one of {names}, but is {chosen!r}.")


def _check_together(options: "CollectorOptions") -> None:
    if options.split_trajs and options.trajs_per_batch is not None:
        raise ValueError("Give split_trajs or trajs_per_batch, not both.")
    needs_ids = options.split_trajs or options.trajs_per_batch is not None
    if needs_ids and not options.track_traj_ids:
        raise ValueError("Batches by trajectory need track_traj_ids=True.")
    if needs_ids and options.cat_results is not None:
        raise ValueError(
            "Batches by trajectory have a shape of their own: leave cat_results out."
        )
    if not options.extend_buffer:
        raise ValueError(
            "extend_buffer=False (adding frame by frame) is not offered: batches "
            "reach the replay buffer whole."
        )
    extend = getattr(options.replay_buffer, "extend", None)
    if options.replay_buffer is not None and not callable(extend):
        raise TypeError(
            "replay_buffer must have a method extend, but is "
            f"{options.replay_buffer!r}."
        )
    _check_devices(options)
    _check_compact(options)
    _check_plugs(options)


def _check_devices(options: "CollectorOptions") -> None:
    for name in ("device", "storing_device", "policy_device", "env_device"):
        for choice in each_device(getattr(options, name)):
            try:
                device = torch.device(choice)
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f"{name} must be a device such as 'cpu' or 'cuda:0', but is "
                    f"{choice!r}."
                ) from error
            if device.type == "cuda" and not torch.cuda.is_available():
                raise ValueError(f"{name} is {choice}, but this torch finds no GPU.")
            if device.type == "meta":
                raise ValueError(f"{name} is 'meta', which holds no data.")
    for device in each_device(options.env_device):
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"env_device must be the CPU, where these environments run, but is "
                f"{device}. Choose storing_device and policy_device instead."
            )


def _check_compact(options: "CollectorOptions") -> None:
    shaped = (
        options.split_trajs
        or options.trajs_per_batch
        or options.cat_results is not None
    )
    if options.compact_obs and (shaped or options.replay_buffer is not None):
        raise ValueError(
            "compact_obs goes with plain batches [B, T] only, as restore_next() "
            "needs their frames in order: leave cat_results, split_trajs, "
            "trajs_per_batch and replay_buffer out, and apply them afterwards."
        )


def _check_plugs(options: "CollectorOptions") -> None:
    for name in ("weight_sync_schemes", "weight_recv_schemes"):
        if set(getattr(options, name) or ()) - {POLICY}:
            raise ValueError(
                f"{name} may name {POLICY!r} only, the module that acts, but "
                f"names {sorted(getattr(options, name))}."
            )
    if (
        options.cudagraph_policy is not False
        and options.policy_device_of(0).type != "cuda"
    ):
        raise ValueError("cudagraph_policy needs a policy on a GPU: set policy_device.")


def each_device(choice: Any) -> list[Any]:
    """Return the devices that a user's choice names: none, one or a list."""
    if choice is None:
        return []
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        return list(choice)
    return [choice]


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or value not in allowed:
        expected = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {expected}, but is {value!r}.")


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, but is {value!r}.")


def _natural(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, but is {value!r}.")
