"""What the documents list is what there is."""

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path

import mkdocs_hooks
import pytest
from support.scripts import run_python
from typer.testing import CliRunner

from marl_collect.cli.main import app
from marl_collect.collectors import (
    Collector,
    CollectorOptions,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from marl_collect.options import declared
from marl_collect.training.options import PPOOptions, TrainingOptions, ValueOptions

DOCS = Path(__file__).parents[1] / "docs"
MAKEFILE = DOCS.parent / "Makefile"


def first_cells(page: str, section: str = "") -> set[str]:
    """Names in the first cells of the tables of a page, or below one heading."""
    section_text = (DOCS / page).read_text()
    if section:
        (section_text,) = re.findall(
            rf"## {section}\n(.*?)\n## ", section_text, re.DOTALL
        )
    rows = [line for line in section_text.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])}


def test_the_tables_of_arguments_have_every_one_and_no_other() -> None:
    names = {option.name for option in declared(CollectorOptions)}
    training = {
        option.name
        for kind in (TrainingOptions, PPOOptions, ValueOptions)
        for option in declared(kind)
    } - names
    documented = first_cells("options.md") - training
    assert documented == names


def test_the_table_of_methods_has_every_one() -> None:
    methods = {
        name
        for kind in (Collector, MultiSyncCollector, MultiAsyncCollector)
        for name in dir(kind)
        if not name.startswith("_")
    }
    documented = first_cells("collectors.md", "Every method")
    # Rows that start with more than a name: `for batch in collector`, `len(collector)`.
    assert methods - documented == set()
    assert documented - methods <= {"for", "len"}


def test_every_family_has_a_folder_an_extra_and_its_places_on_the_pages() -> None:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
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
        assert (DOCS.parent / "envs" / name).is_dir()
        assert name in installed_by or name == "pettingzoo"  # Named by its families.


def test_tests_that_the_page_of_faults_names_exist() -> None:
    tests = Path(__file__).parent
    text = (DOCS / "faults.md").read_text()
    test_names = re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", text)
    assert len(test_names) > 30
    for file, test in test_names:
        places = tests / "faults", tests, DOCS.parent
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
        for path in (DOCS.parent / folder).rglob("*.py"):
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
    assert linked == {path.stem for path in (DOCS.parent / "examples").glob("*.py")}


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
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
    hooks = DOCS.parent / "mkdocs.yml"
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
    process = run_python(DOCS.parent / "scripts" / "reference.py", "--check")
    assert process.returncode == 0, process.stdout + process.stderr


ROOT = Path(__file__).resolve().parents[1]
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
            assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_its_table_has_every_extra() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    section = README[README.index("| extra | installs |") : README.index("## More")]
    firsts = [line.split("|")[1] for line in section.splitlines() if line[:3] == "| `"]
    assert set(re.findall(r"`(\w+)`", " ".join(firsts))) == set(extras) - {"dev"}
