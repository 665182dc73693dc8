"""Settings of training runs, as frozen dataclasses."""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from itertools import product
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

Algorithm = Literal["ippo", "mappo", "vdn", "qmix"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
PPO = ("ippo", "mappo")
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
}


@dataclass(frozen=True)
class Setup:
    """One cell of a comparison: algorithm, sharing and centralisation.

    Attributes:
        algorithm: PPO whose critic reads each agent's own observation (``"ippo"``) or
            those of all agents (``"mappo"``), or value decomposition with a sum
            (``"vdn"``) or a monotonic mixer (``"qmix"``).
        centralised: whether each agent sees the observations of its whole group.
        share_params: whether the agents of a group share one network.
        agent_ids: whether the networks get each agent's one-hot identity.
    """

    algorithm: Algorithm
    centralised: bool = False
    share_params: bool = True
    agent_ids: bool = False

    @property
    def name(self) -> str:
        """The name, such as ``"mappo-local-shared-ids"``."""
        seeing = "centralised" if self.centralised else "local"
        sharing = "shared" if self.share_params else "own"
        parts = [self.algorithm, seeing, sharing]
        return "-".join([*parts, "ids"] if self.agent_ids else parts)

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the setup with this name.

        Raises:
            ValueError: if there is none; says how names are formed.
        """
        for algorithm, seeing, sharing, ids in product(
            ALGORITHMS, (False, True), (True, False), (False, True)
        ):
            setup = cls(algorithm, seeing, sharing, ids)  # type: ignore[arg-type]
            if setup.name == name:
                return setup
        raise ValueError(
            f"There is no setup {name!r}: expected {'|'.join(ALGORITHMS)}, then "
            "-local or -centralised, then -shared or -own, then optionally -ids; for "
            "example mappo-local-shared-ids."
        )


def grid(*, value: bool, agent_ids: bool) -> list[Setup]:
    """Return the setups that are compared by default.

    Args:
        value: whether VDN and QMIX can be trained.
        agent_ids: whether a group has several agents, which identities tell apart.
    """
    setups = [
        Setup(algorithm, centralised, share_params)
        for algorithm in ("ippo", "mappo")
        for centralised in (False, True)
        for share_params in (True, False)
    ]
    if agent_ids:
        setups += [Setup("ippo", agent_ids=True), Setup("mappo", agent_ids=True)]
    if value:
        ids = agent_ids
        setups += [Setup("vdn", agent_ids=ids), Setup("qmix", agent_ids=ids)]
    return setups


@dataclass(frozen=True)
class PPOOptions:
    """Proximal policy optimisation.

    Attributes:
        lr: learning rate of Adam.
        anneal: whether it decays to zero, linearly in the frames.
        epochs: passes over each batch.
        minibatch_frames: frames of one gradient step.
        clip_epsilon: how far the probability ratio may deviate from 1.
        lmbda: lambda of the generalised advantage estimate.
        entropy_coeff: weight of the entropy.
        critic_coeff: weight of the critic's loss.
        max_grad_norm: maximum norm of the gradient.
        sequence_frames: frames of the sequences that recurrent networks train on. They
            begin with the stored states. If the frames of an environment in a batch
            are not a multiple, the largest divisor below is used.
        prefetch: collect during training, with weights that are one batch older.
    """

    lr: float = 3e-4
    anneal: bool = False
    epochs: int = 10
    minibatch_frames: int = 400
    clip_epsilon: float = 0.2
    lmbda: float = 0.95
    entropy_coeff: float = 0.01
    critic_coeff: float = 0.5
    max_grad_norm: float = 0.5
    sequence_frames: int = 32
    prefetch: bool = False

    def __post_init__(self) -> None:
        """Check all numbers; see ``_check_numbers``."""
        _check_numbers(self, "ppo.")


@dataclass(frozen=True)
class ValueOptions:
    """Value decomposition: VDN and QMIX.

    Attributes:
        lr: learning rate of Adam.
        buffer_frames: capacity of the replay buffer.
        minibatch_frames: frames of one gradient step.
        frames_per_update: collected frames per gradient step.
        tau: share of the new weights in each update of the target networks.
        epsilon_start: probability of a random action at the beginning.
        epsilon_end: probability of a random action after ``epsilon_frames``.
        epsilon_frames: frames over which epsilon decays linearly.
        warm_up_frames: frames with random actions before training begins.
        mixing_cells: hidden units of QMIX's mixer.
        mixing_gain: factor of the initial weights of the mixer's layers.
        max_grad_norm: maximum norm of the gradient.
        prefetch: collect during training, with weights that are one batch older.
    """

    lr: float = 5e-4
    buffer_frames: int = 100_000
    minibatch_frames: int = 256
    frames_per_update: int = 16
    tau: float = 0.005
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    epsilon_frames: int = 100_000
    warm_up_frames: int = 2_000
    mixing_cells: int = 32
    mixing_gain: float = 0.1
    max_grad_norm: float = 10.0
    prefetch: bool = True

    def __post_init__(self) -> None:
        """Check all numbers; see ``_check_numbers``."""
        _check_numbers(self, "value.")


@dataclass(frozen=True)
class TrainingOptions:
    """All settings of a run except its task, setup and seed.

    A frame is one step of one environment, regardless of the number of agents.

    Attributes:
        frames: frames to train with, rounded up to whole batches.
        frames_per_batch: frames per batch, over all environments.
        workers: number of worker processes.
        envs_per_worker: environments per worker.
        max_frames_per_traj: truncate episodes at this length.
        gamma: discount factor.
        reward: ``"agent"``, each agent learns from its own reward, or ``"team"``, all
            agents learn from the team's mean. Value decomposition always uses the
            team's reward.
        reward_scale: factor of the rewards in training. Reported returns are not
            scaled.
        num_cells: units of the hidden layers.
        activation: of the hidden layers: tanh, relu or elu.
        recurrent: ``"gru"`` or ``"lstm"`` gives the policies and critics of IPPO and
            MAPPO memory.
        hidden_size: units of recurrent networks.
        initial: a policy's file or a run's folder, as for ``load_policy``; training
            begins with its weights.
        eval_interval: frames between evaluations.
        eval_episodes: episodes per evaluation, with seeds that training never uses.
        final_episodes: episodes of the final evaluations of the best and the last
            weights, with seeds of their own.
        deterministic: whether evaluations take deterministic actions.
        device: device of the learner; workers use the CPU.
        threads: torch threads of the learner; None keeps the current number. With small
            networks, more threads mostly wait for each other and compete with the
            workers for cores.
        ppo: options of IPPO and MAPPO.
        value: options of VDN and QMIX.
    """

    frames: int = 1_000_000
    frames_per_batch: int = 4_000
    workers: int = 2
    envs_per_worker: int = 8
    max_frames_per_traj: int | None = None
    gamma: float = 0.99
    reward: Literal["agent", "team"] = "agent"
    reward_scale: float = 1.0
    num_cells: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    recurrent: Literal["gru", "lstm"] | None = None
    hidden_size: int = 64
    initial: str | None = None
    eval_interval: int = 50_000
    eval_episodes: int = 100
    final_episodes: int = 200
    deterministic: bool = True
    device: str = "cpu"
    threads: int | None = 1
    ppo: PPOOptions = field(default_factory=PPOOptions)
    value: ValueOptions = field(default_factory=ValueOptions)

    def __post_init__(self) -> None:
        """Check values that would otherwise fail late or never.

        Raises:
            ValueError: if a value is out of range; names the setting.
        """
        _check_numbers(self)
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, but is "
                f"{self.activation!r}."
            )
        if self.reward not in ("agent", "team"):
            raise ValueError(f"reward must be agent or team, but is {self.reward!r}.")
        if self.recurrent not in (None, "gru", "lstm"):
            raise ValueError(
                f"recurrent must be gru, lstm or null, but is {self.recurrent!r}."
            )
        torch.device(self.device)

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return a copy with changed options.

        Args:
            settings: values by name, such as ``"gamma"`` or ``"ppo.lr"``.

        Raises:
            ValueError: if a name is unknown, or a value has the wrong type.
        """
        known = self.settings()
        changed = self
        for name, value in settings.items():
            if name not in known:
                raise ValueError(
                    f"There is no setting {name}: expected {', '.join(sorted(known))}."
                )
            changed = _changed(changed, name.split("."), value, name)
        return changed

    def settings(self) -> dict[str, Any]:
        """Return every setting that ``with_settings`` takes, with its value."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            parts = vars(value) if is_dataclass(value) else None
            found |= (
                {name: value}
                if parts is None
                else {f"{name}.{key}": part for key, part in parts.items()}
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as written to ``config.json``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the options from the result of ``as_dict``, also if read from JSON."""
        flat = {k: v for k, v in data.items() if not isinstance(v, Mapping)}
        for part in ("ppo", "value"):
            flat |= {f"{part}.{k}": v for k, v in data.get(part, {}).items()}
        return cls().with_settings(flat)


