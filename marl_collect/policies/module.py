"""Any TensorDict module as a policy, called once per frame on one persistent input.

The input's tensors alias the environments' memory, so nothing is built per frame:
the module is called on the same TensorDict again and again, and what it wrote is
copied into the memory. What it writes is learnt once, from a dry run on zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from marl_collect.description import EnvDescription, Field, Fields, Key, Row, allocate
from marl_collect.layout import IS_INIT
from marl_collect.policies.elsewhere import Exchange, elsewhere
from marl_collect.policies.noise import HeadNoise
from marl_collect.policies.runner import Generators, PolicyRunner
from marl_collect.tensordicts import assemble, flatten

Policy = Callable[[TensorDictBase], TensorDictBase | None]


@final
class ModuleRunner(PolicyRunner):
    """Runs a TensorDict module on the memory of K environments."""

    def __init__(
        self,
        policy: Policy,
        description: EnvDescription,
        size: int,
        device: torch.device | None = None,
    ) -> None:
        """Dry-run ``policy`` on a fake frame of ``size`` environments.

        Args:
            policy: a callable on TensorDicts ``[size]``.
            description: of the environments.
            size: K, how many environments it acts for.
            device: where the policy lives, if not on the CPU.

        Raises:
            KeyError: naming an input that nobody provides, or an action missing
                from the output.
            ValueError: naming an output of the wrong shape.
        """
        self._policy = policy
        self._description = description
        self._size = size
        self._device = elsewhere(device)
        self._exchange: Exchange | None = None
        self._n_agents = {name: g.n_agents for name, g in description.groups.items()}
        wanted = input_keys(policy)
        self._extra = _unprovided(wanted, output_keys(policy), description)
        self._outputs, self._carried = self._learn()
        self.noise = HeadNoise(policy, description, size)

    @property
    def outputs(self) -> Fields:
        """What the dry run saw at the root."""
        return self._outputs

    @property
    def carried(self) -> Fields:
        """The inputs that the policy itself writes under ``next``."""
        return self._carried

    @property
    def reads_is_init(self) -> bool:
        """Whether ``is_init`` is among the policy's inputs."""
        return IS_INIT in self._extra

    def bind(self, memory: Row) -> None:
        """Alias ``memory`` as the policy's input."""
        observed = [*self._description.observed(), *self._carried]
        if self.reads_is_init:
            observed.append(IS_INIT)
        tensors = {key: torch.from_numpy(memory[key]) for key in observed}
        noise = [stream.tensor for stream in self.noise.streams]
        if self._device is not None:
            self._exchange = Exchange([*tensors.values(), *noise], self._device)
            there = self._exchange.inputs
            # The first of them are those of `tensors`, and the rest is the noise.
            tensors, noise = (
                dict(zip(tensors, there, strict=False)),
                there[len(tensors) :],
            )
        self._input, self._noise_there = self._assemble(tensors), noise
        targets = {key: memory[key] for key in self._outputs}
        targets |= {("next", *key): memory[key] for key in self._carried}
        self._keys = list(targets)
        self._targets = [torch.from_numpy(array) for array in targets.values()]

    @property
    def policy(self) -> Policy:
        """What is called."""
        return self._policy

    def begin(self, frames: int, generators: Generators) -> None:
        """Draw the noise of our heads; other modules use torch's generator."""
        self.noise.begin(frames, generators)

    def act(self, frame: int) -> None:
        """Call the module and copy what it wrote into the memory."""
        self.noise.load(frame)
        values = self.call()
        if self._exchange is not None:
            self._exchange.receive(values, self._targets)
            return
        for target, value in zip(self._targets, values, strict=True):
            target.copy_(value)

    def call(self) -> list[torch.Tensor]:
        """Call the module on the memory, with the noise that is loaded.

        Returns:
            What it wrote, in the order of :attr:`targets`.
        """
        given = self._input
        if self._exchange is not None:
            self._exchange.send()
        self.noise.give(self._noise_there)
        try:
            out = self._policy(given)
        finally:
            self.noise.take_back()
        get = (given if out is None else out).get
        return [get(key) for key in self._keys]

    @property
    def targets(self) -> dict[Key, torch.Tensor]:
        """Where in the memory the module's outputs go, by the keys it writes."""
        return dict(zip(self._keys, self._targets, strict=True))

    def explain(self) -> str:
        """Say that the module is called."""
        return f"{type(self._policy).__name__} is called once per frame."

    def _assemble(self, tensors: dict[Key, torch.Tensor]) -> TensorDict:
        return assemble(tensors, (self._size,), self._n_agents)

    def _learn(self) -> tuple[Fields, Fields]:
        given = self._fake()
        before = set(flatten(given))
        out = self._policy(given)
        written = flatten(given if out is None else out)
        description = self._description
        carried: dict[Key, Field] = {}
        outputs: dict[Key, Field] = {}
        for key, tensor in written.items():
            if any(name.startswith("_") for name in key):
                continue
            if key[0] == "next":
                if key[1:] in self._extra:
                    carried[key[1:]] = self._field(key, tensor)
            elif key not in before:
                outputs[key] = self._field(key, tensor)
        self._check_actions(outputs)
        # The action's dtype is the environment's, whatever the policy computes in.
        return outputs | description.actions(), carried

    def _fake(self) -> TensorDict:
        memory = allocate(self._description.observed(), (self._size,))
        for key, array in memory.items():
            if key[1:] in (("action_mask",), ("mask",)):
                array.fill(True)
        tensors = {key: torch.from_numpy(array) for key, array in memory.items()}
        if self.reads_is_init:
            tensors[IS_INIT] = torch.ones(self._size, 1, dtype=torch.bool)
        fake = self._assemble(tensors)
        missing = self._extra - {IS_INIT}
        if missing:
            # The module tells the shape of its own state by what it writes from
            # zeros that broadcast; recurrent modules say it themselves.
            for key, shape in state_shapes(self._policy, missing).items():
                fake.set(key, torch.zeros(self._size, *shape))
        return fake if self._device is None else fake.to(self._device)

    def _field(self, key: Key, tensor: torch.Tensor) -> Field:
        batch = self._size
        if tensor.ndim < 1 or tensor.shape[0] != batch:
            raise ValueError(
                f"The policy's output {'/'.join(key)} must begin with the batch of "
                f"{batch} environments, but has shape {list(tensor.shape)}."
            )
        array: NDArray[Any] = tensor.detach().cpu().numpy()
        return Field(tuple(tensor.shape[1:]), np.dtype(array.dtype))

    def _check_actions(self, outputs: Fields) -> None:
        for key, expected in self._description.actions().items():
            where = "/".join(key)
            if key not in outputs:
                found = sorted("/".join(k) for k in outputs)
                raise KeyError(
                    f"The policy must write the action {where}, but wrote {found}. "
                    "Name it among the module's out_keys."
                )
            if outputs[key].shape != expected.shape:
                raise ValueError(
                    f"The policy's action {where} has shape "
                    f"{list(outputs[key].shape)} per environment, but "
                    f"{self._description.name} expects {list(expected.shape)}, "
                    f"{expected.dtype}."
                )
            one_hot = self._description.groups[key[0]].one_hot
            written = outputs[key].dtype
            if expected.dtype.kind in "iu" and written.kind == "f" and not one_hot:
                # Truncating would take the first action, whatever was meant.
                raise TypeError(
                    f"The policy's action {where} has dtype {written}, but "
                    f"{self._description.name} expects integers, {expected.dtype}: "
                    "choose by argmax, or sample from a distribution."
                )


