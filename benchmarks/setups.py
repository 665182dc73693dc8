"""Compares training setups and writes docs/comparison.md.

    python benchmarks/setups.py run              # all studies: a day on two cores
    python benchmarks/setups.py run pair_same    # one study, in runs/setups
    python benchmarks/setups.py page             # docs/comparison.md
    python benchmarks/setups.py unpack           # committed results to runs/setups

Each study is one `marl-collect compare` command, which is printed. An interrupted study
continues when it is run again, with the commit that began it. `page` also packs the
small files of all runs of a study into one file, `benchmarks/results/setups/NAME.json`,
which is committed. After `unpack`, `marl-collect compare --report
runs/setups/pair_same` prints its tables, and `run` trains only what is not in the
file.
"""

import argparse
import json
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from marl_collect.cli.main import app
from marl_collect.models.saved_policy import CONFIG
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.plots import plot_curves
from marl_collect.training.report import LEGEND, effects, markdown
from marl_collect.training.results import RANDOM, Run, read_random, read_runs, summarize
from marl_collect.training.run_folder import EVALUATIONS, RESULT

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "setups"
COMMITTED = ROOT / "benchmarks" / "results" / "setups"
PAGE = ROOT / "docs" / "comparison.md"
COMMIT = "commit.json"
SMALL = {CONFIG, EVALUATIONS, RESULT, RANDOM}

PAIR = (
    "--frames 10240 --seeds 10 --set frames_per_batch=512 --set envs_per_worker=4 "
    "--set gamma=0 --set num_cells=[16] --set eval_interval=5120 "
    "--set eval_episodes=200 --set final_episodes=400 --set ppo.lr=0.02 "
    "--set ppo.epochs=4 --set ppo.minibatch_frames=256 --set value.lr=0.005 "
    "--set value.warm_up_frames=500 --set value.epsilon_frames=5000 "
    "--set value.frames_per_update=25"
)
PPO = (
    "--setup ippo-local-own --setup ippo-local-shared --setup ippo-local-shared-ids "
    "--setup mappo-local-own --setup mappo-local-shared --setup mappo-local-shared-ids "
    "--workers 1 --set envs_per_worker=16"
)
QUESTION = (
    "## Does a centralised critic help, and do shared parameters?\n\n"
    "IPPO has local critics and MAPPO a centralised one. Each has networks of its own "
    "per agent, shared ones, or shared ones that see which agent acts. What the tests "
    "say of the return of the team:"
)


@dataclass(frozen=True)
class Study:
    """One comparison.

    Attributes:
        command: arguments of `marl-collect compare`.
        about: description of the study.
        baselines: further returns of the team that the curves show, by label.
    """

    command: str
    about: str
    baselines: Mapping[str, float] = field(default_factory=dict)

    @property
    def seeds(self) -> int:
        """Seeds of each setup, before which the page does not show the study."""
        return int(self.command.partition("--seeds ")[2].split()[0])


STUDIES = {
    "simple_spread_ppo": Study(
        f"simple_spread_v3 {PPO} --frames 500000 --seeds 10",
        "Three particles must cover three landmarks. A hand-written policy that sends "
        "agent i to landmark i reaches -45.5.",
        baselines={"hand-written": -45.5},
    ),
    "multiwalker_ppo": Study(
        f"multiwalker_v9 {PPO} --frames 500000 --seeds 10 --set ppo.anneal=true",
        "Three walkers carry a package. A return near 0 means that nobody falls and "
        "that the package hardly moves. The learning rate decays to zero.",
    ),
    "lbforaging_ppo": Study(
        f"lbforaging/10x10-3p-3f {PPO} --frames 2000000 --seeds 10 "
        "--set eval_interval=100000",
        "Three agents collect three pieces of food. A piece of a high level takes "
        "several of them.",
    ),
    "coins_ppo": Study(
        f"meltingpot/coins {PPO} --frames 300000 --seeds 5 "
        "--set eval_episodes=8 --set final_episodes=16",
        "Two players collect coins for 1 each. A coin of the other's colour costs the "
        "other 2.",
    ),
    "pair_crossed": Study(
        f"workloads.pair:PairEnv --env task=crossed {PAIR}",
        "Each of two agents sees one bit and is rewarded for the action that equals "
        "the other agent's bit. The best return per agent can be derived by hand "
        "(`benchmarks/workloads/pair.py`): 0.5 for agents that see only their own bit, "
        "0.75 for a shared network that sees both bits but gives both agents the same "
        "action, and 1 for separate centralised networks.",
    ),
    "pair_same": Study(
        f"workloads.pair:PairEnv --env task=same {PAIR}",
        "Two agents see the same observation, and agent i is rewarded for action i. "
        "With a shared network, both take the same action and reach 0.5. Separate "
        "networks reach 1.",
    ),
}


def train(names: list[str]) -> None:
    """Run studies, or resume them."""
    for name in names:
        folder = RUNS / name
        arguments = [*shlex.split(STUDIES[name].command), "--out", str(folder)]
        if any(folder.rglob(CONFIG)):
            arguments.append("--resume")
            check_commit(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / COMMIT).write_text(json.dumps(this_commit()), "utf-8")
        print("marl-collect compare", shlex.join(arguments), flush=True)
        code = app(["compare", *arguments], standalone_mode=False)
        if code:
            raise SystemExit(code)


