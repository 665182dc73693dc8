"""Environment families register tasks and name the packages that determine data."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from marl_collect.programs import task_providers
from marl_collect.storage.description import installed_versions


class Versioned:
    """A family that depends on one installed package and one that is missing."""

    @staticmethod
    def packages() -> Any:
        return ["typer", "not-installed"]


class Plain:
    """A family without ``packages``."""


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*, group: str) -> Any:
        assert group == "marl_collect.tasks"
        return [
            EntryPoint("second", f"{__name__}:Plain", group),
            EntryPoint("first", f"{__name__}:Versioned", group),
        ]

    monkeypatch.setattr(task_providers, "entry_points", find)


@pytest.mark.usefixtures("entry_points")
def test_providers_are_sorted_by_name() -> None:
    found_providers: list[Any] = list(task_providers.providers())
    assert [provider.__name__ for provider in found_providers] == ["Versioned", "Plain"]


@pytest.mark.usefixtures("entry_points")
def test_datasets_record_the_versions_of_a_familys_packages() -> None:
    assert task_providers.packages() == ["typer", "not-installed"]
    versions = installed_versions()
    assert "typer" in versions
    assert "not-installed" not in versions
    assert "pettingzoo" not in versions


def test_the_built_in_families_name_their_packages() -> None:
    assert {"pettingzoo", "mpe2", "dm-meltingpot"} <= set(task_providers.packages())


@pytest.mark.parametrize(
    ("task", "advice"),
    [
        ("./race.py:Race", "Name the module, not its file: race:Race."),
        ("race.py:Race", "Name the module, not its file: race:Race."),
        ("tasks/race.py:Race", "Name the module, not its file: tasks.race:Race."),
        (
            "/far/race.py:Race",
            "not its file: race:Race in its folder.",
        ),
        (".race:Race", "a module's name does not begin with a dot."),
    ],
)
def test_files_and_relative_names_of_modules_are_refused_with_advice(
    task: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must be module:name") as error:
        task_providers.find_callable(task)
    assert str(error.value).endswith(advice)
