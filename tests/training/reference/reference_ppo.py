"""PPO for several agents from its definition: one agent, one decision at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference_networks as networks
import torch
import torch.nn.functional as F
from reference_networks import Settings, Weights
from torch import Tensor


def part(weights: Weights, index: int, name: str, groups: Mapping[str, int]) -> Weights:
    """Return the weights of a group: policies name it, critics number it."""
    if len(groups) == 1:
        return weights
    selected = {k: w for k, w in weights.items() if k.startswith(f"module.{name}.")}
    return selected or {
        k: w for k, w in weights.items() if k.startswith(f"module.{index}.")
    }


# Networks.


def policy_outputs(
    weights: Weights, index: int, name: str, batch: Any, settings: Settings
) -> Any:
    """Return the outputs of a group ``[S, T, n, k]`` of sequences ``[S, T]``."""
    agent_weights = part(weights, index, name, settings.groups)
    if settings.attends and settings.centralised:
        absent = batch[name, "terminated"][..., 0]
        x = networks.encode(batch[name, "observation"], agent_weights)
        return networks.attend(
            x, absent, networks.hidden_layers(agent_weights), ids=settings.agent_ids
        )
    x = networks.encode(batch[name, "observation"], agent_weights, settings.agent_ids)
    x = networks.everybody(x) if settings.centralised else x
    if not settings.recurrent:
        return networks.perceptron(x, networks.hidden_layers(agent_weights))
    x = networks.perceptron(
        x, networks.hidden_layers(agent_weights), activate_last=True
    )
    first = batch[name, "recurrent_state"][:, 0, :, 0].double()
    states = networks.unroll(x, first, batch["is_init"][..., 0], agent_weights)
    return networks.perceptron(states, networks.layers(agent_weights, "decoder"))


def critic_features(
    weights: Weights, index: int, name: str, batch: Any, settings: Settings
) -> Any:
    """Return what a group's last layers read, and these layers."""
    agent_weights = part(weights, index, name, settings.groups)
    if not settings.central:
        x = networks.encode(
            batch[name, "observation"], agent_weights, settings.agent_ids
        )
        return x, agent_weights, ()
    codes = []
    for number, other in enumerate(settings.groups):
        encoder = {k: w for k, w in agent_weights.items() if f"encoders.{number}." in k}
        x = networks.encode(batch[other, "observation"], encoder)
        code = networks.layers(encoder, "mlp")
        codes.append(networks.perceptron(x, code, activate_last=True))
    n = settings.groups[name]
    joint = networks.everybody(torch.cat(codes, -2), n)
    identity = torch.eye(n).double().expand(*joint.shape[:-1], n)
    return torch.cat([joint, identity], -1), agent_weights, ("encoders",)


def plain_central(
    weights: Weights, batch: Any, settings: Settings
) -> dict[str, Tensor]:
    """Return the values of a critic that reads the vectors of all groups."""
    codes = []
    for name in settings.groups:
        encoder = networks.layers(weights, "encoders", f".{name}.")
        x = batch[name, "observation", "vector"].double()
        codes.append(networks.perceptron(x, encoder, activate_last=True))
    together = torch.cat(codes, -2)
    trunk = networks.layers(weights, "trunk")
    joint = networks.perceptron(together.flatten(-2), trunk).view_as(together)
    inputs = joint.split(list(settings.groups.values()), -2)
    return {
        name: networks.perceptron(x, networks.layers(weights, "head", f".{name}."))
        for name, x in zip(settings.groups, inputs, strict=True)
    }


def attending_central(
    weights: Weights, batch: Any, settings: Settings
) -> dict[str, Tensor]:
    """Return the values of critics that attend to the agents of all groups."""
    out, begin = {}, 0
    for index, (name, n) in enumerate(settings.groups.items()):
        critic = part(weights, index, name, settings.groups)
        codes, absent = [], []
        for number, other in enumerate(settings.groups):
            encoder = {k: w for k, w in critic.items() if f"encoders.{number}." in k}
            x = networks.encode(
                batch[other, "observation"], encoder, settings.agent_ids
            )
            code = networks.layers(encoder, "mlp")
            codes.append(networks.perceptron(x, code, activate_last=True))
            absent.append(batch[other, "terminated"][..., 0])
        values_of_all = networks.attend(
            torch.cat(codes, -2),
            torch.cat(absent, -1),
            networks.layers(critic, "attention"),
        )
        out[name] = values_of_all[..., begin : begin + n, 0]
        begin += n
    return out


