"""Gives policies their weights before they act.

A policy may be lazy, or on the meta device. One that the user passes is copied, and the
copy gets weights (``prepare``). One that a factory builds belongs to the process that
built it, so it need not be copied (``build_policy``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import EnvDescription, Row, allocate
from marl_collect.core.signature import IS_INIT
from marl_collect.core.tensordicts import assemble
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.policies.probe import state_dtype, state_shapes, undisturbed
from marl_collect.policies.wrap import built_policy, on_tensordicts
from marl_collect.rollout.episodes import Plan, RunningEpisodes
from marl_collect.weights.materialize import (
    copy_module,
    has_values,
    infer_lazy,
    initialize,
    lazy_tensors,
    materialize,
    meta_tensors,
)


def prepare(
    policy: Any, description: EnvDescription, seed: int, *, trust: bool = False
) -> Any:
    """Return the policy with weights, as a callable on TensorDicts.

    It is ``policy`` itself, a wrapper or a copy. A module is copied if it is lazy or on
    the meta device.

    Args:
        policy: a module, which may be lazy or on the meta device, or another callable.
        description: has the keys and the sizes of the inputs.
        seed: of the initial weights.
        trust: use a callable on TensorDicts without inspecting its arguments.

    Raises:
        TypeError: if the policy's arguments are not observations.
        ValueError: if a lazy module cannot be copied, or if tensors have no
            initialiser; they are named.
    """
    if isinstance(policy, AssignedPolicies):
        for name in policy.names:
            if policy[name] is not None:
                try:
                    prepared = prepare(policy[name], description, seed, trust=trust)
                except Exception as error:
                    error.add_note(f"The policy is policies[{name!r}].")
                    raise
                policy.replace(name, prepared)
        return policy
    if not trust:
        policy = on_tensordicts(policy, description)
    if not isinstance(policy, nn.Module):
        return policy
    if lazy_tensors(policy):
        policy = infer_lazy(policy, _fake_frame(description, policy))
    elif not meta_tensors(policy):
        return policy
    return materialize(policy, device="cpu", seed=seed)


def check_can_be_copied(policy: Any) -> None:
    """Check that ``prepare`` can copy ``policy``, before any process starts.

    Raises:
        ValueError: if it is lazy or on the meta device and cannot be copied, or if it
            is on the meta device, but some of its parameters are not.
    """
    if isinstance(policy, AssignedPolicies):
        for name in policy.names:
            try:
                check_can_be_copied(policy[name])
            except ValueError as error:
                error.add_note(f"The policy is policies[{name!r}].")
                raise
    elif isinstance(policy, nn.Module):
        lazy, empty = lazy_tensors(policy), meta_tensors(policy)
        if empty and not lazy and has_values(policy):
            # An optimiser may hold its parameters.
            raise ValueError(
                f"Some parameters of the policy have values, but {empty} are on the "
                "meta device. Give all of them values before you pass the policy "
                "(marl_collect.models.materialize returns a copy that has them), or "
                "none."
            )
        if lazy or empty:
            copy_module(policy)


def build_policy(
    factory: Callable[[], Any],
    parts: Sequence[EnvBatch],
    plan: Plan,
    seed: int,
    *,
    trust: bool = False,
) -> Any:
    """Return the policy that a factory builds, with weights.

    The factory runs, and lazy and meta tensors are initialised, as after
    ``torch.manual_seed(seed)``. The global generator is not used.

    The sizes of a lazy module are inferred from zeros. If it cannot be copied, or does
    not accept zeros, it is called once on the first observations.

    Args:
        factory: builds the policy.
        parts: of the environments in which it acts.
        plan: has the seeds of their first episodes.
        seed: of the weights.
        trust: use a callable on TensorDicts without inspecting its arguments.

    Raises:
        TypeError: if the factory returns None, or a policy whose arguments are not
            observations.
        ValueError: if parameters stay lazy, or if tensors have no initialiser; they
            are named.
    """
    description = parts[0].description
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        policy = built_policy(factory)
        if not trust:
            policy = on_tensordicts(policy, description)
        if isinstance(policy, nn.Module):
            if lazy_tensors(policy):
                policy = _with_shapes(policy, parts[0], plan)
            initialize(policy)
    return policy


def _with_shapes(policy: nn.Module, part: EnvBatch, plan: Plan) -> nn.Module:
    """Return a lazy module that a factory has built, or a copy, with known shapes."""
    try:
        return infer_lazy(policy, _fake_frame(part.description, policy))
    except ValueError as error:
        frame = _first_frame(part, plan, policy)
        try:
            with torch.no_grad(), undisturbed(policy):
                policy(frame)
        except Exception as called:
            called.add_note(
                "The policy was called on the first observations, because the shapes "
                f"of its lazy parameters cannot be inferred otherwise: {error}"
            )
            raise
    lazy = lazy_tensors(policy)
    if lazy:
        raise ValueError(
            f"The first call of the policy did not reach its lazy parameters {lazy}: "
            "pass their input sizes to the constructor."
        )
    return policy


def _first_frame(part: EnvBatch, plan: Plan, policy: Any) -> TensorDict:
    """Begin the first episodes, and return the policy's input for their first frame.

    The rollout begins the same episodes again.
    """
    memory = part.allocate()
    part.bind(memory)
    rows = np.arange(part.size)
    seeds = RunningEpisodes(part.description, plan).following_seeds(rows)
    part.reset(rows.tolist(), seeds.tolist())
    return _frame(memory, part.size, part.description, policy)


def _fake_frame(description: EnvDescription, policy: Any) -> TensorDict:
    """Return a frame of zeros, ``[1]``, in which every action is legal."""
    memory = allocate(description.observed(), (1,))
    for key, array in memory.items():
        if key[1:] in (("action_mask",), ("mask",)):
            array.fill(True)
    return _frame(memory, 1, description, policy)


def _frame(
    memory: Row, size: int, description: EnvDescription, policy: Any
) -> TensorDict:
    """Return a copy of the observations in ``memory``, ``[size]``, as an input.

    It also has ``is_init``, and the hidden states whose shapes the policy declares.
    """
    tensors = {
        key: torch.from_numpy(memory[key]).clone() for key in description.observed()
    }
    tensors[IS_INIT] = torch.ones(size, 1, dtype=torch.bool, device="cpu")
    dtype = state_dtype(policy)
    for key, shape in state_shapes(policy).items():
        tensors.setdefault(key, torch.zeros(size, *shape, dtype=dtype, device="cpu"))
    return assemble(tensors, (size,), description.group_sizes)
