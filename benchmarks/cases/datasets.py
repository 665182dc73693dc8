"""Forms of datasets of images: their sizes, writing, sampling and offline training.

The forms hold the same complete episodes of coins. Writing ends when the files are on
the disk. Minari is an export of the dataset, so reading it is included. A
transition is a frame and the following observation, with all keys. Rates are in bytes
of tensors in memory, which have every observation twice. Minari is read with its own
reader, which reads whole episodes.

The large dataset has 100,000 frames: 2000 frames, written 50 times. It is in the page
cache while it is read, if the machine has the memory. Behaviour cloning trains a small
network to repeat its actions; a call reads or learns from 256 transitions.
"""

import atexit
import functools
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.turns import Alternative
from tensordict import TensorDict

from cases.case import Case
from marl_collect import record
from marl_collect.cli.tasks import find_factory
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import Dataset, Writer, export_minari, open_dataset
from marl_collect.storage.files import size_of, sync_tree

TASK = "coins"
EPISODES = 4
FRAMES = 2000
REPEATS = 50
"""Of FRAMES frames, in the large dataset."""
SAMPLE, SEQUENCE = 256, 50
MINARI_ID = "forms-v0"
Read = Callable[[np.ndarray], Any]
"""Reads the frames with these ascending numbers."""


def read_dataset(path: Path) -> Read:
    """Read with a dataset's transitions."""
    transitions = open_dataset(path).transitions
    return lambda numbers: transitions[numbers]


def read_memmap(path: Path) -> Read:
    """Read with tensordict."""
    frames = TensorDict.load_memmap(path)
    return lambda numbers: frames[torch.from_numpy(numbers)]


def read_minari(_path: Path) -> Read:
    """Read the episodes of the frames with Minari."""
    import minari

    dataset = minari.load_dataset(MINARI_ID)
    about = dataset.storage.get_episode_metadata(range(dataset.total_episodes))
    ends = np.cumsum([episode["total_steps"] for episode in about])

    def read(numbers: np.ndarray) -> None:
        episodes = np.unique(np.searchsorted(ends, numbers, side="right"))
        for _ in dataset.iterate_episodes(episodes.tolist()):
            pass

    return read


@dataclass(frozen=True)
class Form:
    """A way to store episodes.

    Attributes:
        write: writes the recorded episodes to a path; returns the path written.
        read: opens what was written.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], Read]


@functools.cache
def folder() -> Path:
    """Return the folder of this process for all files."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    os.environ["MINARI_DATASETS_PATH"] = str(path / "minari")
    return path


@functools.cache
def recorded() -> Dataset:
    """Return the episodes, recorded once."""
    return record(
        folder() / "recorded",
        find_factory(TASK, {}),
        policy=None,
        episodes=EPISODES,
        num_workers=2,
        seed=0,
    )


@functools.cache
def frames() -> TensorDict:
    """Return the recorded frames in memory."""
    transitions = recorded().trajectories.transitions[:]
    return TensorDict(transitions.to_dict(), transitions.batch_size)


def size_in_memory(tensors: TensorDict) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in flatten(tensors).values())


def write_dataset(path: Path) -> Path:
    """Write a dataset of this package."""
    with Writer(path, recorded().description) as writer:
        writer.add(frames().unsqueeze(0))
    return path


def write_memmap(path: Path) -> Path:
    """Write with tensordict."""
    frames().memmap(path)
    sync_tree(path)
    return path


def export(_path: Path) -> Path:
    """Export the dataset; Minari has one folder for all its datasets."""
    shutil.rmtree(folder() / "minari" / MINARI_ID, ignore_errors=True)
    return export_minari(recorded(), MINARI_ID)


def forms() -> dict[str, Form]:
    """Return the forms whose packages are installed, by name."""
    forms = {
        "dataset": Form(write_dataset, read_dataset),
        "TensorDict memmap": Form(write_memmap, read_memmap),
    }
    if importlib.util.find_spec("minari"):
        forms["Minari, gzip"] = Form(export, read_minari)
    return forms


@functools.cache
def written(name: str) -> Path:
    """Return a form of the episodes, written once."""
    return forms()[name].write(folder() / name)


def writing(_: ExitStack) -> dict[str, Alternative]:
    """Return the writing of each form; it ends when the files are on the disk."""
    nbytes = size_in_memory(frames())
    alternatives = {}
    for name, form in forms().items():
        target = folder() / f"{name}, again"

        def call(form: Form = form, target: Path = target) -> float:
            form.write(target)
            return nbytes

        alternatives[name] = Alternative(
            call, partial(remove, target), partial(size, written(name))
        )
    return alternatives


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def size(path: Path) -> float:
    """Return the bytes of a file or folder."""
    return size_of(path) if path.is_dir() else path.stat().st_size