def critic_states(
    weights: Weights, batch: Any, settings: Settings
) -> dict[str, Tensor]:
    """Return the critic's states after each frame ``[B, T, n, k]``."""
    states = {}
    for index, name in enumerate(settings.groups):
        x, agent_weights, skipped = critic_features(
            weights, index, name, batch, settings
        )
        x = networks.perceptron(
            x, networks.hidden_layers(agent_weights, *skipped), activate_last=True
        )
        first = torch.zeros(
            len(x), x.shape[2], networks.hidden_size(agent_weights)
        ).double()
        states[name] = networks.unroll(
            x, first, batch["is_init"][..., 0], agent_weights
        )
    return states


def values(
    weights: Weights,
    batch: Any,
    settings: Settings,
    first: Any = None,
    begins: Any = None,
) -> dict[str, Tensor]:
    """Return the values ``[S, T, n]`` of sequences ``[S, T]``.

    A recurrent critic needs its states before them, and where an episode begins.
    """
    if settings.central and settings.attends:
        return attending_central(weights, batch, settings)
    observed = set(batch[next(iter(settings.groups)), "observation"].keys())
    if settings.central and observed == {"vector"} and not settings.remembers:
        plain = plain_central(weights, batch, settings)
        return {name: value.squeeze(-1) for name, value in plain.items()}
    out = {}
    for index, name in enumerate(settings.groups):
        x, agent_weights, skipped = critic_features(
            weights, index, name, batch, settings
        )
        last = networks.hidden_layers(agent_weights, *skipped)
        if settings.remembers:
            x = networks.perceptron(x, last, activate_last=True)
            x = networks.unroll(x, first[name], begins, agent_weights)
            last = networks.layers(agent_weights, "decoder")
        out[name] = networks.perceptron(x, last).squeeze(-1)
    return out


