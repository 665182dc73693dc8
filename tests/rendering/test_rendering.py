"""Pictures of played and recorded episodes, and videos of them."""

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.packages import skip_without
from support.scripts import run_python

pytest.importorskip("imageio_ffmpeg", reason="needs the extra video")

import imageio.v2 as imageio
from support.zoo import Script, ScriptedEnv
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import (
    Collector,
    evaluate,
    open_dataset,
    play,
    record,
    to_frames,
    write_video,
)
from marl_collect.core.seeding import episode_seed
from marl_collect.envs import MeltingpotEnv, PettingZooEnv, PettingZooWrapper
from marl_collect.models import make_policy
from marl_collect.rendering.overlay import caption, used_part
from marl_collect.rendering.pictures import to_picture, to_png

# imageio's reader leaves closing a pipe to the garbage collector.
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning",
        "ignore:unclosed file:ResourceWarning",
    ),
]


def spread() -> PettingZooEnv:
    return PettingZooEnv("simple_spread_v3", render_mode="rgb_array", max_cycles=6)


def test_play_yields_a_picture_per_frame_and_the_first_of_each_episode() -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    pictures = list(play(spread, make_policy(spread), episodes=2, seed=3))
    assert len(pictures) == 2 * (6 + 1)
    assert pictures[0].shape == (700, 700, 3)
    assert pictures[0].dtype == np.uint8
    assert not np.array_equal(pictures[0], pictures[6])
    cut_pictures = list(play(spread, max_frames_per_traj=2, episodes=3, seed=3))
    with pytest.raises(TypeError, match="its old name max_frames: pass one"):
        list(play(spread, max_frames=2, max_frames_per_traj=2))
    with pytest.warns(DeprecationWarning, match="now called max_frames_per_traj"):
        old_name = list(play(spread, max_frames=2, episodes=3, seed=3))
    assert len(old_name) == len(cut_pictures)
    assert len(cut_pictures) == 3 * 3
    assert np.array_equal(cut_pictures[0], pictures[0])  # The same seed.


def test_the_overlay_is_a_band_above_the_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    captions = Mock(wraps=caption)
    monkeypatch.setattr("marl_collect.rendering.playing.caption", captions)
    list(play(spread, episodes=2, max_frames_per_traj=2, overlay=True))
    # Of the last one nobody sees the picture.
    expected = [*((e, t) for e in range(2) for t in range(3)), (2, 0)]
    assert [call.args[:2] for call in captions.call_args_list] == expected
    plain = list(play(spread, seed=3))
    pictures = list(play(spread, seed=3, overlay=True))
    height = plain[0].shape[0]
    pairs = zip(plain, pictures, strict=True)
    assert all(np.array_equal(a, b[-height:]) for a, b in pairs)
    bands = [picture[:-height] for picture in pictures]
    assert all(band.min() < 100 for band in bands)  # Dark text on white.
    assert not np.array_equal(bands[0], bands[-1])


def test_captions_name_agents_or_sum_large_groups() -> None:
    returns = {"a": np.array([1.0, 2.0, 0.5, 0.0]), "b": np.ones(5)}
    agents = {"a": ["x", "y", "z", "w"], "b": [f"b_{i}" for i in range(5)]}
    assert caption(1, 7, returns, agents) == [
        "episode 1   step 7   team return: 8.5",
        "x: 1.0   y: 2.0   z: 0.5   w: 0.0",
        "b (5 agents): 5.0",
    ]


def drawn(render: Callable[[int], Any]) -> CountingEnv:
    """Return an environment whose pictures depend on the number of steps."""
    env = CountingEnv()
    object.__setattr__(env, "render", lambda: render(env._steps))
    return env


def with_a_margin() -> CountingEnv:
    picture = np.zeros((10, 12, 3), np.uint8)

    def render(steps: int) -> Any:  # Later pictures use more of it.
        picture[2 : 5 + steps, 3:8] = 7
        return picture

    env = drawn(render)
    object.__setattr__(env, "has_unused_margin", True)
    return env


def test_the_black_margin_of_the_first_picture_is_cut() -> None:
    shapes = {picture.shape for picture in play(with_a_margin, seed=5)}
    assert shapes == {(3, 5, 3)}
    assert used_part(np.zeros((10, 12, 3), np.uint8)) == (slice(None), slice(None))