def _changed(options: Any, path: Sequence[str], value: Any, name: str) -> Any:
    head, *rest = path
    old = getattr(options, head)
    if rest:
        return replace(options, **{head: _changed(old, rest, value, name)})
    return replace(options, **{head: _converted(old, value, name)})


def network_options(setup: Setup, options: TrainingOptions) -> dict[str, Any]:
    """Return the options that ``make_policy`` and ``make_critic`` share."""
    return {
        "share_params": setup.share_params,
        "agent_ids": setup.agent_ids,
        "num_cells": options.num_cells,
        "activation_class": ACTIVATIONS[options.activation],
        "recurrent": options.recurrent,
        "hidden_size": options.hidden_size,
    }


def help_texts(options: TrainingOptions) -> dict[str, str]:
    """Return what each setting means, from the docstrings of the classes of options."""
    texts: dict[str, str] = {}
    for prefix, part in (
        ("", options),
        ("ppo.", options.ppo),
        ("value.", options.value),
    ):
        documented = (inspect.getdoc(part) or "").partition("Attributes:\n")[2]
        for entry in re.split(r"^ {4}(?=\w)", documented, flags=re.MULTILINE)[1:]:
            name, _, text = entry.partition(": ")
            texts[prefix + name] = " ".join(text.split()).replace("``", "")
    return texts