def input_keys(policy: Any) -> set[Key]:
    """Return the ``in_keys`` of a module, as tuples; none if it does not tell."""
    return _keys(getattr(policy, "in_keys", ()))


def output_keys(policy: Any) -> set[Key]:
    """Return the ``out_keys`` of a module, as tuples; none if it does not tell."""
    return _keys(getattr(policy, "out_keys", ()))


def state_shapes(policy: Any, keys: set[Key]) -> dict[Key, tuple[int, ...]]:
    """Return the shape, per environment, of each state that ``policy`` carries.

    Recurrent modules tell it as ``state_shapes``: a mapping of in_keys.

    Raises:
        KeyError: naming the keys of which no shape is known.
    """
    shapes: dict[Key, tuple[int, ...]] = {}
    modules = policy.modules() if isinstance(policy, torch.nn.Module) else ()
    for module in modules:
        told = getattr(module, "state_shapes", None)
        if told is not None:
            shapes |= {_key(key): tuple(shape) for key, shape in told.items()}
    unknown = sorted("/".join(key) for key in keys - shapes.keys())
    if unknown:
        raise KeyError(
            f"The policy carries {unknown} from frame to frame, but no module in it "
            "tells their shapes. Give the recurrent module an attribute "
            "`state_shapes`: {in_key: shape per environment}."
        )
    return {key: shapes[key] for key in keys}


def _unprovided(
    wanted: set[Key], written: set[Key], description: EnvDescription
) -> set[Key]:
    observed = description.observed()
    provided = set(observed) | {key[:n] for key in observed for n in range(1, len(key))}
    extra = wanted - provided
    carried = {key for key in extra if ("next", *key) in written}
    unknown = extra - carried - {IS_INIT}
    if unknown:
        raise KeyError(
            f"The policy reads {sorted('/'.join(k) for k in unknown)}, but "
            f"{description.name} provides {sorted('/'.join(k) for k in observed)}. "
            "Change the module's in_keys."
        )
    return carried | (extra & {IS_INIT})


def _keys(keys: Sequence[Any]) -> set[Key]:
    return {_key(key) for key in keys}


def _key(key: Any) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)
