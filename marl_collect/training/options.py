"""Settings of training runs, as frozen dataclasses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Annotated, Any, Literal, Self

import torch

from marl_collect.core.description import EnvDescription
from marl_collect.models.layers.inputs import MIN_SCALE
from marl_collect.models.saved_policy import ACTIVATIONS
from marl_collect.options import Option, Options, declared, did_you_mean, nearest
from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.convolutions import AUTO, convolutions, layers

Activation = Literal["tanh", "relu", "elu"]

# Options of several algorithms, which have defaults of their own.
_LearningRate = Annotated[float, Option("learning rate of Adam", positive=True)]
_MinibatchFrames = Annotated[int, Option("frames of one gradient step", at_least=1)]
_MaxGradNorm = Annotated[float, Option("maximum norm of the gradient", positive=True)]
DDPG_ONLY = {"value.policy_lr", "value.noise", "value.action_penalty"}
"""Settings that only MADDPG and IDDPG read."""
_Prefetch = Annotated[
    bool, Option("collect during training, with weights that are one batch older")
]


@dataclass(frozen=True)
class Setup:
    """One cell of a comparison: algorithm, sharing and centralisation.

    Attributes:
        algorithm: PPO whose critic reads each agent's own observation (``"ippo"``) or
            those of all agents (``"mappo"``), a single unclipped step per batch with
            these critics (``"ia2c"``, ``"maa2c"``), or Q-learning of each agent's
            values (``"iql"``), of their sum (``"vdn"``) or of a monotonic mixture
            (``"qmix"``), or deterministic policies of continuous actions, whose critic
            reads everybody's observations and actions (``"maddpg"``) or each agent's
            own (``"iddpg"``); see ``algorithms.py``.
        centralised: whether each agent sees the observations of its whole group.
        share_params: whether the agents of a group share one network.
        agent_ids: whether the networks get each agent's one-hot identity.
    """

    algorithm: str
    centralised: bool = False
    share_params: bool = True
    agent_ids: bool = False

    def __post_init__(self) -> None:
        """Check the algorithm.

        Raises:
            ValueError: if there is no such algorithm.
        """
        if self.algorithm not in ALGORITHMS:
            hint = did_you_mean(nearest(str(self.algorithm), list(ALGORITHMS), most=1))
            raise ValueError(
                f"There is no algorithm {self.algorithm!r}.{hint} Expected one of "
                f"{', '.join(ALGORITHMS)}."
            )

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
        cells = product(ALGORITHMS, (False, True), (True, False), (False, True))
        setups = {setup.name: setup for setup in (cls(*cell) for cell in cells)}
        if name in setups:
            return setups[name]
        # A name without the other parts means the first setup of its algorithm.
        first = {algorithm: cls(algorithm).name for algorithm in ALGORITHMS}
        near = nearest(name, list(setups), most=1) or nearest(name, first, most=1)
        raise ValueError(
            f"There is no setup {name!r}.{did_you_mean(near)} A name is "
            f"{'|'.join(ALGORITHMS)}, then -local or -centralised, then -shared or "
            "-own, then optionally -ids; for example mappo-local-shared-ids."
        )


@dataclass(frozen=True)
class PPOOptions(Options):
    """Proximal policy optimisation."""

    lr: _LearningRate = 3e-4
    anneal: Annotated[
        bool, Option("whether it decays to zero, linearly in the frames")
    ] = False
    epochs: Annotated[int, Option("passes over each batch", at_least=1)] = 10
    minibatch_frames: Annotated[
        int,
        Option(
            "most frames of one gradient step. A batch is divided into equal parts",
            at_least=1,
        ),
    ] = 400
    clip_epsilon: Annotated[
        float,
        Option("how far the probability ratio may deviate from 1", positive=True),
    ] = 0.2
    lmbda: Annotated[
        float,
        Option("lambda of the generalised advantage estimate", at_least=0, at_most=1),
    ] = 0.95
    entropy_coeff: Annotated[float, Option("weight of the entropy", at_least=0)] = 0.01
    critic_coeff: Annotated[
        float, Option("weight of the critic's loss", at_least=0)
    ] = 0.5
    critic_lr: Annotated[
        float | None, Option("``lr`` of the critic; None is the same", positive=True)
    ] = None
    adam_eps: Annotated[
        float,
        Option("what Adam adds to the denominators of its steps", positive=True),
    ] = 1e-5
    max_grad_norm: _MaxGradNorm = 0.5
    clip_apart: Annotated[
        bool,
        Option(
            "whether the gradients of policy and critic are clipped to "
            "``max_grad_norm`` each, as with an optimiser for each; otherwise together"
        ),
    ] = False
    n_steps: Annotated[
        int | None,
        Option(
            "decisions of an agent whose rewards are summed before the critic's value "
            "follows, for returns of n steps; None is the generalised advantage "
            "estimate. ``lmbda`` has no effect on returns of n steps",
            at_least=1,
        ),
    ] = None
    normalise_advantages: Annotated[
        bool,
        Option(
            "whether the mean of a batch's advantages is subtracted from them, which "
            "are then divided by their standard deviation"
        ),
    ] = True
    huber_delta: Annotated[
        float | None,
        Option(
            "error from which the critic's loss grows linearly: Huber's loss, in units "
            "of the values, or of their standard deviation with ``normalise_values``. "
            "None is the squared error, which is twice Huber's for small errors",
            positive=True,
        ),
    ] = None
    clip_value: Annotated[
        float | None,
        Option(
            "how far a value may move away from the value before the update until its "
            "loss no longer falls, in the units of ``huber_delta``; None is no limit",
            positive=True,
        ),
    ] = None
    normalise_values: Annotated[
        bool,
        Option(
            "whether the critic learns returns that are standardised by the mean and "
            "the standard deviation of all returns so far"
        ),
    ] = False
    popart: Annotated[
        bool,
        Option(
            "whether the critic's last layers are rescaled whenever the moments of "
            "``normalise_values`` change, so that its values stay as they are"
        ),
    ] = False
    target_tau: Annotated[
        float | None,
        Option(
            "share of the critic's weights in each update of a target critic, which "
            "follows after every batch and whose values returns end with; None is no "
            "target critic. It needs a critic without memory",
            positive=True,
            at_most=1,
        ),
    ] = None
    orthogonal: Annotated[
        bool,
        Option(
            "whether the initial weights of policy and critic are orthogonal matrices, "
            "multiplied by PyTorch's gain for the activation, and biases are 0"
        ),
    ] = False
    policy_gain: Annotated[
        float,
        Option(
            "gain of the policy's last layer instead, with ``orthogonal``",
            positive=True,
        ),
    ] = 0.01
    critic_num_cells: Annotated[
        Sequence[int] | None,
        Option("``num_cells`` of the critic; None is the same", at_least=1),
    ] = None
    recurrent_critic: Annotated[
        bool,
        Option("whether the critic has memory if ``recurrent`` gives it to policies"),
    ] = True
    sequence_frames: Annotated[
        int,
        Option(
            "frames of the sequences that recurrent networks train on. They begin with "
            "the stored states. The last one of an environment in a batch may be "
            "shorter",
            at_least=1,
        ),
    ] = 32
    episodes_per_batch: Annotated[
        int | None,
        Option(
            "whole episodes per batch instead of ``frames_per_batch`` frames: equally "
            "many of each environment, all of which begin with the newest weights. "
            "Frames that an environment collects until the others have finished are "
            "dropped and not counted; with fewer environments there are fewer",
            at_least=1,
        ),
    ] = None
    prefetch: _Prefetch = False


@dataclass(frozen=True)
class ValueOptions(Options):
    """Values of actions: IQL, VDN and QMIX, MADDPG and IDDPG."""

    lr: _LearningRate = 5e-4
    replay: Annotated[
        Literal["auto", "frames", "episodes"],
        Option(
            "what a minibatch consists of: frames, or whole episodes; auto is episodes "
            "for recurrent networks, which cannot be trained on frames, and frames for "
            "others"
        ),
    ] = "auto"
    buffer_frames: Annotated[
        int,
        Option(
            "capacity of the replay buffer. Each environment has an equal part of it. "
            "If episodes are replayed, the longest one must fit into it together with "
            "the frames collected after its end in the same batch",
            at_least=1,
        ),
    ] = 100_000
    minibatch_frames: _MinibatchFrames = 256
    minibatch_episodes: Annotated[
        int, Option("episodes of one gradient step", at_least=1)
    ] = 32
    frames_per_update: Annotated[
        int, Option("collected frames per gradient step", at_least=1)
    ] = 16
    episodes_per_update: Annotated[
        int, Option("collected episodes per gradient step", at_least=1)
    ] = 1
    double_q: Annotated[
        bool,
        Option(
            "whether the trained network chooses the next action, whose value the "
            "target network tells; otherwise the target network does both"
        ),
    ] = False
    tau: Annotated[
        float,
        Option(
            "share of the new weights in each update of the target networks",
            positive=True,
            at_most=1,
        ),
    ] = 0.005
    target_interval: Annotated[
        int,
        Option(
            "gradient steps per update of the target networks. Hard updates have "
            "``tau`` 1 and a long interval",
            at_least=1,
        ),
    ] = 1
    epsilon_start: Annotated[
        float,
        Option(
            "probability of a random action at the beginning", at_least=0, at_most=1
        ),
    ] = 1.0
    epsilon_end: Annotated[
        float,
        Option(
            "probability of a random action after ``epsilon_frames``",
            at_least=0,
            at_most=1,
        ),
    ] = 0.05
    epsilon_frames: Annotated[
        int, Option("frames over which epsilon decays linearly", at_least=1)
    ] = 100_000
    warm_up_frames: Annotated[
        int,
        Option("frames with random actions before training begins", at_least=0),
    ] = 2_000
    mixing_cells: Annotated[int, Option("hidden units of QMIX's mixer", at_least=1)] = (
        32
    )
    mixing_gain: Annotated[
        float,
        Option("factor of the initial weights of the mixer's layers", positive=True),
    ] = 0.1
    mixing_hyper_cells: Annotated[
        int,
        Option(
            "hidden units of the networks that compute the weights of QMIX's mixer; "
            "with 0 they are linear",
            at_least=0,
        ),
    ] = 0
    mixing_norm: Annotated[
        bool,
        Option("whether QMIX's mixer normalises the joint observation that it reads"),
    ] = True
    policy_lr: Annotated[
        float | None,
        Option("``lr`` of MADDPG's policy; None is the same", positive=True),
    ] = None
    noise: Annotated[
        float,
        Option(
            "standard deviation of the noise with which MADDPG explores, before "
            "actions are squashed into their bounds",
            at_least=2 * MIN_SCALE,
        ),
    ] = 0.5
    action_penalty: Annotated[
        float,
        Option(
            "weight of the squares of actions before squashing in the loss of MADDPG's "
            "policy, which keeps them off their bounds, where they have no gradient",
            at_least=0,
        ),
    ] = 1e-3
    max_grad_norm: _MaxGradNorm = 10.0
    prefetch: _Prefetch = True


@dataclass(frozen=True)
class TrainingOptions(Options):
    """All settings of a run except its task, setup and seed.

    A frame is one step of one environment, regardless of the number of agents. ``ppo``
    has the options of IPPO and MAPPO, ``value`` those of IQL, VDN, QMIX and MADDPG. An
    algorithm with settings of its own has a field here.
    """

    frames: Annotated[
        int,
        Option("frames to train with, rounded up to whole batches", at_least=1),
    ] = 1_000_000
    frames_per_batch: Annotated[
        int,
        Option(
            "frames per batch, over all environments. With ``ppo.episodes_per_batch``, "
            "frames that are collected at a time until these episodes have ended; the "
            "time limit can make it fewer",
            at_least=1,
        ),
    ] = 4_000
    workers: Annotated[int, Option("number of worker processes", at_least=1)] = 2
    envs_per_worker: Annotated[int, Option("environments per worker", at_least=1)] = 8
    max_frames_per_traj: Annotated[
        int | None, Option("truncate episodes at this length", at_least=1)
    ] = None
    gamma: Annotated[float, Option("discount factor", at_least=0, at_most=1)] = 0.99
    reward: Annotated[
        Literal["agent", "team"],
        Option(
            '``"agent"``, each agent learns from its own reward, or ``"team"``, all '
            "agents learn from the mean over all agents. VDN and QMIX always learn "
            "from their sum, which is larger by the number of agents"
        ),
    ] = "agent"
    reward_scale: Annotated[
        float,
        Option(
            "factor of the rewards in training, which for VDN and QMIX are sums over "
            "the agents. Reported returns are not scaled"
        ),
    ] = 1.0
    standardise_rewards: Annotated[
        bool,
        Option(
            "whether the mean of all rewards so far is subtracted from the rewards in "
            "training, which are then divided by their standard deviation, before they "
            "are scaled"
        ),
    ] = False
    bootstrap_limits: Annotated[
        bool,
        Option(
            "whether a state in which a time limit ends the episode has a value, as in "
            "an episode that goes on; otherwise the limit is an end like others"
        ),
    ] = True
    num_cells: Annotated[
        Sequence[int], Option("units of the hidden layers", at_least=1)
    ] = (64, 64)
    activation: Annotated[
        Activation, Option("of the hidden layers: tanh, relu or elu")
    ] = "tanh"
    conv: Annotated[
        str,
        Option(
            "convolutions for pictures: sprites (MeltingPot), three, nature (Atari), "
            "or layers such as 16k8s8,32k3s1 (channels, kernel, stride); auto is "
            "sprites if the sides of pictures are multiples of 8, and three otherwise"
        ),
    ] = AUTO
    conv_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Option(
            "in which the convolutions and their gradients are computed: float32 or "
            "bfloat16, which is slow on processors without instructions for it. "
            "Weights and features are float32 with both"
        ),
    ] = "float32"
    recurrent: Annotated[
        Literal["gru", "lstm"] | None,
        Option(
            '``"gru"`` or ``"lstm"`` gives memory to policies, to the critics of IPPO '
            "and MAPPO, and to the values of IQL, VDN and QMIX"
        ),
    ] = None
    hidden_size: Annotated[int, Option("units of recurrent networks", at_least=1)] = 64
    last_action: Annotated[
        bool,
        Option(
            "whether policies, critics and values read each agent's last action, which "
            "is 0 when an episode begins"
        ),
    ] = False
    network: Annotated[
        Literal["attention"] | None,
        Option(
            '``"attention"``: networks that see several agents attend to them instead '
            "of joining their observations. These are the critics of MAPPO and MAA2C, "
            "and policies and values of centralised setups. It has no memory"
        ),
    ] = None
    initial: Annotated[
        str | None,
        Option(
            "a policy's file or a run's folder, as for ``load_policy``; training "
            "begins with its weights. The moments of ``normalise_values`` begin anew"
        ),
    ] = None
    eval_interval: Annotated[int, Option("frames between evaluations", at_least=1)] = (
        50_000
    )
    eval_episodes: Annotated[
        int,
        Option(
            "episodes per evaluation, with seeds that training never uses", at_least=1
        ),
    ] = 100
    final_episodes: Annotated[
        int,
        Option(
            "episodes of the final evaluations of the best and the last weights, with "
            "seeds of their own",
            at_least=1,
        ),
    ] = 200
    deterministic: Annotated[
        bool, Option("whether evaluations take deterministic actions")
    ] = True
    device: Annotated[str, Option("device of the learner; workers use the CPU")] = "cpu"
    threads: Annotated[
        int | None,
        Option(
            "torch threads of updates and runs; None keeps the current number. With "
            "small networks, more threads mostly wait for each other and compete with "
            "the workers for cores",
            at_least=1,
        ),
    ] = 1
    ppo: PPOOptions = field(default_factory=PPOOptions)
    value: ValueOptions = field(default_factory=ValueOptions)

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            TypeError: for a value of the wrong type.
            ValueError: for a value out of bounds.
        """
        super().__post_init__()
        if self.conv != AUTO:
            layers(self.conv)  # Raises for what is no preset and no layers.
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"device is {self.device!r}: {error}") from error

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return a copy with changed options.

        Args:
            settings: values by name, such as ``"gamma"`` or ``"ppo.lr"``.

        Raises:
            ValueError: if a name is unknown, or a value is wrong; names the setting.
        """
        known = self.settings()
        changed = self
        for name, value in settings.items():
            if name not in known:
                hint = did_you_mean(self._nearest(name))
                raise ValueError(
                    f"There is no setting {name}.{hint} `marl-collect compare "
                    "--settings` lists all settings."
                )
            changed = changed._with(name, value)
        return changed

    def _nearest(self, name: str) -> list[str]:
        """Return up to three settings that an unknown name may mean.

        A setting is meant by its name without the part (``lr``), by words of its help
        (``ppo.learning_rate``), or by a similar spelling (``ppo.epoch``).
        """
        part, _, option = name.rpartition(".")
        words = re.compile(rf"\b{re.escape(option.replace('_', ' '))}\b", re.IGNORECASE)
        texts = self.help_texts()
        same = [known for known in texts if known.rpartition(".")[2] == option]
        meant = [known for known, text in texts.items() if words.search(text)]
        near = same or meant or nearest(name, list(texts), cutoff=0.75)
        here = [known for known in near if known.startswith(f"{part}.")]
        return (here or near)[:3]

    def _with(self, name: str, value: Any) -> Self:
        part, _, option = name.rpartition(".")
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON's 1e6 is a number of frames.
        if isinstance(value, list):
            value = tuple(value)
        try:
            if not part:
                return replace(self, **{option: value})
            inner: Any = getattr(self, part)
            return replace(self, **{part: replace(inner, **{option: value})})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{part}.{error}".lstrip(".")) from error

    def settings(self) -> dict[str, Any]:
        """Return every setting that ``with_settings`` takes, with its value."""
        return {
            prefix + option.name: getattr(part, option.name)
            for prefix, part in self._parts.items()
            for option in declared(type(part))
        }

    def help_texts(self) -> dict[str, str]:
        """Return what each setting means."""
        return {
            prefix + declaration.name: declaration.option.help.replace("``", "") + "."
            for prefix, part in self._parts.items()
            for declaration in declared(type(part))
        }

    @property
    def _parts(self) -> dict[str, Options]:
        inner = {
            f"{attribute.name}.": part
            for attribute in fields(self)
            if isinstance(part := getattr(self, attribute.name), Options)
        }
        return {"": self, **inner}


def network_options(
    setup: Setup,
    options: TrainingOptions,
    description: EnvDescription,
    *,
    centralised: bool,
) -> dict[str, Any]:
    """Return the options that ``make_policy`` and ``make_critic`` share."""
    attends = centralised and options.network is not None
    sized = options.recurrent is not None or not options.num_cells
    return {
        "centralised": centralised,
        "share_params": setup.share_params,
        "agent_ids": setup.agent_ids,
        "last_action": options.last_action,
        "num_cells": options.num_cells,
        "activation_class": ACTIVATIONS[options.activation],
        "recurrent": options.recurrent,
        **({"hidden_size": options.hidden_size} if sized else {}),
        "conv": convolutions(options.conv, description)
        | {"dtype": getattr(torch, options.conv_dtype)},
        **({"network": options.network} if attends else {}),
    }


def policy_options(
    setup: Setup, options: TrainingOptions, description: EnvDescription
) -> dict[str, Any]:
    """Return the options of ``make_policy`` that do not depend on the algorithm."""
    return network_options(setup, options, description, centralised=setup.centralised)