def this_commit() -> str:
    """Return the commit that is checked out, with a mark if files were changed."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def check_commit(folder: Path) -> None:
    """Refuse to go on with runs that another commit began."""
    path = folder / COMMIT
    begun = json.loads(path.read_text("utf-8")) if path.exists() else this_commit()
    if begun != this_commit():
        raise SystemExit(
            f"The runs in {folder} are of commit {begun}, but {this_commit()} is "
            "checked out. Check that commit out to go on with them, or remove the "
            "folder to begin anew."
        )


def pack(name: str) -> None:
    """Write the small files of finished runs into the one file that is committed."""
    folder = RUNS / name
    files = {
        path.relative_to(folder).as_posix(): json.loads(path.read_text("utf-8"))
        for path in sorted(folder.rglob("*.json"))
        if path.name in (RANDOM, COMMIT)
        or (path.name in SMALL and (path.parent / RESULT).exists())
    }
    packed(name).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(files, separators=(",", ":"), allow_nan=False)
    packed(name).write_text(text + "\n", "utf-8")


def packed(name: str) -> Path:
    """Return the committed file of a study."""
    return COMMITTED / f"{name}.json"


def finished_seeds(name: str) -> int:
    """Return how many seeds every setup of a committed study has."""
    if not packed(name).exists():
        return 0
    files = json.loads(packed(name).read_text("utf-8"))
    setups = Counter(path.split("/")[0] for path in files if path.endswith(RESULT))
    return min(setups.values(), default=0)


def unpack(name: str, folder: Path) -> None:
    """Write the packed files to ``folder``, except files that exist already."""
    for relative, content in json.loads(packed(name).read_text("utf-8")).items():
        path = folder / relative
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, separators=(",", ":")) + "\n", "utf-8")


def results(name: str) -> tuple[list[Run], EvaluationRecord | None]:
    """Return the runs of a committed study and the evaluation of random actions."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(name, Path(folder))
        return read_runs(Path(folder)), read_random(Path(folder))


def answers(names: Iterable[str]) -> str:
    """Return what the tests of these studies say, a line per study."""
    lines = [QUESTION, ""]
    for name in names:
        verdicts = effects(summarize(results(name)[0])).partition("). ")[2]
        lines.append(f"- {name.replace('_', ' ')}: {verdicts}")
    return "\n".join(lines)


def section(name: str) -> str:
    """Return a study's section of the page, and write the picture of its curves."""
    study = STUDIES[name]
    runs, random = results(name)
    picture = PAGE.parent / "comparison" / f"{name}.png"
    picture.parent.mkdir(exist_ok=True)
    title = name.replace("_", " ")
    plot_curves(runs, title, picture, random, study.baselines)
    text = markdown(runs, title, random, f"{picture.parent.name}/{picture.name}")
    heading, remainder = text.split("\n", 1)
    ours = study.command.startswith("workloads.")  # Not in the installed package.
    path = "PYTHONPATH=benchmarks " if ours else ""
    command = f"```sh\n{path}marl-collect compare {study.command}\n```"
    # The page has the returns of the team; the command's report has all tables. What
    # the tests say of properties stands at the head of the page.
    returns = remainder.partition("\nReturn per agent")[0].rstrip()
    returns = returns.replace(effects(summarize(runs)) + "\n\n", "")
    blocks = [heading, "", study.about, "", command, returns]
    commit = json.loads(packed(name).read_text("utf-8"))[COMMIT]
    blocks += ["", f"All runs are of commit {commit}."]
    return "\n".join(blocks)


def write_page() -> None:
    """Write docs/comparison.md from all studies that were run here or committed."""
    for name in STUDIES:
        if any((RUNS / name).rglob(EVALUATIONS)):
            pack(name)
    seeds = {name: finished_seeds(name) for name in STUDIES}
    names = [name for name, study in STUDIES.items() if seeds[name] >= study.seeds]
    about = (
        "Each setup combines an algorithm with shared or separate networks, and with "
        "local or centralised observations. All setups of a study use the same number "
        "of frames and the same evaluation episodes, with several seeds. `python "
        "benchmarks/setups.py page` generates this page; each section shows the "
        "command for its runs, whose report also has returns per agent and costs."
    )
    legend = LEGEND.partition("- Gradient steps")[0].rstrip()  # The rest is left out.
    blocks = ["# Setups compared", "", about, "", legend, "", answers(names)]
    for name in names:
        blocks += ["", section(name)]
    for name in [name for name in STUDIES if name not in names]:
        blocks += ["", f"`{name}` has {seeds[name]} of {STUDIES[name].seeds} seeds."]
    PAGE.write_text("\n".join(blocks) + "\n", "utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {', '.join(names)}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page", "unpack"))
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY")
    arguments = parser.parse_args()
    if arguments.what == "run":
        train(arguments.studies or list(STUDIES))
    elif arguments.what == "unpack":
        for name in arguments.studies or list(STUDIES):
            unpack(name, RUNS / name)
    else:
        write_page()


if __name__ == "__main__":
    main()
