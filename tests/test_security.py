"""Every sentence of SECURITY.md has a test."""

import re
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[1]
TASKS = "cli/test_cli_file_tasks.py::"
RAY = "distributed/test_cluster.py::"
WEIGHTS = "models/test_saved_policy.py::"
CHECKPOINT = "training/test_checkpoint.py::"
VIEW = "cli/test_cli_view.py::"
TESTS: Final = {
    "Run folders and datasets of other people choose no code.": [
        TASKS + "test_the_task_of_a_run_is_no_code_that_was_not_typed",
        TASKS + "test_a_dataset_that_is_viewed_runs_no_lua",
        TASKS + "test_a_saved_page_runs_no_lua",
    ],
    "Commands refuse a `module:name` that a file names.": [
        TASKS + "test_the_task_of_a_run_is_no_code_that_was_not_typed",
        TASKS + "test_a_dataset_of_code_is_not_drawn",
    ],
    "They use only settings that the task's family declares safe, until you type the "
    "others.": [
        TASKS + "test_the_settings_of_a_run_lead_to_no_folder",
        TASKS + "test_a_family_does_not_declare_other_settings_safe",
        TASKS + "test_every_argument_is_safe_or_known_not_to_be",
        TASKS + "test_typed_settings_of_this_exploit_run_it",
    ],
    "A number in a file can still make an environment slow, or fill the memory.": [
        TASKS + "test_plain_settings_of_a_run_are_used"
    ],
    "`module:name` that you type on the command line imports that module.": [
        TASKS + "test_what_the_error_advises_plays_the_run"
    ],
    "Files of weights, and the checkpoints of runs (`marl-collect compare --resume`), "
    "are loaded with `torch.load(weights_only=True)`, which runs no code.": [
        "training/test_run_folder.py::test_reading_runs_no_code",
        WEIGHTS + "test_options_in_a_file_name_no_code",
    ],
    "Their checksums are compared first, so damaged weights are refused.": [
        WEIGHTS + "test_damage_is_an_error_that_names_the_file_or_changes_no_weight",
        CHECKPOINT + "test_parts_other_than_those_of_the_checkpoint_are_errors",
    ],
    "Datasets are Parquet files.": [
        "storage/test_storage_writer.py::test_reading_unpickles_nothing_and_follows_links"
    ],
    "Opening one runs no code.": [
        "storage/test_storage_writer.py::test_reading_unpickles_nothing_and_follows_links",
        TASKS + "test_a_dataset_that_is_viewed_runs_no_lua",
    ],
    "A link in its folder is followed, and the file is read as a part of the "
    "dataset.": [
        "storage/test_storage_writer.py::test_reading_unpickles_nothing_and_follows_links"
    ],
    "A link or a pipe in the folder of a run is not read.": [
        "training/test_run_folder.py::test_no_link_or_pipe_of_a_run_is_read"
    ],
    "`marl-collect view` listens on 127.0.0.1 only.": [
        VIEW + "test_the_server_listens_on_this_machine_only"
    ],
    "It answers only requests with the token of the printed address.": [
        VIEW + "test_the_token_is_required",
        VIEW + "test_the_command_prints_the_address_with_the_token",
    ],
    "A browser gets the address from a file that only you can read.": [
        VIEW + "test_the_browser_gets_the_token_from_a_file_of_the_user_alone"
    ],
    "Commands print control characters in the text of files escaped.": [
        "cli/test_cli_consoles.py::test_all_output_is_escaped"
    ],
    "Worker processes exchange pickles with their trainer over local sockets.": [
        "processes/test_sockets.py::test_no_socket_of_a_pool_has_a_name"
    ],
    "They have no names, so no other process can open them.": [
        "processes/test_sockets.py::test_no_socket_of_a_pool_has_a_name"
    ],
    "`RayCollector` uses Ray's own connections, which listen on all interfaces of each "
    "node.": [RAY + "test_a_local_ray_needs_its_token_and_ends_with_the_collector"],
    "A local Ray that the collector starts answers only those who have its token, from "
    "Ray 2.60 on.": [
        RAY + "test_a_local_ray_needs_its_token_and_ends_with_the_collector"
    ],
    "With an earlier Ray there is a warning.": [
        RAY + "test_a_ray_without_tokens_is_warned_of"
    ],
    "The token is in `~/.ray`, which the collector closes to other users.": [
        RAY + "test_a_local_ray_needs_its_token_and_ends_with_the_collector"
    ],
    "`marl_collect.interop.benchmarl.Experiment.reload_from_file` unpickles "
    "`config.pkl`, which BenchMARL writes beside its checkpoints; BenchMARL loads "
    "the checkpoint itself.": ["interop/test_benchmarl.py::test_a_checkpoint_resumes"],
    "The lock of a run folder can be opened by its owner only, so other "
    "users of the machine cannot block a writer.": [
        "files/test_locks.py::test_nobody_else_can_open_a_lock"
    ],
}
ADVICE: Final = {
    "A Ray cluster must not be reachable by people you do not trust.",
    "Resume only experiments whose folder nobody else can write to.",
}


def sentences() -> list[str]:
    text = (ROOT / "SECURITY.md").read_text().partition("\n- ")[2]
    items = [" ".join(item.split()) for item in text.split("\n- ")]
    return [s for item in items for s in re.split(r"(?<=\.) (?=[A-Z`])", item)]


def test_every_sentence_has_a_test() -> None:
    assert set(sentences()) == TESTS.keys() | ADVICE


@pytest.mark.parametrize("sentence", TESTS)
def test_its_tests_exist(sentence: str) -> None:
    assert TESTS[sentence]
    for test in TESTS[sentence]:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test
