"""``marl-collect view`` shows training runs: curves, states, and what is damaged."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.runs import evaluation, write_run
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from marl_collect.cli.main import app
from marl_collect.cli.viewer.runs import Runs
from marl_collect.training.run_folder import (
    PROGRESS,
    read_json,
    read_rows,
    write_table,
)

STATES = 4
"""Column of a row of the page."""


def run_command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["view", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_page_has_the_curves_and_the_state_of_runs_in_progress(
    tmp_path: Path,
) -> None:
    for setup, seed in (("ippo", 0), ("ippo", 1), ("mappo", 0)):
        write_run(tmp_path, setup, seed)
    runs = Runs(tmp_path)
    about = runs.about()
    names = ["ippo/seed_0", "ippo/seed_1", "mappo/seed_0"]
    assert [row[:STATES] for row in about["runs"]] == [
        [name, "200 of 400", "1.5", "15"] for name in names
    ]
    assert all(row[STATES].startswith("last written 20") for row in about["runs"])
    task = "<script>alert(1)</script>"
    assert about["figures"] == [f"{task}: evaluations", f"{task}: training"]
    for index in range(2):
        picture = runs.figure(index, about["stamp"])
        assert picture.startswith(b"<?xml")
        assert b"<script" not in picture


def test_news_have_another_stamp_and_other_curves(tmp_path: Path) -> None:
    write_run(tmp_path)
    runs = Runs(tmp_path)
    before = runs.about()
    assert runs.about() == before
    run = write_run(tmp_path, frames=400)
    final = evaluation(400)
    run.write_json("result.json", {"best": final, "last": final})
    after = runs.about()
    assert after["stamp"] != before["stamp"]
    assert after["runs"] == [["ippo/seed_0", "400 of 400", "1.5", "30", "finished"]]
    old, new = (runs.figure(0, about["stamp"]) for about in (before, after))
    assert old is not new
    assert runs.figure(0, after["stamp"]) is new  # Not drawn again.


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"task": "t", "setup": "s", "seed": 0, "options": 3}'),
        ("evaluations.json", '[{"frames": 0}]'),
        ("evaluations.json", json.dumps([evaluation(0) | {"team_returns": []}])),
        ("evaluations.json", json.dumps([evaluation(0) | {"lengths": ["a"]}])),
        ("progress.csv", "frames,return_team\n1,x\n"),
        ("progress.csv", "frames,loss\n1,2\n"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(
    tmp_path: Path, name: str, content: str
) -> None:
    write_run(tmp_path, "mappo")
    damaged = write_run(tmp_path, "ippo")
    (damaged.path / name).write_text(content)
    runs = Runs(tmp_path)
    about = runs.about()
    states = {row[0]: row[STATES] for row in about["runs"]}
    assert "is damaged" in states["ippo/seed_0"]
    assert states["mappo/seed_0"].startswith("last written")
    assert runs.figure(0, about["stamp"])


def test_damaged_random_actions_are_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "random.json").write_text("{}")
    row = Runs(tmp_path).about()["runs"][-1]
    assert row[0] == "random.json"
    assert "is damaged" in row[STATES]


def test_tables_of_a_training_loop_are_curves(tmp_path: Path) -> None:
    for seed in range(2):
        folder = tmp_path / f"seed_{seed}"
        folder.mkdir()
        # The last row is being written.
        (folder / PROGRESS).write_text("frames,return_team\n10,1.5\n20,3\n3")
    (tmp_path / "progress.log").write_text("first\nsecond\n")
    runs = Runs(tmp_path)
    about = runs.about()
    assert about["figures"] == ["frames, return_team"]
    assert [row[:2] for row in about["runs"]] == [["seed_0", "20"], ["seed_1", "20"]]
    assert about["log"] == ["first", "second"]
    assert runs.figure(0, about["stamp"])


def test_files_of_others_are_not_shown(tmp_path: Path) -> None:
    write_table(tmp_path / "mine", [("frames", "return_team"), (10, 1.5)])
    for name in ("notes.csv", "project/config.json", ".venv/lib/x/progress.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a,b\n1,x\n")
    environment = tmp_path / "environment"
    write_table(environment / "lib" / "x", [("frames", "return_team"), (10, 1.5)])
    (environment / "pyvenv.cfg").touch()
    about = Runs(tmp_path).about()
    assert [row[0] for row in about["runs"]] == ["mine"]
    assert about["figures"] == ["frames, return_team"]


def test_a_link_to_a_folder_above_does_not_repeat_its_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run.path / "again").symlink_to(tmp_path)
    assert len(Runs(tmp_path).about()["runs"]) == 1


def test_files_that_did_not_change_are_not_read_again(tmp_path: Path) -> None:
    table = write_run(tmp_path).path / PROGRESS
    runs = Runs(tmp_path)
    before = runs.about()
    status, rows = table.stat(), table.read_bytes()
    table.write_bytes(rows.replace(b"1.5", b"9.5"))
    os.utime(table, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert runs.about() == before
    table.write_bytes(rows + rows.splitlines(True)[-1].replace(b"200", b"300"))
    assert runs.about()["runs"][0][1] == "300 of 400"


def test_a_comparison_that_begins_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "progress.log").write_text("random actions\n")
    runs = Runs(tmp_path)
    about = runs.about()
    assert (about["runs"], about["figures"]) == ([], [])
    (tmp_path / "progress.log").write_text("random actions\nippo\n")
    assert runs.about()["stamp"] == about["stamp"]  # No curve has changed.
    run = write_run(tmp_path)
    (run.path / "progress.csv").unlink()
    (run.path / "evaluations.json").unlink()
    after = runs.about()
    assert after["runs"][0][:STATES] == ["ippo/seed_0", "0 of 400", "", ""]
    assert after["figures"] == []


def test_a_folder_of_datasets_has_their_title(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.parquet").touch()
    about = Runs(tmp_path).about()
    assert (about["title"], about["datasets"]) == ("Datasets", ["data"])
    write_run(tmp_path)
    assert Runs(tmp_path).about()["title"] == "Training runs"


def test_a_file_holds_the_curves(tmp_path: Path) -> None:
    write_run(tmp_path)
    file = tmp_path / "x.html"
    code, text = run_command(str(tmp_path), "--save", str(file))
    assert code == 0, text
    page = file.read_text()
    assert page.count("<script") == 2
    (answers,) = re.findall(r'<script id="saved"[^>]*>(.*?)</script>', page, re.DOTALL)
    saved = json.loads(answers)
    pictures = [value for name, value in saved.items() if name.startswith("/figure")]
    assert len(pictures) == len(saved["/about"]["figures"]) == 2
    assert all(value.startswith("data:image/svg+xml;base64,") for value in pictures)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has neither a dataset nor training runs"),
        (["--save=x.html", "--episode=1"], "--episode needs the folder of a dataset"),
    ],
)
def test_wrong_arguments_are_errors(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, text = run_command(str(tmp_path), *arguments)
    assert code == 2
    assert message in " ".join(text.split())


LINKED = ("progress.log", "config.json", "evaluations.json", "progress.csv")


@pytest.fixture(params=["secret", "/dev/zero", "pipe"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a file to which a downloaded folder may link."""
    path = Path(tmp_path, request.param)
    if request.param == "secret":
        path.write_text("frames,return_team\n1,2\nthe secret is 41\n")
    elif request.param == "pipe":
        os.mkfifo(path)
    return path


