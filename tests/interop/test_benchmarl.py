"""BenchMARL experiments on our collectors; `make test-versions` runs them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from marl_collect import MultiSyncCollector

REASON = "needs BenchMARL, which needs torchrl<0.12"
algorithms = pytest.importorskip("benchmarl.algorithms", reason=REASON)
experiment = pytest.importorskip("benchmarl.experiment", reason=REASON)
models = pytest.importorskip("benchmarl.models", reason=REASON)
tasks = pytest.importorskip("benchmarl.environments", reason=REASON)
pytest.importorskip("mpe2")
pytest.importorskip("Box2D")
envs = pytest.importorskip("torchrl.envs")
bridge = pytest.importorskip("marl_collect.interop.benchmarl", reason=REASON)

FRAMES = 400
pytestmark = pytest.mark.filterwarnings("ignore")


def config(folder: Path, **settings: Any) -> Any:
    experiment_config = experiment.ExperimentConfig.get_from_yaml()
    common = {
        "loggers": [],
        "render": False,
        "evaluation": False,
        "max_n_frames": 2 * FRAMES,
        "on_policy_collected_frames_per_batch": FRAMES,
        "off_policy_collected_frames_per_batch": FRAMES,
        "on_policy_n_envs_per_worker": 4,
        "off_policy_n_envs_per_worker": 4,
        "on_policy_n_minibatch_iters": 1,
        "off_policy_n_optimizer_steps": 2,
        "evaluation_interval": FRAMES,
        "evaluation_episodes": 1,
        "save_folder": str(folder),
    }
    for name, value in (common | settings).items():
        assert hasattr(experiment_config, name), name
        setattr(experiment_config, name, value)
    return experiment_config


def build(
    folder: Path,
    algorithm: str,
    task: Any,
    model: Any = "Mlp",
    *,
    stock: bool = False,
    **settings: Any,
) -> Any:
    """Build an experiment; a task of PettingZoo and a model may be names."""
    kind: Any = experiment.Experiment if stock else bridge.Experiment
    if isinstance(task, str):
        task = getattr(tasks.PettingZooTask, task).get_from_yaml()
    if isinstance(model, str):
        model = getattr(models, f"{model}Config").get_from_yaml()
    return kind(
        task=task,
        algorithm_config=getattr(algorithms, f"{algorithm}Config").get_from_yaml(),
        model_config=model,
        seed=0,
        config=config(folder, **settings),
        **({} if stock else {"workers": 2}),
    )


def parameters(experiment_run: Any) -> dict[str, Any]:
    named = experiment_run.policy.named_parameters()
    return {name: p.detach().clone() for name, p in named}


@pytest.mark.parametrize(
    ("algorithm", "task", "model"),
    [
        ("Mappo", "MULTIWALKER", "Mlp"),
        ("Ippo", "SIMPLE_SPREAD", "Mlp"),
        ("Qmix", "SIMPLE_SPREAD", "Mlp"),
        ("Maddpg", "SIMPLE_TAG", "Mlp"),
        ("Masac", "SIMPLE_TAG", "Mlp"),
        ("Mappo", "SIMPLE_SPREAD", "Gru"),
    ],
)
def test_an_experiment_trains_on_our_collector(
    algorithm: str, task: str, model: str, tmp_path: Path
) -> None:
    options: Any = {"evaluation": True, "loggers": ["csv"]}
    new_experiment = build(tmp_path, algorithm, task, model, **options)
    assert isinstance(new_experiment.collector, MultiSyncCollector)
    paths = {line.partition(" ")[0] for line in new_experiment.collector.explain()}
    assert paths == ({"Fused:"} if model == "Mlp" else {"Not"})
    before = parameters(new_experiment)
    new_experiment.run()
    assert new_experiment.total_frames == 2 * FRAMES
    after = parameters(new_experiment)
    assert any((before[name] != after[name]).any() for name in before)
    version = new_experiment.collector.policy_version
    assert version == 2  # Published after each of the two batches.


def small_cnn() -> Any:
    cnn = models.CnnConfig.get_from_yaml()
    cnn.cnn_num_cells, cnn.cnn_kernel_sizes, cnn.cnn_strides = [4, 4], [5, 3], [4, 2]
    cnn.mlp_num_cells = [8]
    return cnn


def test_an_experiment_trains_on_meltingpot(tmp_path: Path) -> None:
    pytest.importorskip("dmlab2d")
    task = tasks.MeltingPotTask.COINS.get_from_yaml()
    task.config["max_steps"] = 10
    frames = 40
    new_experiment = build(
        *(tmp_path, "Mappo", task, small_cnn()),
        max_n_frames=frames,
        on_policy_collected_frames_per_batch=frames,
        on_policy_minibatch_size=20,
        on_policy_n_envs_per_worker=2,
        evaluation=True,
        evaluation_interval=frames,
        render=True,
    )
    assert isinstance(new_experiment.task, bridge.OurMeltingPotTask)
    pictures = rendered(new_experiment)
    before = parameters(new_experiment)
    new_experiment.run()
    assert len(pictures) > 1
    assert pictures[0].shape[-1] == 3
    after = parameters(new_experiment)
    assert any((before[name] != after[name]).any() for name in before)
    assert math.isfinite(new_experiment.mean_return)


def rendered(experiment_run: Any) -> list[Any]:
    """Collect the pictures of evaluations, which loggers encode with torchvision."""
    frames: list[Any] = []

    def log_evaluation(rollouts: Any, video_frames: list[Any], **_: Any) -> None:
        del rollouts
        frames.extend(video_frames)

    experiment_run.logger.log_evaluation = log_evaluation
    return frames


def test_evaluations_are_rendered(tmp_path: Path) -> None:
    new_experiment = build(
        tmp_path, "Mappo", "SIMPLE_SPREAD", evaluation=True, render=True
    )
    pictures = rendered(new_experiment)
    new_experiment.run()
    first = np.asarray(pictures[0])
    assert first.dtype == np.uint8
    assert first.ndim == 3
    assert first.shape[-1] == 3
    assert any((np.asarray(picture) != first).any() for picture in pictures)


class OwnTask(tasks.PettingZooTask.associated_class()):  # type: ignore[misc]
    """A user's task, on one of TorchRL's environments."""

    def get_env_fun(
        self, num_envs: int, continuous_actions: bool, seed: int | None, device: Any
    ) -> Any:
        from mpe2 import simple_spread_v3

        def build_one() -> Any:
            world = simple_spread_v3.parallel_env(
                max_cycles=20, continuous_actions=continuous_actions
            )
            return envs.PettingZooWrapper(world, categorical_actions=True)

        def build_batch() -> Any:
            return envs.SerialEnv(num_envs, build_one)

        return build_batch if self.config.get("batched") else build_one

    def has_state(self) -> bool:
        return False

    def observation_spec(self, env: Any) -> Any:
        spec = super().observation_spec(env)
        return spec[0] if env.batch_size else spec

    def action_spec(self, env: Any) -> Any:
        return env.full_action_spec_unbatched

    def group_map(self, env: Any) -> dict[str, list[str]]:
        return {"agent": [f"agent_{i}" for i in range(3)]}


def own(folder: Path, **settings: Any) -> Any:
    task = OwnTask("SIMPLE_SPREAD", {"max_cycles": 20, **settings})
    return build(folder, "Ippo", task, max_n_frames=FRAMES)


def test_a_task_of_ones_own_is_collected_from_its_environment(tmp_path: Path) -> None:
    new_experiment = own(tmp_path)
    new_experiment.run()
    assert new_experiment.total_frames == FRAMES
    assert -200 < new_experiment.mean_return < 0  # Sums of 20 negative rewards.


def test_an_experiment_is_of_one_process_also_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    new_experiment = own(tmp_path)
    numbering = new_experiment.state_dict()["collector"]["numbering"]
    new_experiment.collector.shutdown()
    assert numbering == {"rank": 0, "world_size": 1, "worker_idx": None}


def test_a_task_that_steps_a_batch_is_collected_from_it(tmp_path: Path) -> None:
    new_experiment = own(tmp_path, batched=True)
    new_experiment.test_env.reset()  # A SerialEnv that has not begun cannot be closed.
    new_experiment.run()
    assert new_experiment.total_frames == FRAMES
    assert -200 < new_experiment.mean_return < 0


def test_an_experiment_trains_on_vmas(tmp_path: Path) -> None:
    pytest.importorskip("vmas", reason="needs the extra vmas")
    frames = 8 * 20
    task = tasks.VmasTask.BALANCE.get_from_yaml()
    task.config["max_steps"] = 10
    settings: dict[str, Any] = {
        "max_n_frames": 3 * frames,
        "on_policy_collected_frames_per_batch": frames,
        "on_policy_n_envs_per_worker": 8,
        "on_policy_minibatch_size": 80,
        "evaluation": True,
        "evaluation_interval": frames,
    }
    new_experiment = build(tmp_path, "Mappo", task, **settings)
    new_experiment.run()
    assert new_experiment.total_frames == 3 * frames
    assert math.isfinite(new_experiment.mean_return)
    other = build(tmp_path, "Mappo", task, **settings)
    stock = build(tmp_path, "Mappo", task, stock=True, **settings)
    before, trained = parameters(other), parameters(new_experiment)
    for name, weight in parameters(stock).items():
        assert torch.equal(before[name], weight)
    assert any((before[name] != trained[name]).any() for name in before)
    # VMAS' generator is seeded when worlds begin, and by TorchRL only once.
    ours, theirs = other.collector.next(), next(iter(stock.collector))
    assert ours.shape == theirs.shape == (8, 20)
    for key in theirs.keys(include_nested=True, leaves_only=True):
        if "collector" not in key and key[-1] not in ("episode_reward", "_weight"):
            assert ours[key].shape == theirs[key].shape, key
    other.collector.shutdown()
    stock.collector.shutdown()


@pytest.mark.parametrize("model", ["Mlp", "Gru"])
def test_a_checkpoint_resumes(model: str, tmp_path: Path) -> None:
    first = build(tmp_path, "Mappo", "SIMPLE_SPREAD", model, checkpoint_interval=FRAMES)
    first.run()
    (checkpoint,) = Path(first.folder_name).glob(f"checkpoints/*_{FRAMES}.pt")
    reloaded = bridge.Experiment.reload_from_file(str(checkpoint), workers=2)
    assert reloaded.total_frames == FRAMES
    reloaded.run()
    assert reloaded.total_frames == 2 * FRAMES
    assert reloaded.collector.frames == first.collector.frames


@pytest.mark.parametrize("stock", [True, False], ids=["from_stock", "to_stock"])
@pytest.mark.parametrize(("algorithm", "model"), [("Mappo", "Gru"), ("Masac", "Mlp")])
def test_checkpoints_cross(
    algorithm: str, model: str, stock: bool, tmp_path: Path
) -> None:
    first = build(
        tmp_path,
        algorithm,
        "MULTIWALKER",
        model,
        stock=stock,
        checkpoint_at_end=True,
        max_n_frames=FRAMES,
    )
    first.run()
    (checkpoint,) = Path(first.folder_name).glob(f"checkpoints/*_{FRAMES}.pt")
    load: Any = bridge.Experiment if stock else experiment.Experiment
    patch = {"max_n_frames": 2 * FRAMES}
    reloaded = load.reload_from_file(str(checkpoint), experiment_patch=patch)
    assert reloaded.total_frames == FRAMES
    expected = parameters(first)
    for name, weight in parameters(reloaded).items():
        assert (weight == expected[name]).all()
    task = tasks.pettingzoo.common.PettingZooClass
    assert type(reloaded.task) is (bridge.OurPettingZooTask if stock else task)
    reloaded.run()
    assert reloaded.total_frames == 2 * FRAMES
    saved = Path(reloaded.folder_name) / "checkpoints" / f"checkpoint_{2 * FRAMES}.pt"
    state = torch.load(saved, weights_only=False)["collector"]
    assert (state["frames"], state["iter"]) == (2 * FRAMES, 1)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.pkl"):
        bridge.Experiment.reload_from_file(str(tmp_path / "checkpoints" / "c.pt"))


def test_collecting_with_gradients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="collect_with_grad=True"):
        build(tmp_path, "Mappo", "SIMPLE_SPREAD", collect_with_grad=True)