def drawing_its_steps() -> CountingEnv:
    return drawn(lambda steps: np.full((2, 2, 3), steps, np.uint8))


def test_captions_have_the_return_of_every_agent_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[dict[str, Any]] = []

    def noting(episode: int, step: int, returns: Any, agents: Any) -> Any:
        shown.append({name: total.tolist() for name, total in returns.items()})
        return caption(episode, step, returns, agents)

    monkeypatch.setattr("marl_collect.rendering.playing.caption", noting)
    list(play(drawing_its_steps, episodes=2, overlay=True, seed=5))
    with Collector(drawing_its_steps, frames_per_batch=60, seed=5) as collector:
        batch = collector.next()[0]
    expected = []
    for number in (0, 1):
        rewards = batch[batch["collector", "traj_ids"] == number]["next"]
        for t in range(len(rewards) + 1):
            groups = {name: rewards[name, "reward"] for name in ("hunter", "prey")}
            sums = {name: r[:t, :, 0].double().sum(0) for name, r in groups.items()}
            expected.append({name: total.tolist() for name, total in sums.items()})
    assert len(expected) > 10
    assert shown[: len(expected)] == expected


def test_play_and_evaluate_play_the_same_episodes() -> None:
    policy = make_policy(CountingEnv)
    pictures = play(drawing_its_steps, policy, episodes=3, seed=5)
    steps = [int(picture[0, 0, 0]) for picture in pictures]
    played = evaluate(policy, CountingEnv, episodes=3, seeds=5, num_workers=2)
    assert steps == [t for length in played.lengths for t in range(length + 1)]


@pytest.mark.parametrize("wrong", [{"episodes": 0}, {"episodes": 1.5}, {"overlay": 1}])
def test_play_refuses_arguments_of_another_kind(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be "):
        next(play(drawing_its_steps, **wrong))


def test_play_is_the_same_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = np.array(list(play(drawing_its_steps, episodes=5, seed=5)))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert np.array_equal(list(play(drawing_its_steps, episodes=5, seed=5)), alone)


def test_to_frames_compares_every_observation_also_after_the_last_action() -> None:
    def scripted(**script: Any) -> PettingZooWrapper:
        env = ScriptedEnv(Script(**script), render_mode="rgb_array")
        return PettingZooWrapper(env, done_on_any=False)

    rollout = scripted(max_cycles=4).rollout(9)
    assert len(to_frames(lambda: scripted(max_cycles=4), rollout, seed=0)) == 5
    with pytest.raises(ValueError, match="ends with frame 1, but .* has 4 frames"):
        to_frames(lambda: scripted(max_cycles=2), rollout, seed=0)
    rollout["next", "agent", "observation"][3, 1, 0] = 7
    with pytest.raises(ValueError, match="after frame 3, the last one, its observatio"):
        to_frames(lambda: scripted(max_cycles=4), rollout, seed=0)
    rollout["agent", "observation"][0, 1, 0] = 7
    with pytest.raises(ValueError, match="at frame 0 .* at agent/observation"):
        to_frames(lambda: scripted(max_cycles=4), rollout, seed=0)


def test_to_frames_repeats_episodes_whose_observations_the_policy_changed() -> None:
    env, policy = drawing_its_steps(), make_policy(CountingEnv)

    def act(td: TensorDict) -> Any:
        for group in env.group_map:
            td[group, "observation"] = 2 * td[group, "observation"]
        return policy(td)

    with Collector(drawing_its_steps, act, frames_per_batch=99, seed=5) as collector:
        batch = collector.next()
    assert batch is not None
    episode = batch[0][batch[0]["collector", "traj_ids"] == 0]
    seed = episode_seed(5, 0, 0)
    frames = to_frames(drawing_its_steps, episode, seed=seed)
    assert frames[:, 0, 0, 0].tolist() == list(range(len(episode) + 1))
    with pytest.raises(ValueError, match="differs from the record: at frame 1 "):
        to_frames(drawing_its_steps, episode, seed=seed + 1)


def lengths() -> PettingZooWrapper:
    """Return episodes as long as their task says, whose pictures show this number."""
    env = ScriptedEnv(Script(max_cycles=2), render_mode="rgb_array")

    def set_task(length: int) -> None:
        env.script = Script(max_cycles=length)

    def render() -> Any:
        return np.full((4, 4, 3), env.script.max_cycles, np.uint8)

    object.__setattr__(env, "set_task", set_task)
    object.__setattr__(env, "render", render)
    return PettingZooWrapper(env, done_on_any=False)


def by_number(seed: int, episode: int, level: int) -> int:
    del seed
    return 10 * level + episode + 2


def test_episodes_of_a_curriculum_are_repeated_with_their_tasks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"curriculum": by_number, "level": 1, "seed": 7}
    record(tmp_path / "d", lengths, episodes=4, num_workers=2, **options)
    trajectories = open_dataset(tmp_path / "d").trajectories
    shown = set()
    for trajectory, seed in zip(trajectories, trajectories.seeds, strict=True):
        assert seed is not None
        pictures = to_frames(lengths, trajectory, seed=seed, curriculum=by_number)
        assert len(pictures) == len(trajectory) + 1
        assert (pictures == len(trajectory)).all()
        shown.add(len(trajectory))
        with pytest.raises(ValueError, match="recorded with a curriculum, .* pass"):
            to_frames(lengths, trajectory, seed=seed)
    assert shown == {12, 13}
    alone = trajectories[0].exclude(("collector", "level"))
    with pytest.raises(ValueError, match="'level'.* is missing"):
        to_frames(lengths, alone, seed=7, curriculum=by_number)
    played = list(play(lengths, episodes=2, **options))
    assert [int(picture[0, 0, 0]) for picture in played] == [12] * 13 + [13] * 14


