"""What the documents list is what there is, and their Python runs.

Every sentence of SECURITY.md has a test.
"""

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Final

import mkdocs_hooks
import pytest
from support.commands import output_of
from support.scripts import run_python

from marl_collect.collectors import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)

ROOT = Path(__file__).resolve().parents[1]
DOCS, MAKEFILE = ROOT / "docs", ROOT / "Makefile"


def test_the_table_of_methods_has_every_one() -> None:
    methods = {
        name
        for kind in (Collector, MultiSyncCollector, MultiAsyncCollector)
        for name in dir(kind)
        if not name.startswith("_")
    }
    text = (DOCS / "collectors.md").read_text()
    (section,) = re.findall(r"## Every method\n(.*?)\n## ", text, re.DOTALL)
    cells = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    # Rows that start with more than a name: `for batch in collector`, `len(collector)`.
    assert methods - documented == set()
    assert documented - methods <= {"for", "len"}


def test_every_family_has_a_folder_an_extra_and_its_places_on_the_pages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    page = (DOCS / "environments.md").read_text().partition("\n## Families\n")[2]
    rows = page.strip().partition("\n\n")[0].splitlines()[2:]
    installed_by = {
        re.findall(r"`(\w+)/", row)[0]: re.findall(r"marl-collect\[(\w+)\]", row)
        for row in rows
    }
    sections = re.findall(r"^## (\w+)$", (DOCS / "tasks.md").read_text(), re.MULTILINE)
    assert installed_by.keys() <= {*sections}
    for (extra,) in installed_by.values():
        assert extra in extras
    for name, target in project["entry-points"]["marl_collect.tasks"].items():
        assert target.startswith(f"marl_collect.envs.{name}.provider")
        assert (ROOT / "envs" / name).is_dir()
        assert name in installed_by or name == "pettingzoo"  # Named by its families.


def test_tests_that_the_page_of_faults_names_exist() -> None:
    tests = Path(__file__).parent
    text = (DOCS / "faults.md").read_text()
    test_names = re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", text)
    assert len(test_names) > 30
    for file, test in test_names:
        places = tests / "faults", tests, ROOT
        page = next((p / file for p in places if (p / file).exists()), None)
        assert page is not None, f"there is no {file}"
        assert not test or f"def {test}(" in page.read_text(), f"{file}: no {test}"