def sampling(_: ExitStack) -> dict[str, Alternative]:
    """Return the reading of random transitions from each form."""
    count = len(frames())
    rng = np.random.default_rng(0)

    def sample(read: Read) -> Alternative:
        return Alternative.once(
            lambda: read(np.sort(rng.choice(count - 1, SAMPLE, replace=False)))
        )

    return {name: sample(form.read(written(name))) for name, form in forms().items()}


def sequences(_: ExitStack) -> dict[str, Alternative]:
    """Return the reading of sequences from each form."""
    count = len(frames())
    nbytes = size_in_memory(frames()) / count * SEQUENCE
    rng = np.random.default_rng(0)

    def sequence(read: Read) -> Alternative:
        def call() -> float:
            read(rng.integers(count - SEQUENCE) + np.arange(SEQUENCE))
            return nbytes

        return Alternative(call)

    return {name: sequence(form.read(written(name))) for name, form in forms().items()}


@functools.cache
def large() -> Dataset:
    """Return the large dataset, written once."""
    path = folder() / "large"
    batch = recorded().trajectories.transitions[:FRAMES]
    about = recorded().description
    for _ in range(REPEATS):  # One run each, because trajectories would repeat.
        with Writer(path, about) as writer:
            writer.add(batch.unsqueeze(0))
    return open_dataset(path)


def large_sampling(_: ExitStack) -> dict[str, Alternative]:
    """Return the reading of random transitions from the large dataset."""
    return {"dataset": Alternative.once(partial(large().transitions.sample, SAMPLE))}


def large_sequences(_: ExitStack) -> dict[str, Alternative]:
    """Return the reading of sequences from the large dataset."""

    def sequence(dataset: Dataset) -> Alternative:
        begin = 0

        def call() -> float:
            nonlocal begin
            # A prime number of frames, so that windows have no frames in common.
            begin = (begin + 7919) % (len(dataset.transitions) - SEQUENCE)
            return size_in_memory(dataset.transitions[begin : begin + SEQUENCE])

        return Alternative(call)

    return {"dataset": sequence(large())}


def behaviour_cloning(_: ExitStack) -> dict[str, Alternative]:
    """Return reading and learning; the dataset's largest key is the input."""
    dataset = large()
    fields = [f for f in dataset.keys if f.key[0] != "next"]
    image = max(fields, key=lambda f: f.nbytes).key
    group = dataset.description.environment.groups[image[0]]
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 8, 4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 4, 2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, int(getattr(group.action, "n"))),  # noqa: B009 - a Discrete
    )
    transitions = dataset.transitions.select(image, (image[0], "action"))
    batch: TensorDict = transitions.sample(SAMPLE)
    pixels = batch[image].flatten(0, 1).permute(0, 3, 1, 2).float() / 255
    return cloning(network, pixels, batch[image[0], "action"], transitions)


def cloning(
    network: torch.nn.Module,
    inputs: torch.Tensor,
    actions: torch.Tensor,
    transitions: Any,
) -> dict[str, Alternative]:
    """Return the learning of a batch's actions, and the reading of a batch.

    Args:
        network: from the inputs to logits ``[..., actions]``.
        inputs: of ``SAMPLE`` transitions.
        actions: of the same.
        transitions: to read from.
    """
    network(inputs)  # Builds lazy layers.
    optimiser = torch.optim.Adam(network.parameters())

    def learn() -> None:
        logits = network(inputs)
        logits = logits.reshape(-1, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(logits, actions.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return {
        "learning": Alternative.once(learn),
        "reading": Alternative.once(partial(transitions.sample, SAMPLE)),
    }


def cases() -> list[Case]:
    """Return the rows of the episodes and of the large dataset."""
    elapsed = time.perf_counter
    return [
        Case("write", writing, "byte", clock=elapsed),
        Case("256 transitions", sampling, "sample", "ms", clock=elapsed),
        Case("sequences of 50", sequences, "byte", clock=elapsed),
        Case("large, 256 transitions", large_sampling, "sample", "ms", elapsed),
        Case("large, sequences of 50", large_sequences, "byte", clock=elapsed),
        Case("behaviour cloning", behaviour_cloning, "batch", "ms", clock=elapsed),
    ]