@pytest.mark.parametrize(
    "image",
    [
        np.full((8, 9, 3), 7, np.int64),
        np.full((8, 9, 4), 7, np.uint8),
        np.full((8, 9), 7, np.uint8),
        [[7, 7], [7, 7]],
    ],
    ids=["int64", "alpha", "grey", "lists"],
)
def test_images_of_integers_are_pictures(image: Any) -> None:
    picture = next(iter(play(lambda: drawn(lambda _: image), overlay=True)))
    height, width = np.shape(image)[:2]
    assert picture.shape[2] == 3
    plain: Any = next(iter(play(lambda: drawn(lambda _: image))))
    assert (plain.shape, plain.dtype) == ((height, width, 3), np.uint8)
    assert (plain == 7).all()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.full((8, 8, 3), 0.5), r"\[8, 8, 3\] of float64"),
        (np.full((8, 8, 3), 300), r"\[8, 8, 3\] of int64"),
        (np.full((8, 8, 3), -1), r"\[8, 8, 3\] of int64"),
        (np.zeros((3, 8, 9), np.uint8), r"\[3, 8, 9\] of uint8"),
        (np.zeros((0, 8, 3), np.uint8), r"\[0, 8, 3\] of uint8"),
        (np.zeros(8, np.uint8), r"\[8\] of uint8"),
    ],
)
def test_other_images_are_errors(image: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"counting: render\(\) must .*{message}"):
        list(play(lambda: drawn(lambda _: image)))


