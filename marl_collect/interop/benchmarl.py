"""BenchMARL experiments whose data our collectors collect.

Needs the extra ``benchmarl``. One import line changes::

    from marl_collect.interop.benchmarl import Experiment

Tasks, algorithms, models, loggers, evaluation and checkpoints are BenchMARL's.
PettingZoo's and MeltingPot's tasks are collected from our environments, all other tasks
from their own TorchRL environments. Either way the environments, with the task's
transforms, run in worker processes. If a task steps a batch of environments, as VMAS
does, each worker has one batch.
"""

import abc
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, final

from marl_collect.errors import imports_of

with imports_of("benchmarl", "marl_collect.interop.benchmarl"):
    import benchmarl.experiment as theirs
    from benchmarl.environments import Task, TaskClass
    from benchmarl.environments.meltingpot.common import MeltingPotClass
    from benchmarl.environments.pettingzoo.common import PettingZooClass

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torchrl.envs import Compose, EnvBase, TransformedEnv
from typing_extensions import override

from marl_collect.collectors import MultiSyncCollector
from marl_collect.core.env import MultiAgentEnv, TensorDictEnv
from marl_collect.core.tensordicts import key_path
from marl_collect.interop.torchrl import TorchRLWrapper, to_torchrl
from marl_collect.programs.task_providers import providers

__all__ = ["Experiment", "OurMeltingPotTask", "OurPettingZooTask", "our_task"]


class _OurTask(TaskClass):
    """A task on our environments. It is saved as BenchMARL's own task."""

    @override
    def __reduce__(self) -> Any:
        theirs = next(kind for kind, ours in _OURS.items() if type(self) is ours)
        return theirs, (self.name, self.config)

    @abc.abstractmethod
    def factory(
        self, *, continuous_actions: bool, evaluation: bool = False
    ) -> Callable[[], MultiAgentEnv]:
        """Return a factory of our environments, without the task's transforms.

        Args:
            continuous_actions: whether to use them where the task has both kinds.
            evaluation: whether it is for evaluation, which draws pictures and sums the
                rewards itself.
        """

    @override
    def get_env_fun(
        self, num_envs: int, continuous_actions: bool, seed: int | None, device: Any
    ) -> Callable[[], EnvBase]:
        """Return a function that builds the environment for evaluation."""
        del num_envs, device
        make = self.factory(continuous_actions=continuous_actions, evaluation=True)

        def build() -> EnvBase:
            env = to_torchrl(make())
            if seed is not None:
                env.set_seed(seed)
            return env

        return build


class OurPettingZooTask(_OurTask, PettingZooClass):
    """One of BenchMARL's PettingZoo tasks on our ``PettingZooEnv``."""

    @override
    def factory(
        self, *, continuous_actions: bool, evaluation: bool = False
    ) -> Callable[[], MultiAgentEnv]:
        config = dict(self.config)
        if self.supports_continuous_actions() and self.supports_discrete_actions():
            config["continuous_actions"] = continuous_actions
        if evaluation:
            config["render_mode"] = "rgb_array"
        return partial(
            _builder(config.pop("task")),
            return_state=self.has_state(),
            episode_reward=not evaluation,
            **config,
        )


class OurMeltingPotTask(_OurTask, MeltingPotClass):
    """One of BenchMARL's MeltingPot tasks on our ``MeltingpotEnv``."""

    @override
    def factory(
        self, *, continuous_actions: bool, evaluation: bool = False
    ) -> Callable[[], MultiAgentEnv]:
        del continuous_actions  # They are discrete.
        return partial(
            _builder(self.name.lower()),
            world_rgb=True,  # BenchMARL's state, and its pictures for videos.
            episode_reward=not evaluation,
            **self.config,
        )


_OURS: dict[type[TaskClass], type[_OurTask]] = {
    PettingZooClass: OurPettingZooTask,
    MeltingPotClass: OurMeltingPotTask,
}
"""Our tasks by BenchMARL's."""


