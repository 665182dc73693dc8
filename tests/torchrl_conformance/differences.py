"""Where marl_collect and TorchRL behave differently, and why.

A line names a test of this folder that one implementation fails. The test must fail
with the named exception; once it passes, the line is stale and the test run fails.
`python tests/torchrl_conformance/differences.py` prints the table of
docs/torchrl_conformance.md.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

import pytest

Raises = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True)
class Difference:
    """One test that one implementation fails.

    Attributes:
        test: the test's name, without parameters or with them.
        fails: the implementation that does not behave as the test says.
        raises: what the test raises.
        behaviour: what the test says.
        reason: what this implementation does, and why.
        below: only TorchRL versions below this one fail; None if all do.
    """

    test: str
    fails: str
    raises: Raises
    behaviour: str
    reason: str
    below: str | None = None

    def applies(self) -> bool:
        """Return whether the installed TorchRL is expected to fail."""
        return self.below is None or _installed() < _release(self.below)

    def covers(self, test_id: str, implementation: str) -> bool:
        """Return whether a test item is expected to fail."""
        if implementation != self.fails or not self.applies():
            return False
        return test_id == self.test or test_id.partition("[")[0] == self.test


OURS, THEIRS = "marl_collect", "torchrl"
DIFFERENCES: tuple[Difference, ...] = (
    # PettingZoo
    Difference(
        "test_numbers_in_infos_are_entries",
        OURS,
        KeyError,
        'Numbers in infos are entries at `(g, "info", name)`.',
        'Only with `info_keys=("name",)`: infos differ from step to step.',
    ),
    Difference(
        "test_deaths_need_a_mask",
        OURS,
        pytest.fail.Exception,
        "An agent's death is an error without `use_mask=True`.",
        "Deaths are never an error.",
    ),
    Difference(
        "test_there_is_no_mask_by_default",
        OURS,
        AssertionError,
        'There is no `(g, "mask")` by default.',
        "There is one; `use_mask=False` omits it.",
    ),
    Difference(
        "test_attributes_of_the_environment_are_visible",
        OURS,
        AttributeError,
        "Attributes of the PettingZoo environment are attributes of the wrapper.",
        "They are attributes of `wrapper.env`.",
    ),
    Difference(
        "test_an_agent_that_terminated_is_never_truncated",
        THEIRS,
        AssertionError,
        "An agent that terminated is never truncated.",
        "Every dead agent is also truncated from the next step on.",
    ),
    Difference(
        "test_in_turns_deaths_are_no_error",
        THEIRS,
        AssertionError,
        "Agents that take turns may die.",
        "The dead agent gets an action, which PettingZoo rejects.",
    ),
    Difference(
        "test_closing_is_noted",
        THEIRS,
        AssertionError,
        "`is_closed` is true after `close()`.",
        "It stays false.",
    ),
    # MeltingPot
    Difference(
        "test_the_world_is_seen_at_the_root",
        OURS,
        KeyError,
        'The image of the world is at the root, as `"RGB"`.',
        "Only with `world_rgb=True`: rendering and storing it takes time.",
    ),
    Difference(
        "test_rewards_have_the_substrate_s_dtype",
        OURS,
        AssertionError,
        "MeltingPot's rewards are float64.",
        "They are float32, as everywhere else.",
    ),
    Difference(
        "test_max_steps_terminate",
        OURS,
        AssertionError,
        "`max_steps` terminates an episode of MeltingPot.",
        "It truncates the episode, so the value is bootstrapped.",
    ),
    Difference(
        "test_only_the_environment_is_done",
        OURS,
        AssertionError,
        "MeltingPot has flags at the root only.",
        "Groups have them too, as everywhere else.",
    ),
    Difference(
        "test_substrates_cannot_be_seeded",
        OURS,
        pytest.fail.Exception,
        "`set_seed` of a MeltingPot environment raises `NotImplementedError`.",
        "The seed is passed to Lab2d.",
    ),
    # Batched environments
    Difference(
        "test_set_seed_returns_the_seed_after_the_last",
        OURS,
        AssertionError,
        "`set_seed` of a batch returns the seed after that of its last environment.",
        "It returns the seed after the given one. Environment seeds are derived from "
        "the given seed and the environment's index.",
    ),
    Difference(
        "test_a_static_seed_is_every_environment_s",
        OURS,
        AssertionError,
        "With `static_seed=True` all environments of a batch play the same episode.",
        "They never do.",
    ),
    Difference(
        "test_batches_nest",
        OURS,
        TypeError,
        "A batch of batches has two batch dimensions.",
        "Batches cannot be nested.",
    ),
    Difference(
        "test_actions_of_a_wrong_shape_are_errors[SerialEnv-torchrl]",
        THEIRS,
        pytest.fail.Exception,
        "Actions with a wrong shape raise an error, in `SerialEnv` too.",
        "They reach the environment.",
    ),
    Difference(
        "test_private_attributes_are_not_dispatched[ParallelEnv-torchrl]",
        THEIRS,
        pytest.fail.Exception,
        "A private attribute that does not exist raises `AttributeError` at once.",
        "`ParallelEnv` returns an object that raises when called.",
    ),
    Difference(
        "test_methods_are_called_in_every_environment",
        OURS,
        AttributeError,
        "`env.method()` of a batch calls the method of every environment.",
        '`env.call("method")` does: a plain name is a value.',
    ),
    Difference(
        "test_attributes_of_attributes_are_reached[torchrl]",
        THEIRS,
        EOFError,
        "`env.a.b` of a `ParallelEnv` is the attribute `b` of every environment's `a`.",
        "Versions before 0.14 lose their workers.",
        below="0.14",
    ),
    Difference(
        "test_attributes_of_attributes_are_reached",
        OURS,
        AttributeError,
        "`env.a.b` of a `ParallelEnv` is the attribute `b` of every environment's `a`.",
        "`env.a` is the list of the environments' `a`. Use an environment method: "
        '`env.call("method")`.',
    ),
    Difference(
        "test_a_rollout_may_end_with_the_last_environment",
        THEIRS,
        KeyError,
        "`break_when_all_done=True` ends a rollout with the last environment.",
        "It raises an error if episodes have different lengths.",
    ),
    Difference(
        "test_a_rollout_calls_back",
        THEIRS,
        AssertionError,
        "`rollout(callback=)` calls the callback in every step.",
        "It does so in every step except the last.",
    ),
    # Collectors in one process
    Difference(
        "test_a_batch_has_the_keys_of_rollout_and_trajectories",
        OURS,
        AssertionError,
        "A batch has the keys of a rollout, and `traj_ids`.",
        'It also has `(g, "mask")`; see above.',
    ),
    Difference(
        "test_one_environment_has_no_batch_dimension",
        OURS,
        AssertionError,
        "A batch of one environment is `[T]`.",
        "It is `[1, T]`.",
    ),
    Difference(
        "test_policy_and_factory_together_are_a_type_error",
        OURS,
        pytest.fail.Exception,
        "`policy` and `policy_factory` are mutually exclusive in `Collector`.",
        "`policy` supplies the weights, as in the collectors with workers.",
    ),
    Difference(
        "test_the_same_tensordict_may_be_returned",
        OURS,
        TypeError,
        "`return_same_td=True` returns the same object every time.",
        "The option does not exist: a batch is a view of memory that is not "
        "overwritten while it is held.",
    ),
    Difference(
        "test_hooks_run_before_and_after_a_batch",
        OURS,
        TypeError,
        "`pre_collect_hook` and `post_collect_hook` are called.",
        "The options do not exist: put the code in your loop over the batches.",
    ),
    Difference(
        "test_equal_seeds_give_equal_observations[torchrl-False]",
        THEIRS,
        AssertionError,
        "After `set_seed`, all data depend on the seed.",
        "The first frame comes from the previous reset, unless `reset()` follows.",
    ),
    Difference(
        "test_the_death_of_an_agent_does_not_end_a_trajectory",
        THEIRS,
        AssertionError,
        "The death of one agent does not end a trajectory.",
        "After a death, every frame has its own id.",
    ),
    Difference(
        "test_long_trajectories_are_truncated",
        THEIRS,
        RuntimeError,
        "`max_frames_per_traj` truncates trajectories of several groups.",
        "Versions before 0.14 cannot truncate the groups of a batch.",
        below="0.14",
    ),
    Difference(
        "test_environments_may_be_reset_for_every_batch",
        THEIRS,
        AssertionError,
        "`reset_at_each_iter` begins trajectories with new ids.",
        "Versions before 0.14 reuse the old ids.",
        below="0.14",
    ),
    Difference(
        "test_a_reset_begins_new_trajectories",
        THEIRS,
        AssertionError,
        "`reset()` begins trajectories with new ids.",
        "Versions before 0.14 reuse the old ids.",
        below="0.14",
    ),
    Difference(
        "test_a_frame_has_the_version_of_its_policy",
        THEIRS,
        (AssertionError, TypeError),
        "`policy_version` is the version of the weights that acted in the frame.",
        "The first frame after an update has the older version. Versions before 0.14 "
        "cannot store it alongside a new one.",
    ),
    Difference(
        "test_a_state_under_next_is_read_in_the_next_frame",
        THEIRS,
        AssertionError,
        'Policy outputs under `"next"` appear at the root of the next frame.',
        "Only with a `TensorDictPrimer` in the environment.",
    ),
    # Workers and weights
    Difference(
        "test_optimisers_alone_reach_no_worker",
        THEIRS,
        AssertionError,
        "Workers get new weights only through `update_policy_weights_()`.",
        "On the CPU they share the trainer's memory, so optimiser steps reach them in "
        "the middle of a batch.",
    ),
    Difference(
        "test_a_frame_that_terminated_is_also_truncated_at_the_end",
        OURS,
        AssertionError,
        "`set_truncated` also truncates a last frame that terminated.",
        "A terminal state stays terminal: nothing may be bootstrapped from it.",
    ),
    Difference(
        "test_a_state_has_an_entry_per_worker",
        OURS,
        AssertionError,
        'The state of a collector has entries `"worker0"`, `"worker1"` and so on.',
        'It has `"policy_state_dict"` once, for all workers.',
    ),
    Difference(
        "test_statistics_may_be_by_worker",
        OURS,
        TypeError,
        '`stats(workers="per_worker")` has entries per worker.',
        "`stats()` has returns and counters of all environments.",
    ),
    # Networks
    Difference(
        "test_the_first_dimension_of_separate_parameters_is_the_agent[marl_collect-False]",
        OURS,
        AssertionError,
        "Separate weights of n agents have shape `[n, outputs, inputs]`, "
        "biases `[n, outputs]`.",
        "They have `[n, inputs, outputs]` and `[n, 1, outputs]`: one batched product.",
    ),
    Difference(
        "test_parameters_are_below_params",
        OURS,
        AssertionError,
        "Parameter names of a multi-agent network begin with `params.`.",
        "They begin with `net.`; the rest is the same.",
    ),
)


@cache
def _installed() -> tuple[int, ...]:
    """Return the release of TorchRL, whose metadata takes milliseconds to read."""
    return _release(version("torchrl"))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| behaviour | differs | how, and why |", "|---|---|---|"]
    lines += [f"| {d.behaviour} | {d.fails} | {d.reason} |" for d in DIFFERENCES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201