@pytest.mark.parametrize("name", [*LINKED, "random.json", "result.json"])
def test_no_link_of_a_run_is_followed(
    tmp_path: Path, elsewhere: Path, name: str
) -> None:
    folder = tmp_path / "runs"
    write_run(folder, "mappo")
    run = write_run(folder, "ippo")
    link = (folder if name == "random.json" else run.path) / name
    link.unlink(missing_ok=True)
    link.symlink_to(elsewhere)
    runs = Runs(folder)
    about = runs.about()
    states = {row[0]: row[STATES] for row in about["runs"]}
    where = str(link.relative_to(folder))
    assert states[where] == "This file is a link, which is not followed."
    assert states["mappo/seed_0"].startswith("last written")
    for index in range(len(about["figures"])):
        assert runs.figure(index, about["stamp"])
    assert about["log"] == []
    file = tmp_path / "x.html"
    code, text = run_command(str(folder), "--save", str(file))
    assert code == 0, text
    assert "secret is 41" not in file.read_text()


@pytest.mark.parametrize("name", [*LINKED, "random.json", "result.json"])
def test_a_pipe_in_a_run_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path)
    path = (tmp_path if name == "random.json" else run.path) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    states = {row[0]: row[STATES] for row in Runs(tmp_path).about()["runs"]}
    assert states[str(path.relative_to(tmp_path))] == (
        "This file is not a regular file."
    )


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)]
)
def test_a_file_that_is_replaced_after_the_look_is_not_read(
    tmp_path: Path, make: Any
) -> None:
    for name in ("a.json", "a.csv"):
        make(tmp_path / name)
    with pytest.raises(OSError, match=r"(link|not a regular file).*a\.json"):
        read_json(tmp_path / "a.json")
    with pytest.raises(OSError, match=r"(link|not a regular file).*a\.csv"):
        read_rows(tmp_path / "a.csv")


def test_large_files_are_not_read(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with (run.path / "progress.csv").open("ab") as file:
        file.truncate(2**40)
    log = tmp_path / "progress.log"
    log.write_text("first\n" + "x" * 2**20 + "\nlast\n")
    about = Runs(tmp_path).about()
    states = {row[0]: row[STATES] for row in about["runs"]}
    assert "is larger than" in states["ippo/seed_0/progress.csv"]
    assert about["log"][-1] == "last"
    assert sum(map(len, about["log"])) < 2**17


def test_names_break_no_figure(tmp_path: Path) -> None:
    name = "$\\frac{$ \x1b]52;c;eA==\x07 \ud800 $x$ & <b>"
    run = write_run(tmp_path)
    for at, config in enumerate((run.path, tmp_path / "b" / "seed_1")):
        config.mkdir(parents=True, exist_ok=True)
        about = json.loads((run.path / "config.json").read_text())
        (config / "config.json").write_text(
            json.dumps(about | {"task": name, "setup": f"{name}{at}"})
        )
        for file in ("progress.csv", "evaluations.json"):
            shutil.copy(run.path / file, tmp_path / file)
            shutil.move(tmp_path / file, config / file)
    table = tmp_path / "table"
    write_table(table, [("$\\frac{$", "$x^{$ \x1b[2J"), (1, 2)])
    runs = Runs(tmp_path)
    shown = runs.about()
    assert len(shown["figures"]) == 3
    for index, title in enumerate(shown["figures"]):
        assert title.isprintable()
        picture = runs.figure(index, shown["stamp"])
        ElementTree.fromstring(picture)