def our_task(task: Task | TaskClass) -> TaskClass:
    """Return a BenchMARL task on our environments, where we have them.

    Args:
        task: of BenchMARL. A member of one of its enumerations gets its YAML settings.

    Returns:
        An ``OurPettingZooTask`` or ``OurMeltingPotTask`` for a task of these families,
        else the task itself.
    """
    built = task.get_from_yaml() if isinstance(task, Task) else task
    if type(built) not in _OURS:
        return built
    return _OURS[type(built)](name=built.name, config=built.config)


@final
class _InitialStates(TensorDictModuleBase):
    """Writes zeros where a recurrent model's states are missing.

    BenchMARL's recurrent models expect them in every frame that they act in: without
    them they take the input for a sequence to train on.
    """

    def __init__(self, shapes: Mapping[tuple[str, ...], tuple[int, ...]]) -> None:
        super().__init__()
        self.in_keys: list[Any] = []
        self.out_keys: list[Any] = []
        self._shapes = dict(shapes)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the states that are missing."""
        for key, shape in self._shapes.items():
            if key not in tensordict.keys(include_nested=True):
                zeros = torch.zeros((*tensordict.batch_size, *shape), device="cpu")
                tensordict.set(key, zeros.to(tensordict.device or "cpu"))
        return tensordict


@final
class Experiment(theirs.Experiment):
    """BenchMARL's ``Experiment``, with our collector.

    Args:
        task: of BenchMARL.
        workers: worker processes, at most one per environment; by default one per core.
        collector_options: further options of ``MultiSyncCollector``.
        arguments: all others of BenchMARL's ``Experiment``.

    Raises:
        ValueError: with ``collect_with_grad``, which needs its environments here.
    """

    def __init__(
        self,
        task: Task | TaskClass,
        *arguments: Any,
        workers: int | None = None,
        collector_options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self._workers = workers or len(os.sched_getaffinity(0))
        self._collector_options = dict(collector_options or {})
        super().__init__(our_task(task), *arguments, **more)

    def _setup_collector(self) -> None:
        """Build our collector in place of TorchRL's."""
        config = self.config
        if config.collect_with_grad:
            raise ValueError(
                "collect_with_grad=True needs environments in the trainer's process: "
                "use benchmarl's own Experiment."
            )
        self.policy = self.algorithm.get_policy_for_collection()
        self.group_policies = {}
        for group in self.group_map:
            (chosen,) = self.policy.select_subsequence(out_keys=[(group, "action")])
            self.group_policies[group] = chosen
        environments = config.n_envs_per_worker(self.on_policy)
        workers = max(n for n in range(1, self._workers + 1) if environments % n == 0)
        random = 0 if self.on_policy else config.off_policy_init_random_frames
        share = environments // workers
        batched = bool(self.test_env.batch_size)
        options: dict[str, Any] = {
            "num_workers": workers,
            "envs_per_worker": 1 if batched else share,
            "frames_per_batch": config.collected_frames_per_batch(self.on_policy),
            "total_frames": config.get_max_n_frames(self.on_policy),
            "init_random_frames": random,
            "seed": self.seed,
            # BenchMARL's experiments are of one process, also under torchrun.
            "rank": 0,
            "world_size": 1,
        }
        if config.sampling_device != "cpu":
            options["policy_device"] = config.sampling_device
            options["storing_device"] = config.sampling_device
        policy = self.policy
        if self.model_config.is_rnn:
            policy = TensorDictSequential(self._initial_states(), policy)
        self.collector = MultiSyncCollector(
            self._factory(share if batched else 1),
            policy,
            **options | self._collector_options,
        )

    def _initial_states(self) -> "_InitialStates":
        shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
        for group, agents in self.group_map.items():
            # Protected, but what BenchMARL's own transforms are made from.
            spec = self.model_config._get_model_state_spec_inner(group=group)  # noqa: SLF001
            for key in spec.keys(include_nested=True, leaves_only=True):
                shapes[group, *key_path(key)] = (len(agents), *spec[key].shape)
        return _InitialStates(shapes)

    def _factory(self, environments: int) -> Callable[[], TensorDictEnv]:
        """Return a factory of one environment, or of a batch of several."""
        if not isinstance(self.task, _OurTask):
            build = self.task.get_env_fun(
                num_envs=environments,
                continuous_actions=self.continuous_actions,
                seed=None,
                device="cpu",
            )
            return partial(_transformed, self.task, build, sums=True)
        make = self.task.factory(continuous_actions=self.continuous_actions)
        if not self.task.get_env_transforms(self.test_env):
            return make  # Much faster than with TorchRL's transforms around it.
        return partial(_transformed, self.task, lambda: to_torchrl(make()), sums=False)

    @override
    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state, which BenchMARL's own ``Experiment`` can load, too."""
        state: OrderedDict[str, Any] = super().state_dict()
        ours = state["collector"]
        state["collector"] = {
            **ours,
            "policy_state_dict": self.policy.state_dict(),
            "env_state_dict": OrderedDict(),
            "iter": ours["batches"] - 1,
        }
        return state

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state, which may be of BenchMARL's own ``Experiment``.

        Environments then begin new episodes.
        """
        saved = state_dict["collector"]
        self.policy.load_state_dict(saved["policy_state_dict"])
        begun = self.collector.state_dict()
        if "workers" in saved:
            resumed = {**saved, "policy_state_dict": begun["policy_state_dict"]}
        else:
            counters = {"frames": saved["frames"], "batches": saved["iter"] + 1}
            resumed = begun | counters
        super().load_state_dict({**state_dict, "collector": resumed})
        if "workers" not in saved:
            self.collector.update_policy_weights_()

    @staticmethod
    def reload_from_file(
        restore_file: str,
        experiment_patch: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "Experiment":
        """Resume an experiment from one of its checkpoints.

        Args:
            restore_file: the checkpoint.
            experiment_patch: settings of BenchMARL's ``ExperimentConfig`` to change.
            options: ``workers``, which must be as before, and ``collector_options``.

        Raises:
            FileNotFoundError: if ``config.pkl`` of the experiment is missing.
            ValueError: if a setting does not exist.
        """
        path = Path(restore_file).resolve().parents[1] / "config.pkl"
        if not path.exists():
            raise FileNotFoundError(
                f"{path}, which BenchMARL writes at the start of an experiment, is "
                f"missing, so {restore_file} cannot be resumed."
            )
        with path.open("rb") as file:
            task, task_config, algorithm, model, seed, config, critic, callbacks = (
                pickle.load(file) for _ in range(8)
            )
        task.config = task_config
        config.restore_file = restore_file
        for name, value in (experiment_patch or {}).items():
            if not hasattr(config, name):
                raise ValueError(f"BenchMARL's ExperimentConfig has no setting {name}.")
            setattr(config, name, value)
        return Experiment(
            task=task,
            algorithm_config=algorithm,
            model_config=model,
            seed=seed,
            config=config,
            critic_model_config=critic,
            callbacks=callbacks,
            **options,
        )


def _builder(task: str) -> Callable[..., MultiAgentEnv]:
    """Return what builds a task, from the registered families of environments."""
    for provider in providers():
        with suppress(ValueError):  # This family does not know it.
            return provider.find_task(task)
    raise ValueError(f"No registered family of environments knows the task {task!r}.")


def _transformed(
    task: TaskClass, build: Callable[[], EnvBase], *, sums: bool
) -> TensorDictEnv:
    """Build a TorchRL environment with a task's transforms, for our workers.

    Args:
        task: has the transforms.
        build: builds the environment.
        sums: whether to sum rewards, which our own environments do themselves.
    """
    env = build()
    transforms = [*task.get_env_transforms(env)]
    if sums:
        transforms.append(task.get_reward_sum_transform(env))
    try:
        env.set_seed(0)
    except NotImplementedError:
        seeded = False
    else:
        seeded = True
    wrapped: TensorDictEnv = TorchRLWrapper(
        TransformedEnv(env, Compose(*transforms)), repeats=seeded
    )
    return wrapped
