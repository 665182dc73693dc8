"""Advantages of agents that wait for their turn, die, or share a team's reward.

With each agent's own reward, an agent's decisions are the frames in which it acts. Its
estimate runs from one decision to its next: the rewards in between are summed with
their discount, and the value of the next decision is discounted by the number of
frames. The values of rows in which an agent waits are never read, because critics are
not trained there. The agent's estimate ends when the agent is done.

With the team's reward, all agents have the same return, and an agent that died or waits
still gets its share. The value of a row that does not act is therefore the mean of the
values of all agents that act in that frame, and the estimate ends with the episode.

A decision is left out of training if its outcome is unknown: if the batch ends, or the
episode is truncated, while the agent waits for its turn, so that no value follows that
was trained. The decision before it uses the value of this one.

Sources:
    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", arXiv 1506.02438.
    Bradtke and Duff, "Reinforcement Learning Methods for Continuous-Time Markov
    Decision Problems", NeurIPS 1994, for decisions that last several frames.
    Boutilier, "Planning, Learning and Coordination in Multiagent Decision Processes",
    TARK 1996, for the common value of agents with a common reward.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor

from marl_collect.core.description import EnvDescription
from marl_collect.core.signature import ACTS, MEMBER
from marl_collect.training.options import TrainingOptions

TRAINED = "trained"
"""Name in a group of the rows that losses use, bool ``[B, T, n]``."""


class Decisions(NamedTuple):
    """What an estimate reads; all tensors are ``[B, T, n]``.

    Attributes:
        reward: of the frame.
        value: of the row; read only where ``decides``.
        decides: whether the row is a decision.
        ends: whether the trajectory, or what is known of it, ends after the frame.
        next_value: of the row after the frame; 0 if no return follows. Read only where
            ``ends``.
        next_known: whether ``next_value`` may be read there.
    """

    reward: Tensor
    value: Tensor
    decides: Tensor
    ends: Tensor
    next_value: Tensor
    next_known: Tensor


def write_advantages(
    data: TensorDictBase,
    judged: TensorDictBase,
    inside: Tensor,
    description: EnvDescription,
    options: TrainingOptions,
) -> None:
    """Write ``advantage``, ``value_target`` and ``trained`` into each group.

    Args:
        data: ``[B, T]``: what a collector writes, with rewards to learn from, and
            ``(group, "state_value")`` ``[B, T, n, 1]``.
        judged: has the values ``(group, "state_value")`` of which returns are made, at
            the root and under ``next``: ``data``, or those of a target critic.
        inside: which frames are not padding, bool ``[B, T]``; the first ones of a row.
        description: of the environment.
        options: of training. With ``reward="team"`` the rewards are equal for all
            agents.
    """
    ppo, team = options.ppo, options.reward == "team"
    names = list(description.groups)
    acts, follows = acting(data, names)
    last = inside.unsqueeze(-1) & ~F.pad(inside[:, 1:], (0, 1)).unsqueeze(-1)
    if not options.bootstrap_limits:
        for name in names:
            follows[name] = follows[name] & ~data["next", name, "done"].squeeze(-1)
    now = {name: judged[name, "state_value"].squeeze(-1) for name in names}
    after = {name: judged["next", name, "state_value"].squeeze(-1) for name in names}
    if team:
        common, someone = _common_value(now, acts)
        next_common, next_someone = _common_value(after, follows)
    for name in names:
        flags = data["next"] if team else data["next", name]
        shape = now[name].shape
        # The root's flags are [B, T, 1], a group's flags [B, T, n, 1].
        done, terminated = (
            flags[k].expand(shape) if team else flags[k].squeeze(-1)
            for k in ("done", "terminated" if options.bootstrap_limits else "done")
        )
        value, next_value = now[name], after[name]
        decides, known = acts[name], follows[name]
        if team:
            value = torch.where(decides, value, common)
            next_value = torch.where(known, next_value, next_common)
            decides, known = someone.expand(shape), next_someone.expand(shape)
        advantage, trained = estimate(
            Decisions(
                data["next", name, "reward"].squeeze(-1),
                value,
                decides,
                done | last,
                next_value.masked_fill(terminated, 0.0),
                known | terminated,
            ),
            options.gamma,
            ppo.lmbda,
            ppo.n_steps,
        )
        trained &= acts[name] & inside.unsqueeze(-1)
        data[name, TRAINED] = trained
        data[name, "value_target"] = (advantage + value).unsqueeze(-1)
        if judged is not data:
            advantage = advantage + value - data[name, "state_value"].squeeze(-1)
        if ppo.normalise_advantages:
            advantage = _normalised(advantage, trained)
        data[name, "advantage"] = advantage.unsqueeze(-1)


def estimate(
    rows: Decisions, gamma: float, lmbda: float, n_steps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the advantage of each decision, and which of them are known.

    Args:
        rows: of all agents.
        gamma: discount factor of a frame.
        lmbda: weight of an advantage in the advantage of the previous decision.
        n_steps: number of decisions whose rewards are summed, instead of ``lmbda``.

    Returns:
        The advantages ``[B, T, n]``, 0 where unknown, and bool ``[B, T, n]``.
    """
    advantages = torch.zeros_like(rows.value)
    knows = torch.zeros_like(rows.decides)
    n_frames = rows.value.shape[1]
    if n_steps is not None:
        lmbda = 0.0
    # The returns from the next row on that end with the value of the first, second, ...
    # decision there, and the advantage of the next decision; discounted to that row.
    ahead = torch.zeros(n_steps or 1, *rows.value[:, 0].shape).to(rows.value)
    later = torch.zeros_like(rows.value[:, 0])
    known = torch.zeros_like(rows.decides[:, 0])
    for t in reversed(range(n_frames)):
        cut = rows.ends[:, t]
        ahead = torch.where(cut, rows.next_value[:, t], ahead)
        later = torch.where(cut, 0.0, later)
        known = torch.where(cut, rows.next_known[:, t], known)
        ahead = rows.reward[:, t] + gamma * ahead
        later = gamma * later
        decides, value = rows.decides[:, t], rows.value[:, t]
        advantage = torch.where(known, ahead[-1] + lmbda * later - value, 0.0)
        advantages[:, t] = torch.where(decides, advantage, 0.0)
        knows[:, t] = decides & known
        longer = torch.where(known, ahead[:-1], value)
        decided = torch.cat([value.unsqueeze(0), longer])
        ahead = torch.where(decides, decided, ahead)
        later = torch.where(decides, advantage, later)
        known = known | decides
    return advantages, knows


