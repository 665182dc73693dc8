"""Determines what a policy reads and writes by calling it on real observations.

Probing has no side effects where possible: it calls a copy of the policy, and restores
random generators and buffers afterwards.
"""

import copy
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import nn
from torch.nn.parameter import is_lazy

from marl_collect.buffers.layout import STEP_COUNT, TRAJ_IDS, VERSION
from marl_collect.core.description import FLAGS, EnvDescription, Field, Key, Row
from marl_collect.core.signature import IS_INIT, PolicySignature, is_private
from marl_collect.core.tensordicts import assemble, flatten, key_path
from marl_collect.policies.fused.record import (
    OperationObserver,
    TensorOp,
    same,
    tensors,
)
from marl_collect.weights.tensor_parts import copied_parts, is_dense, strided_parts

Tensors = Mapping[Key, torch.Tensor]
Policy = Callable[[TensorDictBase], TensorDictBase | None]
_USES: Callable[[int], int] = torch._C._storage_Use_Count  # noqa: SLF001


@final
@dataclass(frozen=True)
class ProbeResult:
    """The result of probing a policy.

    Attributes:
        signature: keys, shapes and dtypes.
        dtypes: dtypes of the outputs, by key.
        changed: inputs that the policy writes to, even if with equal values.
        fresh: whether each call needs its own input, because the policy changes its
            input or keeps a reference to it.
    """

    signature: PolicySignature
    dtypes: Mapping[Key, torch.dtype]
    changed: frozenset[Key]
    fresh: bool


@contextmanager
def undisturbed(policy: Any) -> Iterator[None]:
    """Restore random generators and what a call may write: buffers, frozen weights."""
    is_module = isinstance(policy, nn.Module)
    tensors = [*policy.parameters(), *policy.buffers()] if is_module else []
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    tensors = [t for t in tensors if not (t.requires_grad or is_lazy(t))]
    saved = [tensor.detach().clone() for tensor in tensors]
    ours, theirs = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)  # noqa: NPY002
            with torch.no_grad():
                for tensor, before in zip(tensors, saved, strict=True):
                    if not same(tensor, before):
                        tensor.copy_(before)


def input_keys(policy: Any) -> set[Key]:
    """Return the ``in_keys`` of a module, as tuples; empty if it has none."""
    return {key_path(key) for key in getattr(policy, "in_keys", None) or ()}


def output_keys(policy: Any) -> set[Key]:
    """Return the ``out_keys`` of a module, as tuples; empty if it has none."""
    return {key_path(key) for key in getattr(policy, "out_keys", None) or ()}


def state_shapes(policy: Any) -> dict[Key, tuple[int, ...]]:
    """Return the shapes, per environment, that modules declare in ``state_shapes``."""
    shapes: dict[Key, tuple[int, ...]] = {}
    modules = policy.modules() if isinstance(policy, nn.Module) else (policy,)
    for module in modules:
        declared = getattr(module, "state_shapes", None)
        if isinstance(declared, Mapping):
            shapes |= {key_path(key): tuple(shape) for key, shape in declared.items()}
    return shapes


def state_dtype(policy: Any) -> torch.dtype:
    """Return the dtype of the first state: that of the weights, or torch's default."""
    weights = policy.parameters() if isinstance(policy, nn.Module) else ()
    dtypes = (weight.dtype for weight in weights if weight.dtype.is_floating_point)
    return next(dtypes, torch.get_default_dtype())


def callee(policy: Any) -> Any:
    """Return the callable that ``torch.compile`` wrapped, or ``policy`` itself."""
    while True:
        inner = getattr(policy, "_orig_mod", None)
        inner = inner or getattr(policy, "_torchdynamo_orig_callable", None)
        if inner is None:
            return policy
        policy = inner


