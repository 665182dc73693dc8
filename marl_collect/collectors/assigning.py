"""What a collector and its workers begin with: a seed, and an assignment each."""

from collections.abc import Sequence

import numpy as np
import torch

from marl_collect.collectors import messages
from marl_collect.collectors.options import CollectorOptions
from marl_collect.factories import Factory


def draw_seed(seed: int | None) -> int:
    """Return ``seed``, or one drawn from torch's generator if None."""
    return int(torch.randint(2**31 - 1, ())) if seed is None else seed


def seed_torch(seed: int, first: int, generation: int) -> None:
    """Let draws of users' own modules differ by worker, and repeat.

    Args:
        seed: the collector's.
        first: index of the worker's first environment.
        generation: how often the worker was started anew.
    """
    stream = (seed, first, generation)
    torch.manual_seed(int(np.random.SeedSequence(stream).generate_state(1)[0]))


def assign(
    factories: Sequence[Sequence[Factory]], options: CollectorOptions
) -> list[messages.Assignment]:
    """Return what each worker is started with."""
    out: list[messages.Assignment] = []
    first = 0
    for index, own in enumerate(factories):
        out.append(
            messages.Assignment(
                factories=tuple(own),
                first=first,
                acting=options.acting(index),
                num_threads=options.num_sub_threads,
                init_fn=options.init_fn,
            )
        )
        first += len(own)
    return out
