"""Examples without their extras: `--help` works, and running one names them."""

import re
import textwrap
from pathlib import Path

import pytest
from support.scripts import run_python

pytestmark = pytest.mark.processes

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
EXTRAS = (
    *("benchmarl", "dmlab2d", "imageio", "lbforaging", "matplotlib", "meltingpot"),
    *("mpe2", "pettingzoo", "pyarrow", "ray", "torchrl"),
)
RUN_ALL = f"""
    import contextlib, io, runpy, sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {EXTRAS}:
                raise ModuleNotFoundError(f"No module named {{name!r}}")

    sys.meta_path.insert(0, Blocker())
    for path in sys.argv[1:]:
        for arguments in (["--help"], []):
            sys.argv = [path, *arguments]
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    runpy.run_path(path, run_name="__main__")
            except SystemExit as error:
                print(path, arguments, error.code, *printed.getvalue().split()[:1])
"""


def test_every_example_has_help_and_names_its_extras(tmp_path: Path) -> None:
    script = tmp_path / "run_all.py"
    script.write_text(textwrap.dedent(RUN_ALL), encoding="utf-8")
    process = run_python(  # Its own interpreter: others have imported some of them.
        "-W", "ignore", script, *EXAMPLES, cwd=tmp_path, interpreter=True
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == 2 * len(EXAMPLES) > 15
    for path, helps, runs in zip(EXAMPLES, lines[::2], lines[1::2], strict=True):
        assert helps == f"{path} ['--help'] 0 usage:"
        needs = re.escape(str(path)) + r" \[\] .*No module named '.*: pip install "
        assert re.match(needs + r'"marl-collect\[[a-z,]+\]"$', runs), runs
