"""The files on the page about distribution are valid for Ray's launcher and bash."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "distribution.md"


def shown(language: str) -> str:
    """Return the page's longest block of a language."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return max(blocks, key=len)


@pytest.fixture
def launched() -> Any:
    """Return the cluster's file, and a function that checks it like ``ray up``."""
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("jsonschema")
    util = pytest.importorskip("ray.autoscaler._private.util")

    def check(config: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = util.prepare_config(config)
        util.validate_config(prepared)
        return prepared

    return yaml.safe_load(shown("yaml")), check


def test_rays_launcher_takes_the_cluster(launched: Any) -> None:
    config, check = launched
    prepared = check(config)
    nodes = prepared["available_node_types"]
    assert prepared["head_node_type"] in nodes
    assert nodes["collecting"]["max_workers"] == prepared["max_workers"]


def test_rays_launcher_refuses_a_cluster_with_a_wrong_key(launched: Any) -> None:
    config, check = launched
    with pytest.raises(Exception, match="head_node_typ"):
        check(config | {"head_node_typ": "learner"})


def test_bash_can_read_the_slurm_script() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = shown("sh")
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    subprocess.run([bash, "-n"], input=script, text=True, check=True)


def test_the_slurm_script_asks_for_the_nodes_that_it_uses() -> None:
    script = shown("sh")
    (nodes,) = re.findall(r"^#SBATCH --nodes=(\d+)$", script, re.MULTILINE)
    (n_others,) = re.findall(r"srun --nodes=(\d+) .*--exclude", script)
    assert int(nodes) == 1 + int(n_others)
