"""The policy as the trainer holds it: which module it is, and which weights count."""

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, final

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn.parameter import is_lazy

from marl_collect.core.description import EnvDescription, allocate
from marl_collect.core.random_actions import RandomPolicy
from marl_collect.core.tensordicts import assemble
from marl_collect.errors import warn
from marl_collect.policies.wrap import on_tensordicts, takes_tensordicts
from marl_collect.weights.materialize import (
    fill_in_place,
    has_values,
    infer_lazy,
    lazy_tensors,
    materialize,
    meta_tensors,
)
from marl_collect.weights.module_settings import Settings, SettingsWatch, structure
from marl_collect.weights.module_tensors import is_meta
from marl_collect.weights.module_walk import WeightWalk
from marl_collect.weights.shared import WeightLayout
from marl_collect.weights.skeleton import weight_tensors

_UNNOTICED = 2
_ALL = "policy"
_INNER = "module."
_UPDATE = "update_policy_weights_()"
_VERSION = attrgetter("_version")


@final
class TrainerPolicy:
    """The module whose weights are published, and which of its tensors these are.

    Attributes:
        module: the module, None if the policy lives in the workers only.
        layout: of the weights as the workers have them; None without any.
    """

    def __init__(self, module: Any, given: Any = None) -> None:
        """Hold ``module``, which has its weights.

        Args:
            module: as it acts.
            given: as the user passed it, maybe wrapped in ``module``, maybe without
                the weights that ``module`` has.
        """
        self.module = module
        self.layout: WeightLayout | None = None
        inner = module.module if isinstance(module, TensorDictModule) else None
        self._wrapped = given if given is not None and given is inner else None
        self._walk: WeightWalk | None = None
        self._watch: SettingsWatch | None = None
        if isinstance(module, nn.Module):
            self.layout = WeightLayout.of(module)
            self._walk = WeightWalk(module)
            self._watch = SettingsWatch(module)
            self._structure = structure(module)
        self._hold({} if self._walk is None else self._walk.tensors())
        self._copied = _Copied.of(given, module)
        self._published = self._marks()
        self._unnoticed = 0
        self._warned = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights that are published."""
        return () if self.layout is None else self.layout.names

    def tensors(self, source: Any = None) -> list[torch.Tensor]:
        """Return the weights to publish, in the order of the layout.

        Args:
            source: a module, a state_dict, a TensorDict; None for the module held.

        Raises:
            RuntimeError: if there are no weights to publish.
            KeyError: naming tensors that are missing or surplus.
            ValueError: naming tensors of another shape or dtype, or submodules of
                another type than at the start.
        """
        if source is None and self.module is None:
            raise RuntimeError(
                "The policy was built by policy_factory, so this process has no "
                "weights of it: pass them to update_policy_weights_(weights)."
                if self.layout is not None
                else "The policy has no weights to update."
            )
        if self.layout is None:
            raise RuntimeError("The policy has no weights to update.")
        if source is None or source is self.module or source is self._wrapped:
            return self._own_tensors(self.layout)
        if self._wrapped is not None and isinstance(source, nn.Module):
            # A module like the user's own, which was wrapped for him.
            source = {f"{_INNER}{n}": t for n, t in weight_tensors(source).items()}
        return self.layout.tensors_of(source, _UPDATE)

    def _own_tensors(self, layout: WeightLayout) -> list[torch.Tensor]:
        """Return the weights of the module itself, as they are now."""
        # Asked again: a parameter may have been replaced, not changed in place.
        assert self._walk is not None
        weights = self._walk.tensors()
        same = weights is self._weights
        if not same:
            self._check_structure()
            self._hold(weights)
            assert self._watch is not None
            self._watch.rescan()
        if self._copied is not None:
            self._copied.warn_if_trained()
        if self._held_names != layout.names:
            # Named by the module, so that aliases of tied weights are compared too.
            return layout.tensors_of(self.module, "The policy")
        if not same or not layout.fits(self._held):
            layout.check(self._held, "The policy")
        return list(self._held)

    def _check_structure(self) -> None:
        before, now = self._structure, structure(self.module)
        if now == before:
            return
        changes = [
            f"{path or 'the policy'} is {now.get(path, 'missing')}, but was "
            f"{before.get(path, 'missing')}"
            for path in {**before, **now}
            if now.get(path) != before.get(path)
        ]
        raise ValueError(
            "The policy has other submodules than when the workers were started: "
            f"{'; '.join(changes)}. Nothing was copied. Build a new collector for "
            "another network."
        )

    def settings(self) -> Settings | None:
        """Return what has changed of the module since the start beside its weights."""
        return None if self._watch is None else self._watch.changes()

    def use_layout(self, layout: WeightLayout) -> None:
        """Publish in this layout from now on: that of the policy in the workers."""
        self.layout = layout

    def published(self) -> None:
        """Note that the weights as they are now were published."""
        self._published = self._marks()
        self._unnoticed = 0

    def chosen(
        self,
        sources: Sequence[Any],
        model_id: str | None,
        weights_dict: Mapping[str, Any] | None,
    ) -> list[torch.Tensor]:
        """Return the weights that the arguments of an update mean.

        Raises:
            ValueError: if they are given in more than one way.
        """
        given = [source for source in sources if source is not None]
        if len(given) + (weights_dict is not None) > 1:
            raise ValueError(
                "Give policy_or_weights, weights, policy or weights_dict, only one."
            )
        source = given[0] if given else None
        if weights_dict is None and model_id is None:
            return self.tensors(source)
        return self.merged(weights_dict or {model_id or _ALL: source})

    def merged(self, weights: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the module's weights with those of some submodules replaced.

        Args:
            weights: by the submodule's path; None takes it as it is now.

        Raises:
            KeyError: naming a submodule that does not exist, or missing tensors.
        """
        if set(weights) == {_ALL}:
            return self.tensors(weights[_ALL])
        own = self.tensors()
        # By identity: a weight that is tied has its name in another submodule.
        number = {id(tensor): index for index, tensor in enumerate(own)}
        merged = list(own)
        for path, source in weights.items():
            submodule = self.submodule(path)
            if source is None:
                continue
            layout = WeightLayout.of(submodule)
            tensors = layout.tensors_of(source, f"The weights for {path!r}")
            for old, new in zip(
                weight_tensors(submodule).values(), tensors, strict=True
            ):
                merged[number[id(old)]] = new
        return merged

    def submodule(self, path: str) -> Any:
        """Return the module, or the submodule at ``path``.

        Raises:
            KeyError: naming the paths that exist.
        """
        if path == _ALL:
            return self.module
        if isinstance(self.module, nn.Module):
            modules = dict(self.module.named_modules())
            if path in modules:
                return modules[path]
            raise KeyError(
                f"The policy has no submodule {path!r}; it has {list(modules)}."
            )
        raise KeyError(f"The trainer holds no module, so none called {path!r}.")

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write ``tensors``, in the order of the layout, into the module itself."""
        with torch.no_grad():
            for target, tensor in zip(self.tensors(), tensors, strict=True):
                if target is not tensor:
                    target.copy_(tensor)

    def warn_if_stale(self, version: int) -> None:
        """Warn, once, if the module was trained over two batches in vain.

        Args:
            version: of the weights that the workers act with.
        """
        if self._copied is not None:
            self._copied.warn_if_trained()
        if self._warned or not self._weights or self._marks() == self._published:
            return
        self._unnoticed += 1
        if self._unnoticed >= _UNNOTICED:
            self._warned = True
            warn(
                "The policy's parameters have changed, but the workers still act with "
                f"version {version}. Call collector.update_policy_weights_() "
                "after training, or pass update_at_each_batch=True."
            )

    def _hold(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights
        self._held_names: tuple[str, ...] = tuple(weights)
        self._held = list(weights.values())
        self._ids = list(map(id, self._held))

    def _marks(self) -> tuple[list[int], list[int]]:
        """Return what changes when a tensor is replaced, or written to in place."""
        return self._ids, list(map(_VERSION, self._held))


@final
class _Copied:
    """A module without weights that was passed, where the collector trains a copy."""

    def __init__(self, given: nn.Module) -> None:
        self._given: nn.Module | None = given
        self._marks = self._look(given)

    @classmethod
    def of(cls, given: Any, module: Any) -> "_Copied | None":
        if not isinstance(given, nn.Module) or not isinstance(module, nn.Module):
            return None
        inside = any(each is given for each in module.modules())
        return None if inside else cls(given)

    def warn_if_trained(self) -> None:
        """Warn, once, if the user gave his own module weights and changed them."""
        given = self._given
        if given is not None and self._look(given) != self._marks:
            self._given = None
            warn(
                "The policy that you passed had no weights yet, so this collector "
                "made a copy that has: collector.policy. The module that you passed "
                "has been given weights or changed since, which has no effect here. "
                "Train collector.policy and its parameters, or pass a module that has "
                "its weights."
            )

    @staticmethod
    def _look(module: nn.Module) -> list[tuple[int, bool, int]]:
        return [
            (id(tensor), is_meta(tensor) or is_lazy(tensor), tensor._version)
            for tensor in weight_tensors(module).values()
        ]


def prepare(
    policy: Any, description: EnvDescription, seed: int, *, trust: bool = False
) -> Any:
    """Return ``policy`` with weights, on TensorDicts: itself, a wrapper, or a copy.

    A copy is made of a module that has no parameter with values, or a lazy one. In any
    other module only what lacks values is filled, in place.

    Args:
        policy: a module, maybe on meta or lazy; or anything else that acts.
        description: tells the keys, and the sizes of the inputs.
        seed: that a materialised copy is initialised with.
        trust: take a callable as one on TensorDicts.

    Raises:
        TypeError: if its arguments are not observations.
        ValueError: naming tensors that nothing initialises.
    """
    if not trust:
        policy = on_tensordicts(policy, description)
    if not isinstance(policy, nn.Module):
        return policy
    if lazy_tensors(policy):
        policy = infer_lazy(policy, fake_input(description))
        return materialize(policy, device="cpu", seed=seed)
    if not meta_tensors(policy):
        return policy
    if has_values(policy):
        # Somebody trains this very module, so it stays the one that counts.
        fill_in_place(policy, seed=seed)
        return policy
    return materialize(policy, device="cpu", seed=seed)


def needs_description(policy: Any, *, trust: bool) -> bool:
    """Whether ``prepare`` has to know the environments."""
    if not trust and not takes_tensordicts(policy):
        return True
    return isinstance(policy, nn.Module) and bool(lazy_tensors(policy))


def fake_input(description: EnvDescription, batch: int = 1) -> TensorDict:
    """Return a frame of zeros, ``[batch]``, in which every action is legal."""
    arrays = allocate(description.observed(), (batch,))
    for key, array in arrays.items():
        if key[1:] in (("action_mask",), ("mask",)):
            array.fill(True)
    n_agents = {name: group.n_agents for name, group in description.groups.items()}
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return assemble(tensors, (batch,), n_agents)


def warn_if_uncopyable(policy: Any) -> None:
    """Warn if ``policy`` acts itself because it cannot be copied."""
    if not isinstance(policy, nn.Module):
        return
    # Weights need no copying to find out, and they can be large.
    kept = {id(tensor): tensor for tensor in weight_tensors(policy).values()}
    try:
        copy.deepcopy(policy, kept)
    except Exception as error:  # noqa: BLE001 - whatever its __deepcopy__ raises
        warn(
            f"The policy {type(policy).__name__} cannot be copied "
            f"({type(error).__name__}: {error}), so this collector acts with the very "
            "module itself: training it changes what acts at once. Worker processes "
            "cannot have it: MultiSyncCollector and MultiAsyncCollector need a "
            "policy_factory that builds it."
        )


def check_policy(policy: Any, policy_factory: Any) -> None:
    """Check what kind of policy was passed, before any process starts.

    Raises:
        TypeError: if it cannot act.
    """
    acts: Callable[[Any], bool] = callable
    if policy is not None and not acts(policy):
        raise TypeError(
            "policy must be a TensorDictModule, a callable on TensorDicts or None, "
            f"but is {policy!r} of type {type(policy).__name__}."
        )
    if isinstance(policy, type):
        raise TypeError(
            f"policy must be an instance, but is the class {policy.__name__}: build "
            "it, or pass it as policy_factory."
        )
    if isinstance(policy_factory, nn.Module):
        raise TypeError(
            f"policy_factory must build the policy, but is a module itself, "
            f"{type(policy_factory).__name__}: pass it as policy, or `lambda: ...`."
        )


def is_random(policy: Any) -> bool:
    """Whether ``policy`` means random actions."""
    return policy is None or isinstance(policy, RandomPolicy)