@final
class Probe:
    """Calls a policy on observations, to determine what it reads and writes."""

    def __init__(
        self,
        policy: Any,
        description: EnvDescription,
        memory: Row,
        device: torch.device | None,
        *,
        every_action: bool,
    ) -> None:
        """Prepare the calls.

        Args:
            policy: a callable on TensorDicts.
            description: of the environments.
            memory: ``[K, ...]`` per key, where each environment begins an episode.
            device: device of the policy; None for the CPU.
            every_action: whether the policy must act for all groups, or for one at
                least.
        """
        self._acting = _double(policy)
        self._every_action = every_action
        self._description = description
        self._size = len(memory["done",])
        self._device = device
        self._n_agents = description.group_sizes
        self._observed = {
            key: torch.from_numpy(memory[key]) for key in description.observed()
        }
        self._wanted = input_keys(policy)
        self._declared = output_keys(policy)
        self._state_shapes = state_shapes(policy)
        self._state_dtype = state_dtype(policy)
        self._needs_init = IS_INIT in self._init_keys(policy)

    def result(self) -> ProbeResult:
        """Call the policy; wrap this in ``undisturbed``.

        Raises:
            KeyError: if the environment lacks an input, or the output lacks an action;
                names the key.
            TypeError, ValueError: if an output cannot be stored; names the key.
        """
        states = {
            key: torch.zeros(self._size, *shape, dtype=self._state_dtype, device="cpu")
            for key, shape in self._state_shapes.items()
            if key in self._unprovided() or ("next", *key) in self._declared
        }
        try:
            first = self._call(states, begins=True)
        except Exception as error:
            self._explain(error, states)
            shapes = ", ".join(
                f"{'/'.join(key)} {list(tensor.shape)}"
                for key, tensor in self._observed.items()
                if key in self._wanted or not self._wanted
            )
            error.add_note(
                f"The policy was called on observations of {self._description.name}, "
                f"[environments, agents, ...] in a group: {shapes}."
            )
            raise
        self._check_provided(first, states)
        # The next frame: states and outputs at the root have values now.
        states = {
            key[1:]: torch.zeros_like(value)
            for key, value in self._stored(first).items()
            if key[0] == "next"
        }
        left = {
            key: value
            for key, value in self._stored(first).items()
            if key[0] != "next" and key not in self._observed
        }
        second = self._call(left | states, begins=False)
        self._check_alike(first, second)
        result = self._probe_result(first, second, states.keys())
        self._check_actions(result.signature.outputs)
        return result

    def _init_keys(self, policy: Any) -> set[Key]:
        keys = set(self._wanted)
        for module in policy.modules() if isinstance(policy, nn.Module) else (policy,):
            name = getattr(module, "is_init_key", None)
            if isinstance(name, (str, tuple)):
                keys.add(key_path(name))
        nested = {key for key in keys if key[-1:] == IS_INIT != key}
        # An environment may have its own, as with TorchRL's InitTracker.
        unknown = sorted(map("/".join, nested - set(self._description.observed())))
        if unknown:
            raise KeyError(
                f"The policy reads {unknown}, but is_init exists only at the root, "
                "because an episode begins for all agents at once: read "
                '"is_init" at the root.'
            )
        return keys - nested

    def _unprovided(self) -> set[Key]:
        observed = self._description.observed()
        provided = set(observed) | {
            key[:n] for key in observed for n in range(1, len(key))
        }
        return self._wanted - provided - {IS_INIT}

    def _call(self, further: Tensors, *, begins: bool) -> "_Call":
        inputs = self._observed | dict(further)
        inputs[IS_INIT] = torch.full((self._size, 1), begins, device="cpu")
        inputs = {key: self._there(tensor) for key, tensor in inputs.items()}
        before = {key: tensor.clone() for key, tensor in inputs.items()}
        versions = {key: tensor._version for key, tensor in inputs.items()}
        tensordict = assemble(inputs, (self._size,), self._n_agents)
        call = _Call(inputs)
        watch(tensordict, call.looked_up)
        with call:
            out = self._acting(tensordict)
        if out is not None and not is_tensor_collection(out):
            raise TypeError(
                "The policy must return a TensorDict, or None if it writes into its "
                f"input, but returned {type(out).__name__}."
            )
        left = flatten(tensordict)
        call.changed = {
            key
            for key, tensor in inputs.items()
            if left.get(key) is not tensor
            or tensor._version != versions[key]
            or not same(tensor, before[key])
        }
        written = dict(left)
        if out is not None and out is not tensordict:
            written |= flatten(out)
        call.removed = inputs.keys() - written.keys()
        written = {
            key: tensor
            for key, tensor in written.items()
            if key in call.changed
            or not (tensor is inputs.get(key) or self._is_copy(key, tensor, before))
        }
        call.passed_on(written)
        call.written = {k: self._here(k, tensor) for k, tensor in written.items()}
        self._check_own(call.written, before)
        call.forget()
        del tensordict, out, left, written
        call.held = _is_held(inputs)
        return call

    def _is_copy(self, key: Key, tensor: Any, before: Tensors) -> bool:
        """Return whether an entry of a TensorDict that was copied is not changed.

        Of one policy, the batch has the copy, so that later calls may change it. What
        one of several policies returns for observations cannot be stored.
        """
        if self._every_action or key not in self._observed:
            return False
        return isinstance(tensor, torch.Tensor) and same(tensor, before[key])

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        return copied if self._device is None else copied.to(self._device)

    def _here(self, key: Key, tensor: Any) -> torch.Tensor:
        where = "/".join(key)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"The policy's output {where} must be a tensor, but is of type "
                f"{type(tensor).__name__}."
            )
        if not is_dense(tensor) or tensor.is_nested:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise TypeError(
                f"The policy's output {where} must be a dense tensor, but is "
                f"{'nested' if tensor.is_nested else kind}: convert it, for example "
                "with .to_dense(), .dequantize() or .to_padded_tensor(0)."
            )
        if tensor.ndim < 1 or tensor.shape[0] != self._size:
            raise ValueError(
                f"The policy's output {where} must begin with the batch of "
                f"{self._size} environments, but has shape {list(tensor.shape)}."
            )
        return tensor.detach().cpu().clone()

    def _check_own(self, values: Tensors, before: Tensors) -> None:
        """Raise for outputs at keys that the collector writes."""
        for key, value in values.items():
            where = "/".join(key)
            if key[0] == TRAJ_IDS[0] or key in (STEP_COUNT, VERSION):
                raise ValueError(
                    f"The policy writes {where}, which the collector writes itself: "
                    "choose another key."
                )
            if _is_ours(key) and key in before and not same(value, before[key].cpu()):
                raise ValueError(
                    f"The policy changes {where}, which belongs to the environment: "
                    "write to another key."
                )

    def _stored(self, call: "_Call") -> dict[Key, torch.Tensor]:
        """Return what a call wrote, without keys that the environment owns."""
        row = {("next", *key) for key in self._description.row()}
        return {
            key: value
            for key, value in call.written.items()
            if key not in row and not _is_ours(key)
        }

    def _probe_result(
        self, first: "_Call", second: "_Call", provided: Collection[Key]
    ) -> ProbeResult:
        description = self._description
        observed, actions = description.observed(), description.actions()
        values = self._stored(first) | self._stored(second)
        read = first.looked_up | first.read | second.read | self._wanted | set(provided)
        # A key written both at the root and under "next", but not read, is no state.
        ahead = {key[1:] for key in values if key[0] == "next"}
        states = {key for key in ahead if key in read or key not in values}
        carried = {key: self._field(("next", *key), values) for key in states}
        # Creating a missing state does not count as changing it.
        roots = [
            key
            for key in values
            if key[:1] != ("next",) or key[1:] not in states
            if key not in states or key in second.changed
        ]
        kept = second.read & set(roots) - observed.keys() - states
        outputs = {
            key: self._field(key, values)
            for key in roots
            if key in kept or not is_private(key, description)
        }
        removed = {
            key
            for key in first.removed | second.removed
            if not _is_ours(key) and (key in observed or key in states)
        }
        # Declared outputs may be written in later frames, even if not in these calls.
        promised = {
            key for key in self._declared & observed.keys() if not _is_ours(key)
        }
        outputs |= {key: observed[key] for key in promised - outputs.keys() - removed}
        taken = (description.row().keys() | states) - actions.keys()
        provided = observed.keys() | states | {IS_INIT}
        changed = frozenset((first.changed | second.changed) & provided)
        return ProbeResult(
            signature=PolicySignature(
                outputs=outputs,
                carried=carried,
                kept={key: outputs[key] for key in kept},
                removed=frozenset(removed),
                reads_is_init=self._needs_init or IS_INIT in read,
                apart=frozenset(outputs.keys() & taken),
                private=frozenset(
                    key
                    for key in outputs.keys() | carried
                    if is_private(key, description)
                ),
            ),
            dtypes={key: value.dtype for key, value in values.items()},
            changed=changed,
            fresh=bool(changed or promised or kept or first.held or second.held),
        )

    def _check_actions(self, outputs: Collection[Key]) -> None:
        actions = list(self._description.actions())
        if not self._every_action:
            # All actions of the groups for which it acts, and of one group at least.
            groups = {key[0] for key in actions if key in outputs}
            actions = [key for key in actions if key[0] in groups] or actions
        for key in actions:
            if key not in outputs:
                written = sorted("/".join(key) for key in outputs)
                raise KeyError(
                    f"The policy must write the action {'/'.join(key)}, but wrote "
                    f"{written}. Add it to the module's out_keys."
                )

    def _field(self, key: Key, values: Tensors) -> Field:
        tensor = values[key]
        if key in self._description.actions():
            return self._action(key, tensor)
        try:
            dtype = tensor.numpy().dtype
        except TypeError:
            raise TypeError(
                f"The policy's output {'/'.join(key)} has dtype {tensor.dtype}, which "
                "batches cannot store, because NumPy has no such dtype: convert it to "
                "torch.float32 with .float()."
            ) from None
        return Field(tuple(tensor.shape[1:]), dtype)

    def _action(self, key: Key, written: torch.Tensor) -> Field:
        expected = self._description.actions()[key]
        where = "/".join(key)
        if tuple(written.shape[1:]) != expected.shape:
            advice = ""
            if tuple(written.shape[1:-1]) == expected.shape:  # A value of each action.
                advice = " Take the argmax, or sample from a distribution."
            raise ValueError(
                f"The policy's action {where} has shape "
                f"{list(written.shape[1:])} per environment, but "
                f"{self._description.name} expects {list(expected.shape)}, "
                f"{expected.dtype}.{advice}"
            )
        one_hot = self._description.groups[key[0]].one_hot
        whole = expected.dtype.kind in "biu"
        if whole and written.is_floating_point() and not one_hot:
            # Truncation would turn probabilities into action 0.
            dtype = str(written.dtype).removeprefix("torch.")
            raise TypeError(
                f"The policy's action {where} has dtype {dtype}, but "
                f"{self._description.name} expects integers, {expected.dtype}: "
                "take the argmax, or sample from a distribution."
            )
        # Actions are stored with the dtype of the environment.
        return expected

    def _explain(self, error: Exception, states: Tensors) -> None:
        """Raise a KeyError if missing inputs may have caused the error."""
        missing = self._unprovided() - states.keys()
        ahead = {key for key in missing if ("next", *key) in self._declared}
        if missing - ahead and isinstance(error, (KeyError, TypeError, AttributeError)):
            raise self._not_provided(missing - ahead) from error
        if ahead:
            raise KeyError(
                f"The policy carries {sorted('/'.join(key) for key in ahead)} from "
                "frame to frame. It cannot be called without them, and none of its "
                "modules declares their shapes. Give the recurrent module an attribute "
                "`state_shapes`: {in_key: shape per environment}."
            ) from error

    def _check_provided(self, call: "_Call", states: Tensors) -> None:
        known = {key[1:] for key in call.written if key[0] == "next"}
        known |= set(call.written) | states.keys()
        unknown = self._unprovided() - known
        unknown -= {key[:n] for key in known for n in range(1, len(key))}
        if unknown:
            raise self._not_provided(unknown)

    def _not_provided(self, keys: set[Key]) -> KeyError:
        available = sorted("/".join(key) for key in self._description.observed())
        return KeyError(
            f"The policy reads {sorted('/'.join(k) for k in keys)}, but "
            f"{self._description.name} provides {available}. "
            "Change the module's in_keys, or build a policy for this environment."
        )

    def _check_alike(self, first: "_Call", second: "_Call") -> None:
        """Check that both calls wrote the same shapes and dtypes."""
        for key in first.written.keys() & second.written.keys():
            one, two = first.written[key], second.written[key]
            if one.shape != two.shape or one.dtype != two.dtype:
                raise ValueError(
                    f"The policy's output {'/'.join(key)} has shape {list(one.shape)}, "
                    f"{one.dtype}, in the first frame, but {list(two.shape)}, "
                    f"{two.dtype}, in the second: it must be the same in every frame."
                )