def acting(
    data: TensorDictBase, names: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return which agents act in each frame, and which rows under ``next`` have values.

    Agents that act in the next frame have values there, and agents that a time limit
    stopped. Where some agents wait, it is not known who would have acted
    after the limit.

    Args:
        data: ``[*B]``, as a collector writes it.
        names: of the groups.

    Returns:
        For each group, two bool tensors ``[*B, n]``.
    """
    acts = {name: _mask(data, name) for name in names}
    waits = [waiting(data, name) for name in names]
    together = ~torch.cat(waits, -1).any(-1, keepdim=True)
    follows = {}
    for name in names:
        flags = data["next", name]
        cut = (flags["truncated"] & ~flags["terminated"]).squeeze(-1)
        goes_on = _mask(data["next"], name) & ~flags["done"].squeeze(-1)
        goes_on &= members(data, name).squeeze(-1)
        follows[name] = goes_on | (acts[name] & cut & together)
    return acts, follows


def members(data: TensorDictBase, name: str) -> Tensor:
    """Return which agents of a group have the policy to train, bool ``[*B, n, 1]``.

    All, unless ``AssignedPolicies.batch_of`` has chosen one of several policies.
    """
    group = data[name]
    if MEMBER in group.keys():
        member: Tensor = group[MEMBER]
        return member.unsqueeze(-1)
    return torch.ones_like(group["done"])


def waiting(data: TensorDictBase, name: str) -> Tensor:
    """Return which agents of a group wait for their turn, bool ``[*B, n]``."""
    # An agent that acts with another policy does not wait; see `batch_of`.
    plays = data[name, ACTS] if ACTS in data[name].keys() else _mask(data, name)
    return ~data[name, "done"].squeeze(-1) & ~plays


def _mask(data: TensorDictBase, name: str) -> Tensor:
    group = data[name]
    if "mask" in group.keys():
        mask: Tensor = group["mask"]
        return mask
    return torch.ones_like(group["done"].squeeze(-1))


def _common_value(
    values: dict[str, Tensor], valid: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the mean of the valid values of all groups, and where there are any."""
    every = torch.cat(list(values.values()), -1)
    where = torch.cat(list(valid.values()), -1)
    count = where.sum(-1, keepdim=True)
    total = torch.where(where, every, 0.0).sum(-1, keepdim=True)
    return total / count.clamp_min(1), count > 0


def _normalised(advantage: Tensor, trained: Tensor) -> Tensor:
    used = advantage[trained]
    if not len(used):
        return advantage
    return (advantage - used.mean()) / used.std(correction=0).clamp_min(1e-6)
