"""Write ``docs/reference.md`` and ``docs/cli.md``: every public name and every command.

A name has a line, and a link to its source.

    python scripts/reference.py           # write the pages
    python scripts/reference.py --check   # compare only

The site has a page of signatures and docstrings for every section too; see
``mkdocs_hooks.py``.
"""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from generated import update

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
COMMANDS = ROOT / "docs" / "cli.md"
_TOP, _ENVS, _MODELS = "marl_collect", "marl_collect.envs", "marl_collect.models"
_TRAINING = "marl_collect.training"
SECTIONS: dict[str, dict[str, str]] = {
    "Collecting": {
        _TOP: """Collector MultiSyncCollector MultiAsyncCollector MultiCollector
            RayCollector CollectorOptions describe EnvDescription GroupDescription
            MarlGroupMapType SerialEnv ParallelEnv split_trajectories restore_next
            WorkerError PolicyError ClosedError""",
        "marl_collect.collectors.collector": "CollectorBase",
    },
    "Your own environment": {
        _TOP: "MultiAgentEnv BatchedEnv Step EnvWrapper check_env ContractError",
    },
    "Acting and evaluating": {
        _TOP: """RandomPolicy AssignedPolicies PolicyPool materialize infer_lazy
            evaluate Evaluator Evaluation""",
        "marl_collect.evaluation": """cross_play CrossPlay evaluate_scenarios Scenario
            ScenarioScore""",
    },
    "Training": {
        f"{_TRAINING}.ppo": "PPOLearner",
        f"{_TRAINING}.value_decomposition": "ValueLearner",
        f"{_TRAINING}.maddpg": "MADDPGLearner",
        f"{_TRAINING}.learner": "Learner",
        f"{_TRAINING}.options": "Setup TrainingOptions PPOOptions ValueOptions",
        f"{_TRAINING}.checkpoint": "Checkpoint",
        f"{_TRAINING}.run_folder": "write_table",
    },
    "Datasets and videos": {
        _TOP: "record open_dataset play to_frames write_video",
        "marl_collect.storage": """Dataset Writer BackgroundWriter
            DatasetDescription RunDescription DatasetError copy export_minari
            import_vault""",
    },
    "Environments": {
        _ENVS: """PettingZooEnv PettingZooWrapper MeltingpotEnv MeltingpotWrapper
            Lab2dEnv LbForagingEnv RwareEnv MatrixGameEnv MamujocoEnv OpenSpielEnv
            OvercookedEnv JaxMarlEnv VmasEnv GymnasiumVectorEnv AgentLists FrameStack
            available_envs UnknownTaskError MissingPackageError""",
    },
    "Policies and networks": {
        _MODELS: """make_policy PolicyOptions make_critic make_head save_policy
            load_policy NetworkFactory HeadFactory MultiAgentNetBase MultiAgentMLP
            MultiAgentAttention MultiAgentConvNet MultiAgentGRU MultiAgentLSTM
            set_recurrent_mode CrossGroupCritic CrossCriticGroupSpec Mixer VDNMixer
            QMixer GroupModule RecurrentModule VectorInput ImageInput LocScale
            HeadOptions ActionHead CategoricalHead MultiCategoricalHead NormalHead
            TanhNormalHead MaskedCategorical MaskedOneHotCategorical MultiCategorical
            IndependentNormal TanhNormal""",
    },
    "TorchRL": {"marl_collect.interop.torchrl": "to_torchrl TorchRLWrapper"},
}
"""Names by section and by the module from which users import them."""
_HEAD = """# Reference

Every public name, with a link to its source. `python scripts/reference.py` generates
this page.

[All options](options.md) describes the arguments of collectors and the settings of
training, and [Command line](cli.md) the commands. `SyncDataCollector`,
`MultiSyncDataCollector` and `MultiaSyncDataCollector` are other names of the first
three collectors, and `ExplorationType` is tensordict's `InteractionType`.
"""
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


def page() -> str:
    """Return the text of the page."""
    sections = [_HEAD]
    for title, modules in SECTIONS.items():
        head = "| name | what it is | import from |"
        lines = [f"## {title}", "", head, "|---|---|---|"]
        for module, names in modules.items():
            source = import_module(module)
            for name in names.split():
                what = getattr(source, name)
                link = f"[`{name}`](../{_file(what, source)})"
                lines.append(f"| {link} | {_line(what)} | `{module}` |")
        sections.append("\n".join([*lines, ""]))
    return "\n".join(sections)


def commands() -> str:
    """Return the text of the page of the command line, as typer writes it."""
    typer = (sys.executable, "-m", "typer", "marl_collect.cli.main", "utils", "docs")
    names = ("--name", "marl-collect", "--title", "Command line")
    return subprocess.check_output([*typer, *names], text=True)


def signatures() -> dict[str, str]:
    """Return the pages of the site that show signatures and docstrings, by path."""
    pages = {}
    for title, modules in SECTIONS.items():
        lines = [f"# Reference: {title.lower()}"]
        for module, names in modules.items():
            lines += [f"::: {module}.{name}" for name in names.split()]
        pages[f"api/{title.lower().replace(' ', '_')}.md"] = "\n\n".join(lines)
    return pages


def on_site(text: str) -> str:
    """Return the page with links to the signatures instead of the sources."""
    row = re.compile(r"^\| \[`(\w+)`\]\(.*?\) \| (.*) \| `([\w.]+)` \|$", re.MULTILINE)
    return row.sub(r"| [`\1`][\3.\1] | \2 | `\3` |", text)


def _file(what: Any, module: Any) -> str:
    """Return the path of the source, in the folder that is no link."""
    module = sys.modules.get(getattr(what, "__module__", ""), module)
    return str(Path(str(module.__file__)).resolve().relative_to(ROOT))


def _line(what: Any) -> str:
    """Return the first sentence of a docstring."""
    text = " ".join((inspect.getdoc(what) or "").partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z])", text)[0]
    sentence = re.sub(r"(?<!\.)\.$", "", sentence)
    return _ROLE.sub(r"`\1`", sentence).replace("``", "`").replace("|", r"\|")


def main() -> int:
    """Write or compare the pages; 1 if there was a difference."""
    pages = {PAGE: page(), COMMANDS: commands()}
    return update(pages, "python scripts/reference.py")


if __name__ == "__main__":
    sys.exit(main())