class _Call(OperationObserver):
    """The effects of one call of the policy, which is made in its ``with`` block.

    Copies and views are tracked; making one does not count as reading the input.

    Attributes:
        looked_up: keys that were looked up in the TensorDict, present or not.
        read: keys of inputs that an operation read.
        written: outputs by key, on the CPU.
        removed: inputs that it removed.
        changed: inputs that it replaced, removed or wrote to.
        held: whether it kept a reference to an input.
    """

    written: dict[Key, torch.Tensor]
    removed: set[Key]
    changed: set[Key]
    held: bool

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.looked_up: set[Key] = set()
        self.read: set[Key] = set()
        self._keys = {
            memory: key for key, tensor in inputs.items() for memory in _memory(tensor)
        }
        self._copies: list[Any] = []

    def ran(self, operation: TensorOp) -> None:
        """Record what the operation read."""
        sources = {
            self._keys[memory]
            for tensor in tensors((operation.args, operation.kwargs))
            for memory in _memory(tensor)
            if memory in self._keys
        }
        if sources:
            made = {m for tensor in tensors(operation.result) for m in _memory(tensor)}
            if operation.function in _COPIES and len(sources) == 1:
                # No other tensor may have its memory.
                self._copies.append(operation.result)
                self._keys |= dict.fromkeys(made, *sources)
            elif not made or not made <= self._keys.keys():
                self.read |= sources

    def passed_on(self, written: Mapping[Key, Any]) -> None:
        """Record inputs that are also outputs, under another key."""
        for key, value in written.items():
            for memory in _memory(value) if isinstance(value, torch.Tensor) else ():
                source = self._keys.get(memory, key)
                if source != key:
                    self.read.add(source)

    def forget(self) -> None:
        """Release all tensors."""
        self._copies.clear()