_COUNTS = frozenset(
    {
        "frames",
        "frames_per_batch",
        "workers",
        "envs_per_worker",
        "max_frames_per_traj",
        "hidden_size",
        "eval_interval",
        "eval_episodes",
        "final_episodes",
        "threads",
        "epochs",
        "minibatch_frames",
        "sequence_frames",
        "buffer_frames",
        "frames_per_update",
        "epsilon_frames",
        "mixing_cells",
    }
)
_POSITIVE = frozenset({"lr", "clip_epsilon", "max_grad_norm", "tau", "mixing_gain"})
_SHARES = frozenset({"gamma", "lmbda", "tau", "epsilon_start", "epsilon_end"})


def _check_numbers(options: Any, prefix: str = "") -> None:
    """Check the numbers of a dataclass of options; None is allowed.

    Raises:
        ValueError: if a number is out of range; names the setting.
    """
    for name, value in vars(options).items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        wrong = None
        if name in _COUNTS and value < 1:
            wrong = "at least 1"
        elif name in _POSITIVE and not value > 0:
            wrong = "greater than 0"
        elif name in _SHARES and not 0 <= value <= 1:
            wrong = "between 0 and 1"
        elif not (math.isfinite(value) and (value >= 0 or name == "reward_scale")):
            wrong = "a finite number, and not negative"
        if wrong is not None:
            raise ValueError(f"{prefix}{name} must be {wrong}, but is {value}.")


_OPTIONAL = {
    "max_frames_per_traj": int,
    "threads": int,
    "recurrent": str,
    "initial": str,
}


def _converted(old: Any, value: Any, name: str) -> Any:
    if value is None and name in _OPTIONAL:
        return None
    if isinstance(old, tuple):
        if isinstance(value, (list, tuple)) and all(
            isinstance(v, int) and v > 0 for v in value
        ):
            return tuple(value)
        raise ValueError(
            f"{name} must be a list of positive integers, such as {list(old)}, but is "
            f"{value!r}."
        )
    kind = _OPTIONAL.get(name, type(old))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is kind:
        return value
    example = "" if old is None else f", such as {old!r}"
    raise ValueError(
        f"{name} must be of type {kind.__name__}{example}, but is {value!r}."
    )
