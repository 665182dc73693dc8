"""Any TensorDict module as a policy, called once per frame.

If the policy does not change its input, the input is built once: its tensors alias the
environments' memory, and every call gets the same TensorDict. Otherwise each call gets
a new input with copies. ``probe`` determines which case applies and what the policy
writes; later calls are checked against its result.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, final

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type

from marl_collect.core.description import EnvDescription, Key, Row
from marl_collect.core.gradients import without_gradients
from marl_collect.core.signature import IS_INIT, PolicySignature
from marl_collect.core.tensordicts import assemble
from marl_collect.errors import PolicyError
from marl_collect.policies.device_transfer import Exchange, transfer_device
from marl_collect.policies.fused.record import same
from marl_collect.policies.noise import HeadNoise
from marl_collect.policies.probe import Probe, ProbeResult, callee, undisturbed
from marl_collect.policies.runner import Generators, PolicyRunner

Policy = Callable[[TensorDictBase], TensorDictBase | None]
_VERSION = attrgetter("_version")


@final
class ModuleRunner(PolicyRunner):
    """Runs a TensorDict module on the memory of K environments.

    Attributes:
        policy: the callable.
        description: of the environments.
        size: K.
        how: interaction type to prepare for.
        probed: what ``probe`` found. It does not depend on ``size``, and may be set.
        noise: of the policy's heads.
    """

    def __init__(
        self,
        policy: Policy,
        description: EnvDescription,
        size: int,
        device: torch.device | None = None,
        how: InteractionType | None = None,
        *,
        every_action: bool = True,
    ) -> None:
        """Run ``policy``. Call ``probe`` before anything else.

        Args:
            policy: a callable on TensorDicts ``[size]``.
            description: of the environments.
            size: K, the number of environments.
            device: device of the policy; None for the CPU.
            how: interaction type to prepare for.
            every_action: whether the policy must act for all groups.
        """
        self._every_action = every_action
        self.policy = policy
        self.description = description
        self.size = size
        self.how = how
        self._device = transfer_device(device)
        self._exchange: Exchange | None = None
        self._n_agents = description.group_sizes
        self.probed: ProbeResult
        self._resident = False
        self._noise_of_slot: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.noise = HeadNoise(policy, description, size)

    def probe(self, memory: Row) -> None:
        """Call the policy on observations to determine what it reads and writes."""
        how = set_interaction_type(self.how)
        with without_gradients(), how, undisturbed(self.policy):
            self.probed = Probe(
                self.policy,
                self.description,
                memory,
                self._device,
                every_action=self._every_action,
            ).result()

    @property
    def signature(self) -> PolicySignature:
        """The signature that ``probe`` found."""
        return self.probed.signature

    def bind(self, memory: Mapping[Key, Any]) -> None:
        """Act on ``memory`` from now on: arrays, or tensors of the policy's device."""
        signature = self.signature
        self._resident = isinstance(memory["done",], torch.Tensor)
        memory_of = {
            key: value if self._resident else torch.from_numpy(value)
            for key, value in memory.items()
        }
        observed = [*self.description.observed(), *signature.carried]
        if signature.reads_is_init:
            observed.append(IS_INIT)
        keys = [*observed, *signature.kept]
        sources = [memory_of[key] for key in keys]
        noise = [stream.tensor for stream in self.noise.streams]
        if self._resident:
            noise = [tensor.to(sources[0].device) for tensor in noise]
        elif self._device is not None:
            self._exchange = Exchange([*sources, *noise], self._device)
            # The inputs of `sources` come first, followed by the noise.
            moved = self._exchange.inputs
            sources, noise = moved[: len(keys)], moved[len(keys) :]
        tensors = dict(zip(keys, sources, strict=True))
        self._inputs = {key: tensors[key] for key in observed}
        self._kept = {key: tensors[key] for key in signature.kept}
        self._noise_there = noise
        targets = {key: memory_of[signature.place(key)] for key in signature.outputs}
        targets |= {("next", *key): memory_of[key] for key in signature.carried}
        targets |= {key: memory_of[key] for key in signature.kept if key not in targets}
        self._keys = list(targets)
        self._targets = list(targets.values())
        dtypes = self.probed.dtypes
        self._expected = [
            (target.shape, dtypes.get(key, target.dtype))
            for key, target in targets.items()
        ]
        changed = signature.outputs.keys() | signature.removed | self.probed.changed
        self._fixed = [key for key in observed if key not in changed]
        self._input = self._assemble(self._inputs)
        self._warm_up()

    def begin(self, frames: int, generators: Generators) -> None:
        """Sample the noise of our heads; other modules use torch's generator."""
        self.noise.begin(frames, generators)
        self._noise_of_slot = []
        if self._resident:
            streams = zip(self.noise.streams, self._noise_there, strict=True)
            self._noise_of_slot = [
                (there, torch.from_numpy(stream.slot).to(there.device))
                for stream, there in streams
                if stream.slot is not None
            ]

    def redraw(self, k: int, frame: int, generators: Generators) -> None:
        """Sample the noise of our heads anew for one environment."""
        self.noise.redraw(k, frame, generators)

    def act(self, frame: int) -> None:
        """Call the module and copy its outputs into the memory.

        Raises:
            PolicyError: if keys, shapes or dtypes differ from those when it was probed,
                or the module changed an input that it had not changed then.
        """
        if self._resident:
            for there, slot in self._noise_of_slot:
                there.copy_(slot[frame])
        else:
            self.noise.load(frame)
        values = self.call()
        if [(value.shape, value.dtype) for value in values] != self._expected:
            self._check_fits(values)
        self.remembers = True
        if self._exchange is not None:
            self._exchange.receive(values, self._targets)
            return
        for target, value in zip(self._targets, values, strict=True):
            target.copy_(value)

    def call(self) -> list[torch.Tensor]:
        """Call the module on the memory with the loaded noise.

        Returns:
            The outputs, in the order of ``targets``.
        """
        if self._exchange is not None:
            self._exchange.send()
        tensors, tensordict = self._inputs, self._input
        if self.probed.fresh:
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}
            everything = tensors
            if self.remembers:
                everything = tensors | {k: t.clone() for k, t in self._kept.items()}
            tensordict = self._assemble(everything)
        fixed = [tensors[key] for key in self._fixed]
        before = list(map(_VERSION, fixed))
        self.noise.give(self._noise_there)
        try:
            out = self.policy(tensordict)
        finally:
            self.noise.take_back()
        for key, tensor, version in zip(self._fixed, fixed, before, strict=True):
            if _entry(tensordict, key) is not tensor or tensor._version != version:
                raise _begins(key)
        if out is None or out is tensordict:
            values = [tensordict.get(key, None) for key in self._keys]
        else:
            values = self._returned(out, tensordict, tensors)
        if any(value is None for value in values):
            missing = self._keys[[value is None for value in values].index(True)]
            raise PolicyError(
                f"The policy did not write {'/'.join(missing)} in this frame, but it "
                "did when the collector was built: it must write the same keys in "
                "every frame."
            )
        return values

    def _returned(
        self, out: TensorDictBase, left: TensorDict, inputs: Mapping[Key, torch.Tensor]
    ) -> list[Any]:
        """Return the outputs in a TensorDict that the policy returned, or has left."""
        for key in self._fixed:
            # On a device, comparing copies would wait for it.
            if not self._resident and not _is_kept(out.get(key, None), inputs[key]):
                raise _begins(key)
        values = ((out.get(key, None), key) for key in self._keys)
        return [left.get(key, None) if v is None else v for v, key in values]

    @property
    def targets(self) -> dict[Key, torch.Tensor]:
        """Tensors in the memory to which outputs are copied, by the module's keys."""
        return dict(zip(self._keys, self._targets, strict=True))

    def explain(self) -> str:
        """Return that the module is called."""
        how = ""
        if self.probed.fresh:
            how = ", on copies, because it changes its input or keeps a reference to it"
        return f"{type(self.policy).__name__} is called once per frame{how}."

    def _assemble(self, tensors: Mapping[Key, torch.Tensor]) -> TensorDict:
        return assemble(tensors, (self.size,), self._n_agents)

    def _check_fits(self, values: list[torch.Tensor]) -> None:
        """Raise if shapes differ, or dtypes cannot be cast safely."""
        for key, value, (shape, dtype) in zip(
            self._keys, values, self._expected, strict=True
        ):
            if value.shape != shape or not torch.can_cast(value.dtype, dtype):
                raise PolicyError(
                    f"The policy wrote {'/'.join(key)} of shape {list(value.shape)}, "
                    f"{value.dtype}, but when the collector was built it was "
                    f"{list(shape)}, {dtype}: it must be the same in every frame."
                )

    def _warm_up(self) -> None:
        """Run a compiled policy once, so that it compiles before the first frame."""
        if callee(self.policy) is self.policy:
            return
        how = set_interaction_type(self.how)
        with torch.no_grad(), how, undisturbed(self.policy):
            self.call()
        self._input = self._assemble(self._inputs)


def _is_kept(value: Any, original: torch.Tensor) -> bool:
    """Return whether a policy returned an input unchanged, perhaps as a copy."""
    if value is None or value is original:
        return True
    return isinstance(value, torch.Tensor) and same(value, original)


def _entry(tensordict: Any, key: Key) -> Any:
    """Return an entry, None if there is none; faster than `TensorDict.get`."""
    value = tensordict
    for name in key:
        content = getattr(value, "_tensordict", None)
        if not isinstance(content, dict):  # Another class: lazily stacked, for example.
            return tensordict.get(key, None)
        value = content.get(name)
    return value


def _begins(key: Key) -> PolicyError:
    return PolicyError(
        f"The policy changed its input {'/'.join(key)}. It did not change it when the "
        "collector was built, so the batch has no memory for the new value. Write to "
        "another key, change a copy of the input (td.clone()), or add the key to the "
        "module's out_keys."
    )
