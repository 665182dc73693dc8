"""What the documents list is what there is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from marl_collect.collectors import CollectorOptions
from marl_collect.collectors.base import CollectorBase

DOCS = Path(__file__).parents[1] / "docs"


def test_every_argument_and_method_of_collectors_is_in_the_table() -> None:
    text = (DOCS / "collectors.md").read_text()
    named = set(re.findall(r"`(\w+)", text))
    missing = set(CollectorOptions.__dataclass_fields__) - named
    methods = {name for name in vars(CollectorBase) if not name.startswith("_")}
    assert not missing | (methods - named - {"frames", "description"})


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
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
    built = {page.stem for page in (tmp_path / "site").glob("*.html")}
    assert built >= {page.stem for page in DOCS.glob("*.md")}