def log_probs(outputs: Tensor, batch: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the actions taken, and the entropy, ``[..., n]``.

    The entropy of squashed normal distributions has no closed form; it is 0 here.
    """
    action = batch[name, "action"]
    if not action.is_floating_point():
        legal = batch[name].get(
            "action_mask", torch.ones_like(outputs, dtype=torch.bool)
        )
        logs = outputs.masked_fill(~legal, -torch.inf).log_softmax(-1)
        entropy = -torch.where(legal, logs.exp() * logs.masked_fill(~legal, 0), 0).sum(
            -1
        )
        return logs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy
    mean, raw = outputs.chunk(2, -1)
    deviation = F.softplus(raw + np.log(np.expm1(0.99))) + 0.01
    half, middle = 1.5, -0.5  # Of the bounds -2 and 1.
    edge = 1 - torch.finfo(torch.float32).eps
    squashed = ((action.double() - middle) / half).clamp(-edge, edge)
    normal = torch.distributions.Normal(mean, deviation)
    density = normal.log_prob(squashed.atanh()) - torch.log(half * (1 - squashed**2))
    return density.sum(-1), torch.zeros_like(density[..., 0])


# Advantages.


def inside(batch: Any) -> Tensor:
    """Return which frames are not padding, ``[B, T]``."""
    valid: Tensor = batch["next", "done"][..., 0] | True
    return batch["collector"].get("mask", valid) if "collector" in batch else valid


def rewards(batch: Any, settings: Settings) -> dict[str, Tensor]:
    """Return the rewards of training, ``[B, T, n]``."""
    group_rewards = {
        g: batch["next", g, "reward"][..., 0].double() for g in settings.groups
    }
    if settings.team:
        mean = torch.cat(list(group_rewards.values()), -1).mean(-1, keepdim=True)
        group_rewards = {g: mean.repeat(1, 1, n) for g, n in settings.groups.items()}
    for name, reward in group_rewards.items() if settings.standardise_rewards else ():
        living = reward[~batch[name, "done"][..., 0] & inside(batch).unsqueeze(-1)]
        if settings.team:  # Common to all agents: once per frame.
            living = reward[..., 0][inside(batch)]
        group_rewards[name] = (reward - living.mean()) / living.std(correction=0)
    return {g: settings.reward_scale * r for g, r in group_rewards.items()}


@dataclass(frozen=True)
class Episodes:
    """One environment's frames; agents of all groups are side by side, ``[T, R]``."""

    team: bool  # whether agents have a common reward
    acts: Any  # which agents act in a frame
    done: Any  # which have ended before it
    next_acts: Any  # which act after it
    next_done: Any  # which have ended after it
    terminated: Any  # which of these have no return any more
    over: Any  # whether the episode has ended after the frame, `[T]`
    fell: Any  # whether no return follows, `[T]`
    reward: Any  # of the frame
    value: Any  # of the observations before it
    next_value: Any  # of the observations after it

    def follows(self, t: int, i: int) -> bool:
        """Whether agent ``i`` acts after frame ``t``, or would but for a limit."""
        if self.next_acts[t, i] and not self.next_done[t, i]:
            return True
        nobody_waits = not (~self.done[t] & ~self.acts[t]).any()
        truncated = self.next_done[t, i] and not self.terminated[t, i]
        return bool(truncated and self.acts[t, i] and nobody_waits)

    def before(self, t: int, i: int) -> float | None:
        """Return the value of a row before frame ``t``, None if there is none."""
        if self.acts[t, i]:
            return float(self.value[t, i])
        acting_values = self.value[t][self.acts[t]]
        return float(acting_values.mean()) if self.team and len(acting_values) else None

    def after(self, t: int, i: int) -> float | None:
        """Return the value of a row after frame ``t``, None if there is none."""
        if self.follows(t, i):
            return float(self.next_value[t, i])
        n = len(self.value[t])
        next_values = [self.next_value[t, k] for k in range(n) if self.follows(t, k)]
        return float(np.mean(next_values)) if self.team and next_values else None

    def hop(self, t: int, i: int, gamma: float) -> Any:
        """Return what lies between a decision and the next one.

        Returns:
            The rewards, the discount of what follows, the frame of the next decision
            or None, and what follows if there is none: None if nobody knows.
        """
        last = len(self.acts) - 1
        ends = self.over if self.team else self.next_done[:, i]
        fatal = self.fell if self.team else self.terminated[:, i]
        total, weight = 0.0, 1.0
        for u in range(t, last + 1):
            total += weight * self.reward[u, i]
            weight *= gamma
            if ends[u] and fatal[u]:
                return total, weight, None, 0.0
            if ends[u] or u == last:
                return total, weight, None, self.after(u, i)
            if self.before(u + 1, i) is not None:
                return total, weight, u + 1, None
        raise AssertionError

    def returns(self, i: int, gamma: float, n_steps: int) -> dict[int, float]:
        """Return the n-step return of each frame of agent ``i`` that has one."""
        hops = {
            t: self.hop(t, i, gamma)
            for t in range(len(self.acts))
            if self.before(t, i) is not None
        }
        known = {
            t for t, (*_, then, rest) in hops.items() if (then, rest) != (None, None)
        }
        results = {}
        for first in known:
            total, weight, t = 0.0, 1.0, first
            for step in range(1, n_steps + 1):
                gained, factor, then, rest = hops[t]
                total += weight * gained
                weight *= factor
                if then is not None and (step == n_steps or then not in known):
                    rest = self.before(then, i)
                if rest is not None:
                    total += weight * rest
                    break
                t = then
            results[first] = total
        return results

    def advantages(self, i: int, gamma: float, lmbda: float) -> dict[int, float]:
        """Return the advantage of each frame of agent ``i`` whose outcome is known."""
        results: dict[int, float] = {}
        for t in reversed(range(len(self.acts))):
            value = self.before(t, i)
            if value is None:
                continue
            total, weight, then, rest = self.hop(t, i, gamma)
            following = rest if then is None else self.before(then, i)
            if following is None:  # Nobody knows what came of it.
                continue
            later = 0.0 if then is None else results.get(then, 0.0)
            results[t] = total + weight * following - value + lmbda * weight * later
        return results


def advantages(
    batch: Any, root_values: Any, after: Any, settings: Settings
) -> dict[str, Any]:
    """Return each group's advantages ``[B, T, n]``, NaN where no decision is trained.

    The values are those of the observations before and after each step.
    """

    def joint(tables: Mapping[str, Any]) -> Any:
        arrays = [np.asarray(tables[g].detach()) for g in settings.groups]
        return np.concatenate([p.reshape(*p.shape[:2], -1) for p in arrays], -1)

    def flag(key: str, under: Any) -> Any:
        return joint({g: under[g, key] for g in settings.groups})

    fatal = "terminated" if settings.bootstrap_limits else "done"
    tables = {
        "acts": flag("mask", batch),
        "done": flag("done", batch),
        "next_acts": flag("mask", batch["next"]),
        "next_done": flag("done", batch["next"]),
        "terminated": flag(fatal, batch["next"]),
        "over": batch["next", "done"][..., 0].numpy(),
        "fell": batch["next", fatal][..., 0].numpy(),
        "reward": joint(rewards(batch, settings)),
        "value": joint(root_values),
        "next_value": joint(after),
    }
    result = np.full(tables["acts"].shape, np.nan)
    lengths = inside(batch).sum(1).tolist()
    for b, t, i in np.argwhere(tables["acts"]):
        if t >= lengths[b]:
            continue
        env = Episodes(
            settings.team,
            **{key: table[b, : lengths[b]] for key, table in tables.items()},
        )
        if settings.n_steps is None:
            estimates = env.advantages(i, settings.gamma, settings.lmbda)
            result[b, t, i] = estimates.get(t, np.nan)
        else:
            returns = env.returns(i, settings.gamma, settings.n_steps)
            result[b, t, i] = returns.get(t, np.nan) - env.value[t, i]
    per_group = np.split(result, np.cumsum(list(settings.groups.values()))[:-1], -1)
    return dict(zip(settings.groups, per_group, strict=True))


# Losses.


@dataclass(frozen=True)
class Prepared:
    """What losses read, as sequences ``[S, L]``; NaN where nothing is trained."""

    batch: Any
    advantage: Mapping[str, Tensor]
    target: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    output: Mapping[str, Tensor]  # Of the critic, before the update.
    moments: Mapping[str, tuple[float, float]]


def mean_and_deviation(numbers: Sequence[float]) -> tuple[float, float]:
    """Return both, with a deviation of 1 where it is 0."""
    return float(np.mean(numbers)), float(np.std(numbers)) or 1.0


def values_of_frames(
    critic: Weights, batch: Any, settings: Settings
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the critic's states, and its outputs before and after each frame."""
    if not settings.remembers:
        now, then = (values(critic, td, settings) for td in (batch, batch["next"]))
        return {}, now, then
    begins = batch["is_init"][..., 0]
    after = critic_states(critic, batch, settings)
    before = {
        g: torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        for g, h in after.items()
    }
    zeros = {g: h[:, 0] for g, h in before.items()}
    now = values(critic, batch, settings, zeros, begins)
    # A step of its own for each next observation.
    single_frames = batch["next"].reshape(-1, 1)
    flat = {g: h.flatten(0, 1) for g, h in after.items()}
    no = torch.zeros(single_frames.shape, dtype=torch.bool)
    then = values(critic, single_frames, settings, flat, no)
    return before, now, {g: v.view_as(now[g]) for g, v in then.items()}


def sequences(batch: Any, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row and the frame of each frame of sequences ``[S, L]``.

    The last sequence of a row repeats its last frame. The third tensor says where not.
    """
    rows, frames, once = [], [], []
    for row, count in enumerate(inside(batch).sum(1).tolist()):
        for begin in range(0, count, length):
            steps = range(begin, begin + length)
            rows.append([row] * length)
            frames.append([min(step, count - 1) for step in steps])
            once.append([step < count for step in steps])
    return torch.tensor(rows), torch.tensor(frames), torch.tensor(once)


def prepare(
    critic: Weights, batch: Any, settings: Settings, target_critic: Weights
) -> Prepared:
    """Estimate advantages of a batch ``[B, T]`` and divide it into sequences."""
    mean, deviation = mean_and_deviation(settings.learnt or (-1.0, 1.0))

    def scaled(by_group: Any) -> Any:
        return {g: mean + deviation * v for g, v in by_group.items()}

    with torch.no_grad():
        before, root_values, then = values_of_frames(critic, batch, settings)
        outputs = root_values
        root_values, then = scaled(root_values), scaled(then)
        judged = root_values
        if settings.target_tau is not None:
            judged = scaled(values(target_critic, batch, settings))
            then = scaled(values(target_critic, batch["next"], settings))
    plain = {
        g: torch.from_numpy(a)
        for g, a in advantages(batch, judged, then, settings).items()
    }
    target = {g: a + judged[g] for g, a in plain.items()}
    plain = {g: returns - root_values[g] for g, returns in target.items()}
    normal = {}
    for g, a in plain.items():
        used = a[~a.isnan()].numpy()
        some = settings.normalise_advantages and len(used)
        normal[g] = (a - used.mean()) / max(used.std(), 1e-6) if some else a
    moments = dict.fromkeys(target, (0.0, 1.0))
    if settings.learnt is not None:
        moments = {
            g: mean_and_deviation([*settings.learnt, *a[~a.isnan()].tolist()])
            for g, a in target.items()
        }
    if settings.learnt is not None:
        rescale(target_critic, (mean, deviation), moments, settings)
    if settings.popart:
        rescale(critic, (mean, deviation), moments, settings)
        outputs = {
            g: (root_values[g] - new_mean) / new_deviation
            for g, (new_mean, new_deviation) in moments.items()
        }
    *at, trained = sequences(batch, settings.length)

    def cut(x: Any) -> Any:
        return x[tuple(at)]

    return Prepared(
        cut(batch),
        {g: cut(a).where(trained.unsqueeze(-1), torch.nan) for g, a in normal.items()},
        {g: cut(v) for g, v in target.items()},
        {g: cut(h) for g, h in before.items()},
        {g: cut(v) for g, v in outputs.items()},
        moments,
    )


def last_layer(critic: Weights, name: str, settings: Settings) -> Any:
    """Return weights and biases of the layer that writes the values of a group."""
    heads = networks.layers(critic, "head", f".{name}.")
    index = list(settings.groups).index(name)
    return (heads or networks.layers(part(critic, index, name, settings.groups)))[-1]


def rescale(
    critic: Weights,
    unit: tuple[float, float],
    moments: Mapping[str, tuple[float, float]],
    settings: Settings,
) -> None:
    """Rescale last layers, so that values in the new unit are those in the old one."""
    mean, deviation = unit
    for name, (new_mean, new_deviation) in moments.items():
        weight, bias = last_layer(critic, name, settings)
        with torch.no_grad():
            weight.copy_(deviation / new_deviation * weight)
            bias.copy_((deviation * bias + mean - new_mean) / new_deviation)


def loss_of(error: Tensor, delta: float | None) -> Tensor:
    """Return squared errors, or Huber's loss."""
    if delta is None:
        return error**2
    size = error.abs()
    return torch.where(size <= delta, error**2 / 2, delta * (size - delta / 2))


def loss(
    policy: Weights, critic: Weights, prepared: Prepared, rows: Any, settings: Settings
) -> Tensor:
    """Return the loss of a minibatch, the sequences ``rows``."""
    batch = prepared.batch[rows]
    begins = batch["is_init"][..., 0] if settings.remembers else None
    first = {g: h[rows][:, 0] for g, h in prepared.states.items()}
    predicted = values(critic, batch, settings, first, begins)
    total = torch.zeros(()).double()
    for index, name in enumerate(settings.groups):
        advantage, target = prepared.advantage[name][rows], prepared.target[name][rows]
        used = ~advantage.isnan()
        if not used.any():
            continue
        outputs = policy_outputs(policy, index, name, batch, settings)
        log_prob, entropy = log_probs(outputs, batch, name)
        old = batch[name, "action_log_prob"].double()
        ratio, gained = (log_prob - old)[used].exp(), advantage[used]
        clipped = ratio.clamp(1 - settings.clip_epsilon, 1 + settings.clip_epsilon)
        gain = torch.minimum(ratio * gained, clipped * gained)
        if settings.once:
            gain = log_prob[used] * gained
        mean, deviation = prepared.moments[name]
        goal = (target[used] - mean) / deviation
        # What the network says is a standardised return.
        now, delta = predicted[name][used], settings.huber_delta
        error = loss_of(now - goal, delta)
        if settings.clip_value is not None:
            old = prepared.output[name][rows][used]
            change = (now - old).clamp(-settings.clip_value, settings.clip_value)
            error = torch.maximum(error, loss_of(old + change - goal, delta))
        missed = settings.critic_coeff * error - settings.entropy_coeff * entropy[used]
        total = total + (missed - gain).mean()
    return total


def train(
    policy: Weights,
    critic: Weights,
    prepared: Prepared,
    minibatches: Sequence[Any],
    settings: Settings,
    target_critic: Weights,
) -> None:
    """Take one step of Adam per minibatch, on the weights themselves.

    The target critic follows once, after all of them.

    Weights without a part in a minibatch's loss, because none of their agents was
    trained there, keep their values and moments.
    """
    parts = [*policy.values()], [*critic.values()]
    rates = settings.lr, settings.critic_lr or settings.lr
    groups = [{"params": p, "lr": lr} for p, lr in zip(parts, rates, strict=True)]
    adam = torch.optim.Adam(groups, eps=settings.adam_eps)
    for rows in minibatches:
        value = loss(policy, critic, prepared, rows, settings)
        if not value.requires_grad:
            continue
        adam.zero_grad()
        value.backward()
        gradients = [[w.grad for w in part if w.grad is not None] for part in parts]
        if not settings.clip_apart:
            gradients = [[gradient for part in gradients for gradient in part]]
        for clipped in gradients:
            norm = sum(float((gradient**2).sum()) for gradient in clipped) ** 0.5
            for gradient in clipped:
                gradient.mul_(min(1.0, settings.max_grad_norm / (norm + 1e-6)))
        adam.step()
    tau = settings.target_tau
    for name, weight in critic.items() if tau is not None else ():
        with torch.no_grad():
            target = target_critic[name]
            target.copy_((1 - tau) * target + tau * weight)