def test_messages_name_pages_of_the_documentation_by_their_titles() -> None:
    titles = {
        page.read_text().partition("\n")[0].removeprefix("# ")
        for page in DOCS.rglob("*.md")
    }
    named = set()
    for folder in ("marl_collect", "envs", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            docstrings = {
                ast.get_docstring(node, clean=False)
                for node in ast.walk(tree)
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            }
            for node in ast.walk(tree):
                if not isinstance(node, ast.Constant):
                    continue
                text = node.value
                if isinstance(text, str) and text not in docstrings:
                    # Whoever installed the package has no folder of pages.
                    assert "docs/" not in text, f"{path}:{node.lineno}"
                    named |= set(re.findall(r'[Tt]he page "(.*?)"', text))
    assert named
    assert named <= titles


def test_the_page_of_examples_links_to_every_script() -> None:
    text = (DOCS / "examples.md").read_text()
    linked = set(re.findall(r"\]\(\.\./examples/(\w+)\.py\)", text))
    assert linked == {path.stem for path in (ROOT / "examples").glob("*.py")}


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("other.html", "", "page.md is not on the site"),
        ("page.html", "see :class:`Collector`", "page.html shows a role of Sphinx"),
        ("page.html", ":meth:<code>next</code>", "page.html shows a role of Sphinx"),
        ("page.html", "a" * 600_000, "page.html has 600000 characters"),
        ("api/collecting.html", "", "lacks the options of collectors"),
        ("api/collecting.html", "parsed: CollectorOptions frames_per_batch", "parsed"),
    ],
)
def test_the_build_of_the_site_fails_for_a_problem_in_it(
    file: str, text: str, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site, docs = tmp_path / "site", tmp_path / "docs"
    for path in (site / "api", docs):
        path.mkdir(parents=True)
    (docs / "page.md").touch()
    (site / "page.html").write_text("a page")
    (site / "api" / "collecting.html").write_text("frames_per_batch")
    assert list(mkdocs_hooks.problems(site, docs)) == []
    if file == "other.html":
        (site / "page.html").rename(site / file)
    else:
        (site / file).write_text(text)
    mkdocs_hooks.on_post_build(config={"site_dir": site, "docs_dir": docs})
    (record,) = caplog.records
    assert problem in record.getMessage()
    assert record.levelname == "WARNING"
    assert record.name.startswith("mkdocs.")  # Which --strict counts.


def test_the_site_is_built_strictly() -> None:
    (command,) = re.findall(r"^docs: .*\n\t(.*)", MAKEFILE.read_text(), re.MULTILINE)
    assert command.endswith("mkdocs build --strict")
    hooks = ROOT / "mkdocs.yml"
    assert "hooks: [scripts/mkdocs_hooks.py]" in hooks.read_text().splitlines()


@pytest.mark.parametrize(
    "module", ["marl_collect", "marl_collect.envs", "marl_collect.models"]
)
def test_the_reference_has_every_public_name(module: str) -> None:
    text = (DOCS / "reference.md").read_text()
    names = import_module(module).__all__
    missing = {
        name
        for name in names
        if not re.search(rf"`{name}`\]\(.*`{module}` \|$", text, re.MULTILINE)
    }
    # Other names of the same classes.
    assert all(f"`{name}`" in text for name in missing)
    assert len(missing) < 7, missing


@pytest.mark.processes
def test_the_reference_is_that_of_the_source() -> None:
    process = run_python(ROOT / "scripts" / "reference.py", "--check")
    assert process.returncode == 0, process.stdout + process.stderr


NOT_RUN = "<!-- not run -->\n"
BLOCK = re.compile(rf"({NOT_RUN})?```python\n(.*?)```", re.DOTALL)
NEEDS = {
    "environments.md": "vmas",
    "examples.md": "torchrl",
    "meltingpot.md": "dmlab2d",
    "quickstart.md": "imageio_ffmpeg",
    "rendering.md": "imageio_ffmpeg",
    "tutorials/evaluate.md": "imageio_ffmpeg",
    "tutorials/own_network.md": "torchrl",
}


def pages() -> list[str]:
    paths = [
        page for page in DOCS.rglob("*.md") if BLOCK.search(page.read_text("utf-8"))
    ]
    return sorted(str(page.relative_to(DOCS)) for page in paths)


def examples(page: str) -> list[str]:
    """Return the blocks of a page that run."""
    blocks = BLOCK.findall((DOCS / page).read_text("utf-8"))
    return [code for skipped, code in blocks if not skipped]


@pytest.mark.processes
@pytest.mark.parametrize("page", pages())
@pytest.mark.usefixtures("here")
def test_the_examples_of_a_page_run(page: str) -> None:
    for library in ("pettingzoo", "mpe2", "Box2D", NEEDS.get(page, "pettingzoo")):
        pytest.importorskip(library, reason=f"{page} needs {library}")
    space = {"__name__": "__main__"}  # As in a notebook.
    codes = examples(page)
    for number, code in enumerate(codes):
        text = code.replace("frames = 20_000", "frames = 1_000")
        exec(compile(text, f"{page}, block {number}", "exec"), space)
    # A page whose examples are all left out must say so here.
    assert codes or page in ("coming_from_torchrl.md", "distribution.md")


def test_no_example_hides_behind_another_mark() -> None:
    for page in DOCS.rglob("*.md"):
        marks = re.findall(r"^```py(?!thon$).*$", page.read_text("utf-8"), re.M)
        assert not marks, f"{page.name}: write {NOT_RUN.strip()} before the block"


README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.processes
def test_the_script_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    pytest.importorskip("torchrl", reason="needs the extra torchrl")
    (script,) = blocks("python")
    (tmp_path / "script.py").write_text(script)
    process = run_python("script.py", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("torch.Size([4, 250])") == 20
    returns = re.findall(r"^([a-z ]+) (-\d+\.\d+)$", process.stdout, re.MULTILINE)
    means = {name: float(mean) for name, mean in returns}
    # Three seeds were 12 to 15 better.
    assert means["trained"] > means["random actions"] + 8


def test_it_opens_with_how_to_install_and_tables_are_narrow() -> None:
    first = next(line for line in README.splitlines() if line.startswith("pip "))
    pictures = [README.index(f"{name})") for name in ("walkers.gif", "speed.png")]
    places = [README.index(first), *pictures, README.index("```python")]
    assert places == sorted(places)
    rows = [line for line in README.splitlines() if line.startswith("|")]
    assert max(row.count("|") - 1 for row in rows) <= 5
    (script,) = blocks("python")
    assert len([line for line in script.splitlines() if line.strip()]) <= 17


def test_its_table_uses_the_words_of_its_chart() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    from reporting.chart import COLOURS

    heads = [line for line in README.splitlines() if line.startswith("| times as fast")]
    for name in set(COLOURS) - {"marl_collect", "PufferLib"}:
        assert f" {name} |" in heads[0]


def test_its_commands_exist() -> None:
    commands = re.findall(r"^(make \w+|marl-collect \w+)", README, re.MULTILINE)
    assert len(commands) >= 6
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands:
        tool, name = command.split()
        if tool == "make":
            assert name in targets
        else:
            assert output_of(name, "--help")


def test_its_table_has_every_extra() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    section = README[README.index("| extra | installs |") : README.index("## More")]
    firsts = [line.split("|")[1] for line in section.splitlines() if line[:3] == "| `"]
    assert set(re.findall(r"`(\w+)`", " ".join(firsts))) == set(extras) - {"dev"}


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
        "training/test_report.py::test_reading_runs_no_code",
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
        "training/test_report.py::test_no_link_or_pipe_of_a_run_is_read"
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
        "files/test_files.py::test_nobody_else_can_open_a_lock"
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
