"""Moves batches to another device, in one copy if their memory is contiguous."""

import torch
from tensordict import TensorDictBase


def moved(batch: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return ``batch`` on another device; its old memory may change afterwards.

    A batch on a slot's memory is moved in one copy. A copy to a GPU goes through pinned
    memory and is not waited for. Other batches are copied key by key.

    Args:
        batch: on the CPU.
        device: the target.
    """
    values = batch.values(include_nested=True, leaves_only=True)
    # The observations that compact_obs stores separately are not tensors.
    leaves = [value for value in values if isinstance(value, torch.Tensor)]
    begins = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    on_gpu = device.type == "cuda"
    if len(begins) != 1:
        return batch.to(device, non_blocking=on_gpu)
    memory = leaves[0].untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(memory, 0, (memory.nbytes(),), (1,))
    if on_gpu:
        # Pinned at once, so workers may fill the slot again.
        flat = flat.pin_memory()
    there = flat.to(device, non_blocking=on_gpu, copy=True).untyped_storage()

    def again(leaf: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=leaf.dtype, device=device)
        return empty.set_(there, leaf.storage_offset(), leaf.shape, leaf.stride())

    out = batch.apply(again, device=device)
    assert out is not None
    return out
