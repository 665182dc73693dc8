"""Which options go together, and which objects can be used."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from marl_collect.collectors.options import BatchOptions, WorkerOptions

POLICY = "policy"
"""The only model that acts: what weight schemes are named after."""


def check_workers(options: "WorkerOptions") -> None:
    """Check where policies act.

    Raises:
        ValueError: for a device that does not exist.
    """
    _check_devices("device", options.device)
    _check_devices("policy_device", options.policy_device)
    if (
        options.cudagraph_policy is not False
        and options.policy_device_of(0).type != "cuda"
    ):
        raise ValueError("cudagraph_policy needs a policy on a GPU: set policy_device.")


def check_batches(options: "BatchOptions") -> None:
    """Check how batches are handed out.

    Raises:
        ValueError: for options that exclude each other, or a device that does not
            exist.
        TypeError: for a buffer that cannot be extended.
    """
    _check_devices("storing_device", options.storing_device)
    if options.split_trajs and options.trajs_per_batch is not None:
        raise ValueError("Give split_trajs or trajs_per_batch, not both.")
    needs_ids = options.split_trajs or options.trajs_per_batch is not None
    if needs_ids and not options.track_traj_ids:
        raise ValueError("Batches by trajectory need track_traj_ids=True.")
    if needs_ids and options.cat_results is not None:
        raise ValueError(
            "Batches by trajectory have a shape of their own: leave cat_results out."
        )
    extend = getattr(options.replay_buffer, "extend", None)
    if options.replay_buffer is not None and not callable(extend):
        raise TypeError(
            "replay_buffer must have a method extend, but is "
            f"{options.replay_buffer!r}."
        )
    shaped = needs_ids or options.cat_results is not None
    if options.compact_obs and (shaped or options.replay_buffer is not None):
        raise ValueError(
            "compact_obs goes with plain batches [B, T] only, as restore_next() "
            "needs their frames in order: leave cat_results, split_trajs, "
            "trajs_per_batch and replay_buffer out, and apply them afterwards."
        )
    for name in ("weight_sync_schemes", "weight_recv_schemes"):
        if set(getattr(options, name) or ()) - {POLICY}:
            raise ValueError(
                f"{name} may name {POLICY!r} only, the module that acts, but "
                f"names {sorted(getattr(options, name))}."
            )


def each_device(choice: Any) -> list[Any]:
    """Return the devices that a user's choice names: none, one or a list."""
    if choice is None:
        return []
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        return list(choice)
    return [choice]


def _check_devices(name: str, choice: Any) -> None:
    for chosen in each_device(choice):
        try:
            device = torch.device(chosen)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"{name} must be a device such as 'cpu' or 'cuda:0', but is {chosen!r}."
            ) from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"{name} is {chosen}, but this torch finds no GPU.")
        if device.type == "meta":
            raise ValueError(f"{name} is 'meta', which holds no data.")
