"""What the documents list is what there is."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from marl_collect.collectors import (
    Collector,
    CollectorOptions,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from marl_collect.options import declared

DOCS = Path(__file__).parents[1] / "docs"


def first_cells(page: str, section: str = "") -> set[str]:
    """Names in the first cells of the tables of a page, or below one heading."""
    part = (DOCS / page).read_text()
    if section:
        (part,) = re.findall(rf"## {section}\n(.*?)\n## ", part, re.DOTALL)
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])}


def test_the_tables_of_arguments_have_every_one_and_no_other() -> None:
    names = {each.name for each in declared(CollectorOptions)}
    named = first_cells("options.md")
    assert named == names | {"create_env_fn", "policy"}


def test_the_table_of_methods_has_every_one() -> None:
    methods = {
        name
        for kind in (Collector, MultiSyncCollector, MultiAsyncCollector)
        for name in dir(kind)
        if not name.startswith("_")
    }
    named = first_cells("collectors.md", "Every method")
    # Rows that start with more than a name: `for batch in collector`, `len(collector)`.
    assert methods - named == set()
    assert named - methods <= {"for", "len"}


def test_tests_that_the_page_of_faults_names_exist() -> None:
    tests = Path(__file__).parent
    text = (DOCS / "faults.md").read_text()
    named = re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", text)
    assert len(named) > 30
    for file, test in named:
        places = tests / "faults", tests, DOCS.parent
        page = next((p / file for p in places if (p / file).exists()), None)
        assert page is not None, f"there is no {file}"
        assert not test or f"def {test}(" in page.read_text(), f"{file}: no {test}"


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_site_is_built_and_no_link_in_it_is_broken(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra dev")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    run = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=DOCS.parent,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    built = {page.stem for page in (tmp_path / "site").rglob("*.html")}
    assert built >= {page.stem for page in DOCS.rglob("*.md")}
    reference = (tmp_path / "site" / "api" / "collecting.html").read_text()
    assert "frames_per_batch" in reference  # From the options.
    assert "parsed: CollectorArguments" not in reference
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text()
        assert not re.search(r":(class|meth|func|attr|mod):`", text), page.name
        assert len(text) < 500_000, page.name


def test_the_reference_of_the_command_line_is_that_of_the_commands() -> None:
    script = DOCS.parent / "scripts" / "cli_reference.py"
    run = subprocess.run(
        [sys.executable, str(script), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_page_says_for_whom_it_is() -> None:
    for page in DOCS.rglob("*.md"):
        if page.name != "changelog.md":  # It is CHANGELOG.md.
            text = page.read_text().split("\n\n")[1]
            people = ("For everyone", "This page is for", "How the repository")
            assert text.startswith(people), page.name


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("collecting", "marl_collect"),
        ("envs", "marl_collect.envs"),
        ("models", "marl_collect.models"),
    ],
)
def test_the_reference_has_every_public_name(page: str, module: str) -> None:
    text = (DOCS / "api" / f"{page}.md").read_text()
    missing = [
        name
        for name in import_module(module).__all__
        if f"::: {module}.{name}\n" not in text and f"`{name}`" not in text
    ]
    assert not missing
