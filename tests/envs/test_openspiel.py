"""OpenSpiel's games give the data of pyspiel's own rollout, and none is cut."""

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")
pytest.importorskip("pyspiel", reason="needs the extra openspiel")
pytest.importorskip("shimmy", reason="needs the extra openspiel")

import pyspiel
from family_tools import Array, assert_equal, episodes

from marl_collect import check_env
from marl_collect.envs import OpenSpielEnv
from marl_collect.envs.openspiel.provider import FAMILY

GAMES: list[tuple[str, dict[str, Any]]] = [
    ("kuhn_poker", {}),
    ("tiny_hanabi", {}),
    ("goofspiel", {"num_cards": 4, "imp_info": True}),
    ("leduc_poker", {"players": 3}),
    ("hanabi", {"colors": 3, "ranks": 3, "hand_size": 2}),  # rewards before the end
    ("laser_tag", {"horizon": 20}),  # rewards, chance events, simultaneous actions
    ("tic_tac_toe", {}),
]


class Rollout:
    """A game, stepped with pyspiel alone; chance is drawn as Shimmy does."""

    def __init__(self, game: Any, seed: int) -> None:
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.kind = game.get_type()
        self.players = game.num_players()
        self.state = game.new_initial_state()
        self.chosen: list[int] = []
        self._draw()

    @property
    def player(self) -> int:
        if self.state.is_simultaneous_node():
            return len(self.chosen)
        return int(self.state.current_player())

    def tensor(self, player: int) -> Any:
        if self.kind.provides_observation_tensor:
            return self.state.observation_tensor(player)
        return self.state.information_state_tensor(player)

    def act(self, action: int) -> Array:
        """Return the rewards of all players."""
        before = np.array(self.state.returns())
        if self.state.is_simultaneous_node():
            self.chosen.append(action)
            if len(self.chosen) == self.players:
                self.state.apply_actions(self.chosen)
                self.chosen = []
        else:
            self.state.apply_action(action)
        self._draw()
        return np.array(self.state.returns()) - before

    def _draw(self) -> None:
        while self.state.is_chance_node():
            outcomes, chances = zip(*self.state.chance_outcomes(), strict=True)
            self.state.apply_action(self.random.choice(outcomes, p=chances))


@pytest.mark.parametrize(("name", "parameters"), GAMES)
def test_the_data_are_those_of_pyspiel(name: str, parameters: dict[str, Any]) -> None:
    game = pyspiel.load_game(name, parameters)
    frames = n_complete = 0
    for seed, episode in episodes(partial(OpenSpielEnv, name, **parameters), 150):
        rollout = Rollout(game, seed)
        length = len(episode["done",])
        frames += length
        for step in range(length):
            location = f"{name}: seed {seed}, step {step}"
            player = rollout.player
            agent = f"player_{player}"
            for other in range(rollout.players):
                acts = episode[f"player_{other}", "mask"][step, 0]
                assert acts == (other == player), location
            assert_equal(
                episode[agent, "observation"][step, 0], rollout.tensor(player), location
            )
            legal = np.flatnonzero(episode[agent, "action_mask"][step, 0])
            assert legal.tolist() == rollout.state.legal_actions(player), location
            rewards = rollout.act(int(episode[agent, "action"][step, 0]))
            for other in range(rollout.players):
                reward = episode["next", f"player_{other}", "reward"][step, 0]
                assert_equal(reward, rewards[other], location)
            over = rollout.state.is_terminal()
            assert episode["next", "terminated"][step, 0] == over, location
            assert not episode["next", "truncated"][step].any(), location
            if over:
                assert step == length - 1
                n_complete += 1
    assert frames == 150
    assert n_complete >= 3


@pytest.mark.parametrize(("name", "parameters"), GAMES[:3])
def test_a_game_is_not_cut_before_its_returns(
    name: str, parameters: dict[str, Any]
) -> None:
    games = list(episodes(partial(OpenSpielEnv, name, **parameters), 120, seed=1))[:-1]
    assert all(frames["next", "terminated"][-1, 0] for _, frames in games)
    returns = [frames["next", "player_0", "reward"].sum() for _, frames in games]
    assert any(returns)
    if name == "kuhn_poker":  # The ante is lost or won.
        assert all(abs(total) in (1, 2) for total in returns)


def test_shimmy_alone_cuts_kuhn_poker() -> None:
    """If this fails, the repair of the length is no longer needed."""
    from shimmy.openspiel_compatibility import OpenSpielCompatibilityV0

    env = OpenSpielCompatibilityV0(game_name="kuhn_poker")
    env.reset(seed=0)
    env.step(0)
    assert any(env.truncations.values())


@pytest.mark.parametrize(("name", "parameters"), GAMES)
def test_check_env(name: str, parameters: dict[str, Any]) -> None:
    check_env(partial(OpenSpielEnv, name, **parameters), episodes=2, steps=40)


def test_the_parameters_of_a_game_are_its_settings() -> None:
    assert FAMILY.settings("openspiel/goofspiel")["num_cards"] == 13
    env = FAMILY.find_task("openspiel/goofspiel")(players=3, time_limit=5)
    assert list(env.group_map) == ["player_0", "player_1", "player_2"]
    assert env.description.time_limit == 5
    assert env.observation_space["player_0"]["observation"].dtype == np.float32
    with pytest.raises(pyspiel.SpielError, match="nothing"):
        OpenSpielEnv("kuhn_poker", nothing=1)


def test_games_that_cannot_be_collected_are_not_found() -> None:
    # A mean-field game, one with sampled chance, and one without tensors.
    for game in ("mfg_garnet", "negotiation", "coin_game", "no_game"):
        with pytest.raises(ValueError, match="^$"):
            FAMILY.find_task(f"openspiel/{game}")