_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)  # noqa: SLF001


def watch(tensordict: TensorDict, looked_up: set[Key], prefix: Key = ()) -> None:
    """Add every key looked up in ``tensordict`` from now on to ``looked_up``."""
    content = tensordict._tensordict  # noqa: SLF001 - has no public accessor
    for name, value in content.items():
        if isinstance(value, TensorDict):
            watch(value, looked_up, (*prefix, name))
    tensordict._tensordict = _Watched(content, prefix, looked_up)  # noqa: SLF001


class _Watched(dict[str, Any]):
    """The content of a TensorDict; records keys that are looked up before being set."""

    def __init__(
        self, content: Mapping[str, Any], prefix: Key, looked_up: set[Key]
    ) -> None:
        super().__init__(content)
        self._prefix, self._looked_up = prefix, looked_up
        self._set: set[object] = set()

    def _ask(self, name: object) -> None:
        if name not in self._set:
            self._looked_up.add((*self._prefix, str(name)))

    def __getitem__(self, name: str) -> Any:
        self._ask(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._ask(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._ask(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._ask(name)
        return super().pop(name, *default)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set; later reads of this key return the policy's own value."""
        self._set.add(name)
        super().__setitem__(name, value)


def _double(policy: Any) -> Any:
    """Return a copy that shares parameters, or ``policy`` if it cannot be copied."""
    policy = callee(policy)
    weights = list(policy.parameters()) if isinstance(policy, nn.Module) else []
    if any(map(is_lazy, weights)):
        return policy  # The first call creates its weights.
    shared = copied_parts(policy) | {id(weight): weight for weight in weights}
    try:
        return copy.deepcopy(policy, shared)
    except Exception:  # noqa: BLE001 - copying user code can raise anything
        return policy


def _is_held(inputs: dict[Key, torch.Tensor]) -> bool:
    """Return whether a reference to one of ``inputs``, or a view, still exists."""
    # The last entry is a reference count of a tensor that was never shared.
    held = {**inputs, (): torch.zeros(1, device="cpu")}
    inputs.clear()
    counts = [sys.getrefcount(held[key]) for key in held]
    uses = [_USES(held[key].untyped_storage()._cdata) for key in held]  # noqa: SLF001
    return max(counts) > counts[-1] or max(uses) > uses[-1]


def _memory(tensor: torch.Tensor) -> list[int]:
    """Return identities of the memory that holds a tensor's values."""
    parts = strided_parts(tensor)
    return [part.untyped_storage()._cdata for part in parts]  # noqa: SLF001


def _is_ours(key: Key) -> bool:
    return key[-1] in FLAGS or key == IS_INIT