def test_pictures_that_are_left_half_way_are_quiet_at_exit() -> None:
    """The environment is closed while it still has its modules."""
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    code = """\
from marl_collect.core.seeding import episode_seed
from marl_collect.envs import PettingZooEnv
from marl_collect.rendering.replaying import replay_pictures

def spread():
    return PettingZooEnv("simple_spread_v3", render_mode="rgb_array", max_cycles=6)

with spread() as env:
    env.set_seed(7)
    episode = env.rollout(6)
pictures = replay_pictures(spread, episode, seed=episode_seed(7, 0, 0))
print(next(pictures).shape)
"""
    done = run_python("-c", code, interpreter=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(700, 700, 3)\n", "")


def test_errors_say_why_nothing_can_be_rendered() -> None:
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        list(play(lambda: PettingZooEnv("simple_spread_v3")))
    with pytest.raises(TypeError, match="must be a factory"):
        list(play(CountingEnv()))  # type: ignore[arg-type]
    batch = Collector(CountingEnv, frames_per_batch=10).next()
    with pytest.raises(ValueError, match=r"one episode \[T\], but .* \[1, 10\]"):
        to_frames(CountingEnv, batch, seed=0)


@pytest.mark.parametrize("size", [min, max])
def test_meltingpot_is_rendered(monkeypatch: pytest.MonkeyPatch, size: Any) -> None:
    skip_without("dmlab2d", "needs the extra meltingpot")
    # A map of coins has a random size, in a picture of the largest size.
    monkeypatch.setattr(random, "randint", size)

    def make() -> Any:
        return MeltingpotEnv("coins", observations=["RGB"])

    # As the videos of `compare` and `render`: with text, without the unused margin.
    pictures = list(play(make, max_frames_per_traj=3, overlay=True))
    assert len(pictures) == 4
    assert all(p.ndim == 3 and p.shape == pictures[0].shape for p in pictures)
    first, last = pictures[0], pictures[-1]
    assert first[0].min() == 255  # The band above the world is white,
    assert first[:30].min() < 100  # and has text,
    assert not np.array_equal(first[:30], last[:30])  # which counts the steps.
    assert last[-1].any(axis=-1).all()  # The lowest row and the last column are walls.
    assert last[-20:, -1].any(axis=-1).all()
    with make() as env:
        rollout = env.rollout(2)
        picture = env.render()
    assert picture is not None
    assert picture[-1].any() == (size is max)
    with pytest.raises(ValueError, match="does not repeat"):
        to_frames(make, rollout, seed=0)


@pytest.mark.parametrize("name", ["x.mp4", "x.gif"])
def test_a_video_has_every_picture(tmp_path: Path, name: str) -> None:
    frames = np.zeros((12, 31, 45, 3), np.uint8)
    for t in range(12):
        frames[t, :, : 3 * t] = 255
    assert write_video(tmp_path / name, frames, fps=10, scale=2) == 12
    pictures = imageio.mimread(tmp_path / name)
    assert len(pictures) == 12
    assert pictures[0].shape[:2] == (62, 90)
    for t, image in enumerate(pictures):
        bright = (image[..., 0] > 127).mean(0)
        assert abs(int((bright > 0.5).sum()) - 6 * t) <= 2
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_small_pictures_are_enlarged_to_even_sides(tmp_path: Path) -> None:
    write_video(tmp_path / "x.mp4", [np.zeros((33, 47, 3), np.uint8)] * 3)
    assert imageio.mimread(tmp_path / "x.mp4")[0].shape == (232, 330, 3)


def test_a_png_has_the_pixels_and_checksums() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 7), np.uint8)
    picture = to_picture(pixels)  # Channels first, as some environments store them.
    flat = np.zeros((4, 5, 3), np.uint8)  # Channels last, and few rows.
    assert to_picture(flat).shape == flat.shape
    png = to_png(picture)
    assert np.array_equal(imageio.imread(png), pixels.transpose(1, 2, 0))
    chunks = png[8:]
    while chunks:  # Length, kind and data, checksum; most readers skip the checksum.
        end = 8 + int.from_bytes(chunks[:4], "big")
        assert zlib.crc32(chunks[4:end]) == int.from_bytes(chunks[end : end + 4], "big")
        chunks = chunks[end + 4 :]


def test_failed_videos_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Any]:
        yield np.zeros((32, 32, 3), np.uint8)
        raise RuntimeError("the world ended")

    with pytest.raises(RuntimeError, match="the world ended"):
        write_video(tmp_path / "x.mp4", broken())
    with pytest.raises(ValueError, match="no frames"):
        write_video(tmp_path / "x.mp4", [])
    others: list[Any] = [np.zeros((8, 8, 3)), np.zeros((8, 8), np.uint8), "picture"]
    for frame in others:
        with pytest.raises(ValueError, match=r"Frame 1 must be uint8 \[height, width"):
            write_video(tmp_path / "x.mp4", [np.zeros((8, 8, 3), np.uint8), frame])
    for fps in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="fps must be a number more than 0"):
            write_video(tmp_path / "x.gif", [], fps=fps)
    with pytest.raises(ValueError, match="scale must be an integer of at least 1"):
        write_video(tmp_path / "x.mp4", [np.zeros((8, 8, 3), np.uint8)], scale=0)
    with pytest.raises(ValueError, match="must end in one of .mp4"):
        write_video(tmp_path / "x.doc", [])
    with pytest.raises(FileNotFoundError, match="no folder"):
        write_video(tmp_path / "no" / "x.mp4", [])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match=r"marl-collect\[video\]"):
        write_video(tmp_path / "x.mp4", [])
