"""The trainer's policy, which provides the weights to publish."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, final

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from marl_collect.collectors.options import WorkerOptions
from marl_collect.errors import warn
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.rollout.episodes import Episode
from marl_collect.weights.layout import WeightLayout
from marl_collect.weights.sending import State, StateWatch, structure
from marl_collect.weights.skeleton import split_module, weight_tensors
from marl_collect.weights.tensor_parts import copied_parts, version

_UNNOTICED = 2
_ALL = "policy"

_Marks = tuple[list[int], list[int]]
"""Identities and versions of tensors."""


@final
class TrainerPolicy:
    """The module whose weights are published.

    Attributes:
        module: the module, None if the policy exists in the workers only.
        layout: of the workers' weights; None if there are none.
        structure: of the module at the start; None if it is no ``nn.Module``.
    """

    def __init__(self, module: Any, passed: Any = None) -> None:
        """Record the initial weights and settings of ``module``.

        Args:
            module: the policy with its weights.
            passed: the policy that the user passed. It may be wrapped in ``module`` or
                have no weights yet.
        """
        self.module = module
        self.layout: WeightLayout | None = None
        inner = module.module if isinstance(module, TensorDictModule) else None
        self._wrapped = passed if passed is not None and passed is inner else None
        self._walk: WeightWalk | None = None
        self._watch: StateWatch | None = None
        self.structure: dict[str, str] | None = None
        if isinstance(module, nn.Module):
            self.layout = WeightLayout.of(module)
            self._walk = WeightWalk(module)
            self._watch = StateWatch(module)
            self.structure = structure(module)
        self._hold({} if self._walk is None else self._walk.tensors())
        # The module without weights that the user passed, if the collector uses a copy.
        self._passed: nn.Module | None = None
        if isinstance(passed, nn.Module) and isinstance(module, nn.Module):
            inside = any(inner is passed for inner in module.modules())
            self._passed = None if inside else passed
        self._passed_marks = [] if self._passed is None else _look(self._passed)
        self._published: _Marks | None = self._marks()
        self._unnoticed = 0
        self._warned = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights that are published."""
        return () if self.layout is None else self.layout.names

    def tensors(self, source: Any = None) -> list[torch.Tensor]:
        """Return the weights to publish, in the order of the layout.

        Args:
            source: a module, a state_dict or a TensorDict; None for the own module.

        Raises:
            RuntimeError: if there are no weights to publish.
            KeyError: if tensors are missing or surplus.
            ValueError: if tensors have another shape or dtype, or submodules another
                type than at the start.
        """
        if self.layout is None:
            raise RuntimeError(
                "The policy has no weights to update: the workers act with a policy "
                "without parameters and buffers. Omit the update."
            )
        if source is None and self.module is None:
            raise RuntimeError(
                "The policy was built by policy_factory, so this process has no "
                "weights of it: pass them to update_policy_weights_(weights)."
            )
        if source is None or source is self.module or source is self._wrapped:
            return self._own_tensors(self.layout)
        if self._walk is not None and self._walk.tensors() is not self._weights:
            self._check_structure()
        try:
            return self.layout.tensors_of(source, "The weights", self.module)
        except KeyError as error:
            if isinstance(self.module, AssignedPolicies):
                names = ", ".join(map(repr, self.module.names))
                error.add_note(
                    f"For the weights of one policy, pass model_id: {names}."
                )
            raise

    def _own_tensors(self, layout: WeightLayout) -> list[torch.Tensor]:
        """Return the current weights of the module."""
        # Parameters may have been replaced instead of changed in place.
        assert self._walk is not None
        weights = self._walk.tensors()
        same = weights is self._weights
        if not same:
            self._check_structure()
            self._hold(weights)
        self._warn_if_passed_is_trained()
        if self._held_names != layout.names:
            # By name, so the other names of tied weights are compared too.
            return layout.tensors_of(self.module, "The policy")
        if not same or not layout.fits(self._held):
            layout.check(self._held, "The policy")
        return list(self._held)

    def _check_structure(self) -> None:
        before, now = self.structure, structure(self.module)
        assert before is not None
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

    def state(self) -> State | None:
        """Return the changes of the module's state since the start."""
        return None if self._watch is None else self._watch.changes()

    def published(self) -> None:
        """Note that the current weights were published."""
        self._published = self._marks()
        self._unnoticed = 0

    def not_published(self) -> None:
        """Note that the current weights have not been published yet."""
        self._published = None

    @property
    def is_published(self) -> bool:
        """Whether no tensor was changed or replaced since the last update."""
        replaced = self._walk is not None and self._walk.tensors() is not self._weights
        return not replaced and self._marks() == self._published

    def played(self, episodes: Iterable[Episode]) -> None:
        """Record ended episodes in the pools of ``AssignedPolicies``.

        This changes buffers, but is no training that has to be published.
        """
        if not isinstance(self.module, AssignedPolicies):
            return
        is_published = self.is_published
        for episode in episodes:
            self.module.played(episode.policy_ids, episode.returns)
        if is_published:
            self._published = self._marks()

    def chosen(
        self,
        source: Any,
        model_id: str | None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> list[torch.Tensor]:
        """Return the weights that the arguments of an update select.

        Args:
            source: the weights; None for the current ones.
            model_id: path of the submodule that they belong to.
            weights_dict: replaces both: the weights by path.

        Raises:
            TypeError: if ``weights_dict`` is no mapping.
            ValueError: if submodules are given in more than one way.
            KeyError: if a submodule does not exist, or if tensors are missing.
        """
        if not isinstance(weights_dict, Mapping | None):
            raise TypeError(
                "weights_dict must map paths of submodules to weights, but is "
                f"{weights_dict!r:.100}."
            )
        if weights_dict is not None and model_id is not None:
            raise ValueError(
                f"weights_dict names its submodules itself, so model_id={model_id!r} "
                "has no meaning: omit model_id."
            )
        if weights_dict is None and model_id is None:
            return self.tensors(source)
        weights = weights_dict or {model_id or _ALL: source}
        if set(weights) == {_ALL} and self.submodule(_ALL) is self.module:
            return self.tensors(weights[_ALL])
        merged = self.tensors()
        # By identity, because a tied weight is named after another submodule.
        number = {id(tensor): index for index, tensor in enumerate(merged)}
        for path, given in weights.items():
            submodule = self.submodule(path)
            if given is None:
                continue
            layout, what = WeightLayout.of(submodule), f"The weights for {path!r}"
            new = layout.tensors_of(given, what, submodule)
            old = weight_tensors(submodule).values()
            for tensor, replacement in zip(old, new, strict=True):
                merged[number[id(tensor)]] = replacement
        return merged

    def submodule(self, path: str) -> Any:
        """Return the module, or the submodule at ``path``.

        Of several policies, each has its name as a path, even if it is ``"policy"``.

        Raises:
            KeyError: if there is none. The message lists the existing paths.
        """
        module = self.module
        if isinstance(module, AssignedPolicies) and path in module.names:
            return module.module(path)
        if path == _ALL:
            return module
        if isinstance(module, nn.Module):
            modules = dict(module.named_modules())
            if path in modules:
                return modules[path]
            raise KeyError(
                f"The policy has no submodule {path!r}; it has {list(modules)}."
            )
        raise KeyError(
            f"There is no submodule {path!r}, because the policy exists in the workers "
            "only."
        )

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write ``tensors``, in the order of the layout, into the module itself."""
        with torch.no_grad():
            for target, tensor in zip(self.tensors(), tensors, strict=True):
                if target is not tensor:
                    target.copy_(tensor)

    def warn_if_stale(self, version: int) -> None:
        """Warn once if the module was trained over two batches without an update.

        Args:
            version: of the weights that the workers use.
        """
        self._warn_if_passed_is_trained()
        if self._warned or not self._weights or self.is_published:
            return
        self._unnoticed += 1
        if self._unnoticed >= _UNNOTICED:
            self._warned = True
            warn(
                "The policy's parameters have changed, but the workers still act with "
                f"version {version}. Call collector.update_policy_weights_() "
                "after training, or pass update_at_each_batch=True."
            )

    def _warn_if_passed_is_trained(self) -> None:
        """Warn once if the module that was passed got weights or changed."""
        passed = self._passed
        if passed is not None and _look(passed) != self._passed_marks:
            self._passed = None
            warn(
                "The policy that you passed had no weights yet, so this collector uses "
                "an initialised copy: collector.policy. The module that you passed has "
                "been initialised or changed since, which has no effect here. Train "
                "collector.policy and its parameters, or pass a module that has its "
                "weights."
            )

    def _hold(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights
        self._held_names: tuple[str, ...] = tuple(weights)
        self._held = list(weights.values())
        self._ids = list(map(id, self._held))

    def _marks(self) -> _Marks:
        """Return values that change when a tensor is replaced or written in place."""
        return self._ids, list(map(version, self._held))


@final
class WeightWalk:
    """Lists a module's weights, and walks through it again only if it has changed.

    Checking that every module still holds the same submodules, parameters and buffers
    is much faster than the walk.
    """

    def __init__(self, module: nn.Module) -> None:
        """Walk through ``module``."""
        self._module = module
        self._walk()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every parameter and buffer once, by its first name."""
        held = chain.from_iterable(self._held)
        if not self._known or not all(map(is_, held, self._seen)):
            self._walk()
        return self._tensors

    def _walk(self) -> None:
        self._tensors = weight_tensors(self._module)
        modules = list(self._module.modules())
        # False if a module overrides how its parameters are listed: it is always
        # walked through.
        self._known = all(
            type(module).named_parameters is nn.Module.named_parameters
            and type(module).named_buffers is nn.Module.named_buffers
            and not isinstance(module, ScriptModule)
            for module in modules
        )
        # Dict views, which always show the current entries. The end marker moves if
        # entries are added or removed, so lengths need no check.
        self._held: list[Iterable[object]] = [
            entries.values()
            for module in modules
            for entries in (module._modules, module._parameters, module._buffers)
        ]
        self._held.append(("end",))
        self._seen = list(chain.from_iterable(self._held))


def _look(module: nn.Module) -> list[tuple[int, bool, int]]:
    """Return values that change when a module gets weights or is trained."""
    return [
        (id(tensor), tensor.is_meta or is_lazy(tensor), version(tensor))
        for tensor in weight_tensors(module).values()
    ]


def warn_if_uncopyable(policy: Any) -> None:
    """Warn if ``policy`` acts itself because it cannot be copied."""
    if not isinstance(policy, nn.Module):
        return
    # Weights can be large, so they are excluded from this test copy.
    weights = {id(tensor): tensor for tensor in weight_tensors(policy).values()}
    try:
        copy.deepcopy(policy, weights | copied_parts(policy))
    except Exception as error:  # noqa: BLE001 - its __deepcopy__ may raise anything
        warn(
            f"The policy {type(policy).__name__} cannot be copied "
            f"({type(error).__name__}: {error}), so this collector acts with the "
            "module itself: training changes its actions immediately. It cannot be "
            "sent to worker processes: MultiSyncCollector and MultiAsyncCollector need "
            "a policy_factory that builds it."
        )


def chosen_policy(policy: Any, options: WorkerOptions) -> Any:
    """Return the policy that the arguments select, before any process starts.

    Returns:
        ``policy``, or ``AssignedPolicies`` of ``policies`` and ``assign``.

    Raises:
        TypeError: if a policy is not callable or is a class, if it cannot be sent to
            the workers, or if the factory is a module.
        ValueError: if arguments exclude each other, or ``assign`` is missing.
    """
    factory = options.policy_factory
    if options.policies is not None:
        if policy is not None or factory is not None:
            other = "policy_factory" if policy is None else "policy"
            raise ValueError(
                f"Pass either {other} or policies, not both: policies has every policy "
                "that acts."
            )
        if options.assign is None:
            raise ValueError(
                "policies needs assign: a function assign(seed, agents) that returns "
                "{agent: name of its policy}."
            )
        policy = AssignedPolicies(options.policies, options.assign)
    elif options.assign is not None:
        raise ValueError("assign needs policies: a mapping from names to policies.")
    acts: Callable[[Any], bool] = callable
    if policy is not None and not acts(policy):
        hint = ""
        if isinstance(policy, str):
            hint = " Pass None for random actions, or load_policy(path) for a file."
        raise TypeError(
            "policy must be a TensorDictModule, a callable on TensorDicts or None, "
            f"but is {policy!r} of type {type(policy).__name__}.{hint}"
        )
    if isinstance(policy, type):
        raise TypeError(
            f"policy must be an instance, but is the class {policy.__name__}: build "
            "it, or pass it as policy_factory."
        )
    if isinstance(factory, nn.Module):
        raise TypeError(
            f"policy_factory must be a callable that builds the policy, but is the "
            f"module {type(factory).__name__}: pass it as policy, or pass "
            "`lambda: ...`."
        )
    return policy


def check_can_be_sent(policy: Any, options: WorkerOptions) -> None:
    """Check that ``policy`` can be pickled, before any process starts.

    Raises:
        TypeError: if it cannot. The message names it.
    """
    if not isinstance(policy, nn.Module) or options.policy_factory is not None:
        return
    if not isinstance(policy, AssignedPolicies):
        split_module(policy)
        return
    for name in policy.names:
        try:
            split_module(policy.module(name))
        except TypeError as error:
            raise TypeError(
                f"policies[{name!r}] cannot be sent to the workers: {error.__cause__}."
            ) from error
