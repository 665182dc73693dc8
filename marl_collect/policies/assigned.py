"""``AssignedPolicies``: several policies, and which agent acts with which of them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, final

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import nn

from marl_collect.core.factories import check_function
from marl_collect.core.random_actions import is_random
from marl_collect.core.signature import ACTS, MEMBER, POLICY_ID
from marl_collect.errors import PolicyError, warn
from marl_collect.policies.pool import PolicyPool

Assign: TypeAlias = Callable[[int, tuple[str, ...]], Mapping[str, str]]
"""From an episode's seed and the agents' names to the name of each agent's policy."""

T = TypeVar("T", bound=TensorDictBase)


@final
class AssignedPolicies(nn.Module):
    """Several policies by name. In each episode, ``assign`` gives every agent one.

    The policies are submodules, so their weights are those of one module: they are
    published together, and ``model_id="name"`` is a single policy.

    Attributes:
        names: of the policies. ``policy_id`` is the index in this tuple.
        assign: called with the seed of an episode and all agents' names, in the
            process that steps the environment, when the episode begins.
    """

    def __init__(self, policies: Mapping[str, Any], assign: Assign) -> None:
        """Check the policies and the function.

        Args:
            policies: by name: modules on TensorDicts, callables, ``PolicyPool``, or
                None for random actions. A policy may act for some groups only.
            assign: returns the name of each agent's policy. The result must depend on
                the arguments only.

        Raises:
            TypeError: if the arguments have other types, or ``assign`` cannot be
                pickled.
            ValueError: if there are no policies, or a name is not possible.
        """
        super().__init__()
        if not isinstance(policies, Mapping):
            raise TypeError(
                "policies must map names to policies, such as "
                f'{{"main": policy, "rival": other}}, but is {policies!r}.'
            )
        if not policies:
            raise ValueError("policies is empty: pass at least one policy.")
        result = "{agent: name of a policy}"
        check_function("assign", assign, "assign(seed, agents)", result)
        self.assign = assign
        self.names: tuple[str, ...] = ()
        self._policy_names: tuple[str, ...] = ()
        self._places: dict[str, tuple[str, int | None]] = {}
        for name, policy in policies.items():
            self._check_name(name)
            _check_policy(name, policy)
            wrapped = policy if isinstance(policy, nn.Module) else Called(policy)
            self.add_module(name, wrapped)
        self._policy_names = tuple(policies)
        places: list[tuple[str, int | None]] = []
        for name, policy in policies.items():
            pooled = isinstance(policy, PolicyPool)
            places += (
                [(name, i) for i in range(policy.size)] if pooled else [(name, None)]
            )
        self._places = {
            name if place is None else f"{name}_{place}": (name, place)
            for name, place in places
        }
        if len(self._places) < len(places):
            raise ValueError(
                "The places of a pool are policies, named with its name and a number, "
                f"so no other policy can have such a name: found {list(policies)}."
            )
        self.names = tuple(self._places)

    def __getitem__(self, name: str) -> Any:
        """Return the policy of this name: a module, another callable, or None.

        A pool is returned by its name, and its versions by names such as ``"past_0"``.

        Raises:
            KeyError: if there is none. The message lists the names.
        """
        policy = self.module(name)
        return policy.policy if isinstance(policy, Called) else policy

    def module(self, name: str) -> nn.Module:
        """Return the submodule of this name, ``Called`` for a callable."""
        if name in self._policy_names:
            policy: nn.Module = getattr(self, name)
            return policy
        if name not in self._places:
            names = list(dict.fromkeys((*self._policy_names, *self.names)))
            raise KeyError(f"There is no policy {name!r}: found {names}.")
        pool, place = self._places[name]
        return getattr(self, pool).members[place]

    def replace(self, name: str, policy: Any) -> None:
        """Use another form of a policy, such as a lazy module's initialised copy."""
        wrapped = policy if isinstance(policy, nn.Module) else Called(policy)
        pool, place = self._places[name]
        if place is None:
            setattr(self, name, wrapped)
        else:
            getattr(self, pool).members[place] = wrapped

    def indices(self, name: str) -> list[int]:
        """Return the values of ``policy_id`` for a policy, or for all of a pool.

        Raises:
            KeyError: if there is no such policy.
        """
        self.module(name)
        return [
            index
            for index, (policy, (pool, _)) in enumerate(self._places.items())
            if name in (policy, pool)
        ]

    def played(self, policy_ids: Mapping[str, Any], returns: Mapping[str, Any]) -> None:
        """Record a finished episode in the pools.

        The policy of a pool wins if the mean return of its agents is higher than that
        of the version's agents. A warning says if the policy of a pool whose rules use
        results is none of the policies.

        Args:
            policy_ids: index of each agent's policy, by group.
            returns: of each agent, by group.
        """
        means: dict[int, list[float]] = {}
        for group, ids in policy_ids.items():
            for index, value in zip(ids, returns[group], strict=True):
                means.setdefault(index, []).append(value)
        for index, (_, (name, place)) in enumerate(self._places.items()):
            if place is None or index not in means:
                continue
            pool = getattr(self, name)
            learners = [
                learner
                for learner, policy in enumerate(self.names)
                if _is_form_of(self.module(policy), pool.policy)
            ]
            if not learners and pool.uses_results:
                warn(
                    f"The games against versions of {name!r} are not counted, so its "
                    "rules treat all versions alike: the policy of the pool is none of "
                    f"the policies {list(self._policy_names)}. Pass the same module to "
                    "both: "
                    'policies={"main": net, "past": PolicyPool(net)}.'
                )
            played = [
                np.mean(means[learner]) for learner in learners if learner in means
            ]
            if played:
                ahead = played[0] - np.mean(means[index])
                pool.played(place, 0.5 * (np.sign(ahead) + 1))

    def forward(self, *_: Any) -> Any:
        """Raise an error: who acts depends on the seed of the episode.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "AssignedPolicies cannot be called: collectors and evaluate() run it. "
            'Call one of its policies instead, policies["name"](td).'
        )

    def choose(self, seed: int, agents: tuple[str, ...]) -> list[int]:
        """Return the index of each agent's policy in an episode.

        Raises:
            PolicyError: if ``assign`` does not name a policy for each agent.
        """
        try:
            chosen = self.assign(seed, agents)
        except Exception as error:
            error.add_note(f"Raised by assign(seed={seed}, agents).")
            raise
        where = f"assign(seed={seed}, agents) must return {{agent: name of a policy}}"
        if not isinstance(chosen, Mapping):
            raise PolicyError(f"{where}, but returned {chosen!r}.")
        missing = [agent for agent in agents if agent not in chosen]
        if missing:
            raise PolicyError(
                f"{where}, but has no policy for {missing}: it returned {dict(chosen)}."
            )
        surplus = [agent for agent in chosen if agent not in agents]
        if surplus:
            raise PolicyError(
                f"{where}, but names {surplus}, which are no agents: found "
                f"{list(agents)}."
            )
        strange = [name for name in chosen.values() if not isinstance(name, str)]
        if strange:
            raise PolicyError(
                f"{where}, but has {strange[0]!r} as the name of a policy: it returned "
                f"{dict(chosen)}."
            )
        known = {name: index for index, name in enumerate(self.names)}
        for name in set(chosen.values()) - known.keys():
            if name not in self._policy_names:
                raise PolicyError(
                    f"{where}, but there is no policy {name!r}: found "
                    f"{[*dict.fromkeys((*self._policy_names, *known))]}."
                )
            # One version for all agents of an episode that have this pool.
            known[name] = known[f"{name}_{getattr(self, name).pick(seed)}"]
        return [known[chosen[agent]] for agent in agents]

    def batch_of(self, batch: T, name: str) -> T:
        """Return ``batch`` for a learner of one policy.

        ``(g, "mask")`` is True for the agents that acted with this policy. It is added
        if the environment has no mask, and False in padding. ``(g, "acts")`` is True
        for the agents that acted with any policy, so that learners can tell idle agents
        from those of other policies. ``(g, "member")`` is True for the agents of this
        policy, also where they wait or are dead: their rewards are the team's. All
        other entries are those of ``batch``; the tensors are shared.
        Sequences and ``next`` stay complete, so advantages can be computed.

        Args:
            batch: from a collector with these policies, or stored from one.
            name: of the policy, or of a pool.

        Raises:
            KeyError: if there is no such policy, or if the batch has no ``policy_id``.
        """
        indices = self.indices(name)
        out = batch.clone(recurse=False)
        groups = [
            group
            for group, value in out.items()
            if is_tensor_collection(value) and POLICY_ID in value.keys()
        ]
        if not groups:
            raise KeyError(
                "The batch has no policy_id: it was not collected with several "
                "policies."
            )
        valid = out.get(("collector", "mask"), None)
        for group in groups:
            ids = out[group, POLICY_ID]
            acted = torch.isin(ids, torch.tensor(indices, device=ids.device))
            acts = out.get((group, "mask"), None)
            acts = torch.ones_like(acted) if acts is None else acts
            if valid is not None:  # Padding has the id 0 as well.
                acted, acts = acted & valid.unsqueeze(-1), acts & valid.unsqueeze(-1)
            out[group, ACTS], out[group, MEMBER] = acts, acted
            for key in ((group, "mask"), ("next", group, "mask")):
                mask = out.get(key, None)
                if mask is not None:
                    out[key] = mask & acted
                elif key[0] == group:
                    out[key] = acted
        return out

    def _check_name(self, name: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"Names of policies must be strings, but one is {name!r}.")
        if not name or "." in name or hasattr(self, name):
            raise ValueError(
                f"A policy cannot be named {name!r}: it must not be empty, contain a "
                "dot, or be an attribute of a module. Choose another name."
            )


@final
class Called(nn.Module):
    """Holds a policy that is no module.

    Attributes:
        policy: a callable on TensorDicts; None for random actions.
    """

    def __init__(self, policy: Any) -> None:
        """Hold ``policy``."""
        super().__init__()
        self.policy = None if is_random(policy) else policy

    def forward(self, *args: Any) -> Any:
        """Call the policy."""
        acts: Any = self.policy
        return acts(*args)


def _check_policy(name: str, policy: Any) -> None:
    acts: Callable[[Any], bool] = callable
    if isinstance(policy, PolicyPool):
        return
    if isinstance(policy, AssignedPolicies):
        raise TypeError(f"policies[{name!r}] is a set of policies: pass one policy.")
    if isinstance(policy, type) or (policy is not None and not acts(policy)):
        raise TypeError(
            f"policies[{name!r}] must be a TensorDictModule, a callable on TensorDicts "
            f"or None, but is {policy!r}."
        )


def _is_form_of(module: nn.Module, policy: Any) -> bool:
    """Return whether ``module`` is ``policy``, or a wrapper around it."""
    return policy is not None and (
        module is policy or getattr(module, "module", None) is policy
    )
