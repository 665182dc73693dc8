"""What the documents list is what there is."""

import re
from pathlib import Path

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
