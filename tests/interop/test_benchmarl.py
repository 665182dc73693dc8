"""BenchMARL experiments on our collectors; `make test-versions` runs them."""

from pathlib import Path
from typing import Any

import pytest

from marl_collect import MultiSyncCollector

REASON = "needs BenchMARL, which needs torchrl<0.12"
algorithms = pytest.importorskip("benchmarl.algorithms", reason=REASON)
experiment = pytest.importorskip("benchmarl.experiment", reason=REASON)
models = pytest.importorskip("benchmarl.models", reason=REASON)
tasks = pytest.importorskip("benchmarl.environments", reason=REASON)
pytest.importorskip("mpe2")
pytest.importorskip("Box2D")
bridge = pytest.importorskip("marl_collect.interop.benchmarl", reason=REASON)

FRAMES = 400
pytestmark = pytest.mark.filterwarnings("ignore")


def config(folder: Path, **settings: Any) -> Any:
    made = experiment.ExperimentConfig.get_from_yaml()
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
        assert hasattr(made, name), name
        setattr(made, name, value)
    return made


def build(
    folder: Path, algorithm: str, task: str, model: str = "Mlp", **settings: Any
) -> Any:
    return bridge.Experiment(
        task=getattr(tasks.PettingZooTask, task).get_from_yaml(),
        algorithm_config=getattr(algorithms, f"{algorithm}Config").get_from_yaml(),
        model_config=getattr(models, f"{model}Config").get_from_yaml(),
        seed=0,
        config=config(folder, **settings),
        workers=2,
    )


def parameters(made: Any) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in made.policy.named_parameters()}


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
    made = build(tmp_path, algorithm, task, model, evaluation=True, loggers=["csv"])
    assert isinstance(made.collector, MultiSyncCollector)
    paths = {line.partition(" ")[0] for line in made.collector.explain()}
    assert paths == ({"Fused:"} if model == "Mlp" else {"Not"})
    before = parameters(made)
    made.run()
    assert made.total_frames == 2 * FRAMES
    after = parameters(made)
    assert any((before[name] != after[name]).any() for name in before)
    version = made.collector.policy_version
    assert version == 2  # Published after each of the two batches.


def test_a_checkpoint_resumes(tmp_path: Path) -> None:
    first = build(tmp_path, "Mappo", "SIMPLE_SPREAD", checkpoint_interval=FRAMES)
    first.run()
    (checkpoint,) = Path(first.folder_name).glob(f"checkpoints/*_{FRAMES}.pt")
    again = bridge.Experiment.reload_from_file(str(checkpoint), workers=2)
    assert again.total_frames == FRAMES
    again.run()
    assert again.total_frames == 2 * FRAMES
    assert again.collector.frames == first.collector.frames


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.pkl"):
        bridge.Experiment.reload_from_file(str(tmp_path / "checkpoints" / "c.pt"))


def test_collecting_with_gradients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="collect_with_grad=True"):
        build(tmp_path, "Mappo", "SIMPLE_SPREAD", collect_with_grad=True)
