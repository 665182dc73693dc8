"""Which test covers which row of the fault matrix, for which collectors.

"sync", "async" and "env" (`ParallelEnv`) must each be named in every row, or be in its
`absent` with the reason. A test below `processes/` is about the pool of processes that
all three are made of, so it counts for all.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BOTH, ALL = "sync async", "sync async env"
WORKERS, TRAINER = "faults/test_matrix_workers.py", "faults/test_matrix_trainer.py"
DATA, MEMORY = "faults/test_matrix_data.py", "faults/test_matrix_memory.py"
INTERRUPTS, RAY = "faults/test_matrix_interrupts.py", "distributed/test_ray_faults.py"
ENV, OPTIONS = (
    "parallel_env/test_parallel_faults.py",
    "parallel_env/test_parallel_options.py",
)
POOL, SERVER = "processes/test_pool.py", "processes/test_forkserver.py"
LAUNCHER = "processes/test_launcher.py"
SYNC, ASYNC = "collectors/test_multi_sync.py", "collectors/test_multi_async.py"
SINGLE = "collectors/test_single.py"

Shown = list[tuple[str, str, str]]
ROWS: dict[str, tuple[str, Shown]] = {
    "1": (
        "a worker is killed in a step",
        [
            (BOTH, WORKERS, "a_worker_killed_from_outside_in_a_step_is_reported"),
            ("env", ENV, "a_killed_process_is_noticed_at_once"),
        ],
    ),
    "2": (
        "a worker ends by a segmentation fault, abort or exit",
        [
            (BOTH, WORKERS, "a_worker_that_ends_itself_is_reported"),
            ("env", ENV, "a_process_that_ends_by_itself_is_reported"),
        ],
    ),
    "3": (
        "an environment raises: factory, reset, step, close",
        [
            (BOTH, WORKERS, "an_error_is_raised_with_its_own_type"),
            (BOTH, WORKERS, "an_error_while_closing_is_a_warning"),
            ("env", ENV, "an_error_is_raised_as_its_own_type"),
            ("env", ENV, "an_error_of_a_factory_is_raised_at_the_start"),
            ("env", ENV, "an_error_while_closing_is_a_warning"),
        ],
    ),
    "4": (
        "it raises what cannot be pickled",
        [
            (BOTH, WORKERS, "an_error_that_cannot_be_pickled_is_reported_as_text"),
            ("env", WORKERS, "an_error_of_parallel_env_that_cannot_be_pickled"),
        ],
    ),
    "5": (
        "an environment hangs: factory, reset, step, close",
        [
            (BOTH, WORKERS, "a_hang_is_reported_after_the_timeout"),
            (BOTH, WORKERS, "a_factory_that_hangs_has_its_own_limit"),
            (BOTH, WORKERS, "an_environment_that_hangs_in_close_does_not_block"),
            ("env", ENV, "a_process_that_hangs_is_killed_after_the_timeout"),
            ("env", ENV, "a_factory_that_hangs_is_killed_after_the_start_timeout"),
            ("env", WORKERS, "parallel_env_whose_environment_hangs_in_close_ends"),
        ],
    ),
    "6": (
        "the learner is slow",
        [
            (BOTH, WORKERS, "a_slow_learner_is_not_a_hang"),
            ("env", ENV, "pauses_of_the_trainer_are_not_a_hang"),
        ],
    ),
    "7": (
        "Ctrl-C",
        [
            (ALL, INTERRUPTS, "ctrl_c_gives_one_traceback_and_ends_all_processes"),
            (ALL, LAUNCHER, "ctrl_c_gives_one_traceback_and_leaves_no_process"),
            ("env", ENV, "an_interrupted_step_is_finished_by_the_next_call"),
        ],
    ),
    "8": (
        "SIGTERM to the trainer",
        [
            (ALL, LAUNCHER, "stuck_workers_end_after_sigterm_to_the_trainer"),
            ("async", TRAINER, "workers_end_with_the_trainer"),
            ("env", ENV, "a_script_without_close_ends_cleanly_and_quickly"),
        ],
    ),
    "9": (
        "SIGKILL of the trainer",
        [
            (ALL, LAUNCHER, "stuck_workers_end_with_a_killed_trainer"),
            ("async", TRAINER, "workers_end_with_the_trainer"),
            ("env", ENV, "a_script_without_close_ends_cleanly_and_quickly"),
        ],
    ),
    "10": (
        "the trainer raises, forgets a collector, or just ends",
        [
            (BOTH, TRAINER, "workers_end_with_the_trainer"),
            (BOTH, TRAINER, "a_forgotten_collector_ends_its_workers"),
            ("env", ENV, "a_script_without_close_ends_cleanly_and_quickly"),
            (
                "env",
                "collectors/test_lifetime.py",
                "batches_of_environments_end_with_their_last_reference",
            ),
        ],
    ),
    "11": (
        "/dev/shm is small; memory is short",
        [
            (ALL, MEMORY, "a_small_dev_shm_does_not_matter"),
            (BOTH, TRAINER, "too_little_memory_is_an_error_at_the_start"),
        ],
    ),
    "12": (
        "too few open files",
        [
            (
                "sync",
                TRAINER,
                "a_small_limit_on_open_files_is_named_and_no_process_is_left",
            ),
            (ALL, LAUNCHER, "a_small_file_limit_is_named_and_leaves_no_process"),
        ],
    ),
    "13": (
        "leaks",
        [
            ("sync", SYNC, "nothing_is_left_after_many_collectors"),
            (BOTH, "faults/test_matrix_restart.py", "restarts_leak_nothing"),
            (
                "env",
                "parallel_env/test_parallel_env.py",
                "closed_environments_leave_no_process_file_or_memory",
            ),
        ],
    ),
    "14": (
        "an action that is not finite, illegal or no action",
        [
            (
                BOTH,
                "rollout/test_action_check.py",
                "an_invalid_action_names_group_agent_and_frame",
            ),
            (
                "env",
                "rollout/test_action_check.py",
                "parallel_environments_do_not_get_invalid_actions",
            ),
            (
                "adapter",
                "envs/test_pettingzoo_actions.py",
                "nan_is_an_error_that_names_group_and_agent",
            ),
        ],
    ),
    "15": (
        "a policy of wrong keys or shapes",
        [(BOTH, DATA, "missing_entries_of_a_policy_are_reported_at_the_start")],
    ),
    "16": (
        "an environment of wrong shapes and dtypes",
        [
            ("adapter", "envs/test_pettingzoo_contents.py", "a_wrong_observation_is"),
            (
                "adapter",
                "testing/test_check_env.py",
                "a_shape_that_does_not_fit_is_reported",
            ),
        ],
    ),
    "17": (
        "agents that are unknown, late, dead or listed in another order",
        [
            ("adapter", "envs/test_pettingzoo.py", "an_unknown_agent_is_an_error"),
            ("adapter", "envs/test_pettingzoo.py", "agents_may_be_listed_in_any_order"),
        ],
    ),
    "18": (
        "environments of workers differ",
        [
            (BOTH, DATA, "different_environments_of_workers_are_reported_at_the_start"),
            ("env", OPTIONS, "environments_must_be_alike"),
        ],
    ),
    "19": (
        "a script without a guard",
        [
            ("sync", SYNC, "script_without_guard_runs_and_ends"),
            (BOTH, TRAINER, "workers_end_with_the_trainer"),
            ("env", ENV, "a_script_without_close_ends_cleanly_and_quickly"),
        ],
    ),
    "20": (
        "lambdas, closures and local classes as factories",
        [(ALL, LAUNCHER, "a_script_without_a_guard_may_use_its_own_lambdas")],
    ),
    "21": (
        "a factory that cannot be pickled",
        [
            (
                BOTH,
                "collectors/test_torchrl_defects.py",
                "errors_of_pickling_are_raised_before_anything_starts",
            ),
            ("env", DATA, "a_factory_that_cannot_be_pickled_is_refused_before"),
        ],
    ),
    "22": (
        "an instance, or one object twice",
        [
            (BOTH, SINGLE, "instance_instead_of_factory_shows_what_to_write"),
            (BOTH, SINGLE, "factory_that_returns_one_object_twice_is_refused"),
            ("env", OPTIONS, "an_instance_is_refused_with_the_factory_to_write"),
        ],
    ),
    "23, 24": (
        "fork: it is not a start method, and a fork of the trainer owns nothing",
        [
            (ALL, POOL, "an_unknown_start_method_is_refused"),
            (
                BOTH,
                TRAINER,
                "a_fork_of_the_trainer_can_neither_use_nor_end_its_workers",
            ),
            (ALL, LAUNCHER, "a_fork_of_the_trainer_neither_ends_the_workers"),
        ],
    ),
    "25": (
        "pools inside of workers",
        [
            (ALL, SERVER, "pools_nest_three_deep"),
            ("sync", TRAINER, "a_collector_works_inside_the_worker_of_a_dataloader"),
            (
                "env",
                "parallel_env/test_parallel_collecting.py",
                "inside_workers_it_gives_the_same_data",
            ),
        ],
    ),
    "26": (
        "weights are published in the middle of a batch",
        [(BOTH, DATA, "no_rollout_mixes_two_versions_of_the_weights")],
    ),
    "27": (
        "slow and fast workers",
        [
            ("async", ASYNC, "a_slow_consumer_loses_no_batch_and_starves_no_worker"),
            ("async", ASYNC, "fast_workers_do_not_wait_for_slow_ones"),
            ("async", ASYNC, "staleness_is_bounded"),
        ],
    ),
    "28": (
        "odd numbers of frames",
        [
            (BOTH, SINGLE, "bad_values_are_named"),
            (BOTH, SINGLE, "rounding_up_causes_a_warning"),
            (BOTH, SINGLE, "total_frames_are_collected_and_counted"),
        ],
    ),
    "29": (
        "a loop is left, run twice, or run by two iterators",
        [
            (BOTH, DATA, "a_loop_can_be_left_and_continued_and_ends_once"),
            (BOTH, DATA, "a_collector_can_be_shut_down_while_all_slots_are_held"),
        ],
    ),
    "30": (
        "a flood on stdout",
        [(ALL, WORKERS, "much_output_on_stdout_blocks_no_process")],
    ),
    "31": (
        "an actor is killed, a node lost; locally: a worker, with restarts",
        [
            ("ray", RAY, "a_killed_process_has_the_same_result_as_locally"),
            ("ray", RAY, "a_lost_node_is_replaced_until_no_restart_is_left"),
            ("ray", RAY, "an_actor_without_free_resources_is_an_error"),
            ("ray", RAY, "a_ray_of_our_own_ends_with_the_collector"),
            (BOTH, "faults/test_matrix_restart.py", "a_worker_that_fails_is_replaced"),
        ],
    ),
    "32": (
        "a worker is stopped for a while",
        [
            (BOTH, WORKERS, "a_worker_that_is_stopped_for_a_while_continues"),
            ("env", ENV, "a_process_that_is_stopped_for_a_while_continues"),
        ],
    ),
    "33": (
        "seeds",
        [
            (
                "sync",
                "collectors/test_twins.py",
                "data_do_not_depend_on_the_assignment_of_environments_to_workers",
            ),
            (
                "async",
                ASYNC,
                "each_environment_gives_the_same_frames_as_in_a_collector",
            ),
            (
                "env",
                "parallel_env/test_parallel_env.py",
                "data_equal_those_of_serial_env",
            ),
        ],
    ),
    "34": (
        "building is slow",
        [
            (BOTH, WORKERS, "environments_of_workers_are_built_at_the_same_time"),
            ("env", DATA, "processes_of_one_environment_start_at_the_same_time"),
            ("env", DATA, "the_start_of_processes_has_its_own_limit"),
        ],
    ),
    "35": (
        "an environment leaks",
        [(BOTH, MEMORY, "a_worker_that_grows_is_replaced_without_changing_the_data")],
    ),
    "36": (
        "the fork server is killed",
        [
            (
                BOTH,
                "faults/test_matrix_restart.py",
                "killing_the_fork_server_ends_or_restarts_the_workers",
            ),
            (ALL, SERVER, "killing_the_server_kills_its_workers_and_the_next_pool"),
        ],
    ),
}
ABSENT = {
    "15": {"env": "its policy is in the trainer"},
    "16": dict.fromkeys(ALL.split(), "the adapter reports it in every process"),
    "17": dict.fromkeys(ALL.split(), "the adapter reports it in every process"),
    "26": {"env": "its policy is in the trainer"},
    "27": {"sync": "its workers wait for each other", "env": "as sync"},
    "28": {"env": "it has no batches"},
    "29": {"env": "it has no batches"},
    "31": {"env": "it does not restart: the next action would be for another episode"},
    "35": {"env": "it does not replace processes, for the same reason"},
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_tests_for_all_affected_collectors(row: str) -> None:
    fault, tests = ROWS[row]
    for _, file, name in tests:
        text = (TESTS / file).read_text()
        assert f"def test_{name}" in text, f"{fault}: no {name} in {file}"
    covered = {
        collector_name for whom, _, _ in tests for collector_name in whom.split()
    }
    assert set(ALL.split()) <= covered | set(ABSENT.get(row, ())), fault


def test_no_row_is_missing() -> None:
    numbers = [int(n) for row in ROWS for n in row.split(", ")]
    assert numbers == list(range(1, 37))
