"""Compares training setups and writes docs/comparison.md.

    python benchmarks/setups.py run                  # all studies: hours on two cores
    python benchmarks/setups.py run simple_spread    # one study, in runs/setups
    python benchmarks/setups.py page                 # docs/comparison.md
    python benchmarks/setups.py unpack               # committed results to runs/setups

Each study is one `marl-collect compare` command, which is printed. An interrupted study
continues when it is run again, with the commit that began it. `page` also packs the
small files of all runs of a study into one file, `benchmarks/results/setups/NAME.json`,
which is committed. After `unpack`, `marl-collect compare --report
runs/setups/simple_spread` prints its tables, and `run` trains only what is not in the
file.
"""

import argparse
import json
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from marl_collect.cli.main import app
from marl_collect.models.saved_policy import CONFIG
from marl_collect.training.plots import plot_curves
from marl_collect.training.report import LEGEND, markdown
from marl_collect.training.results import RANDOM, Run, read_random, read_runs
from marl_collect.training.run_folder import EVALUATIONS, RESULT

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "setups"
COMMITTED = ROOT / "benchmarks" / "results" / "setups"
PAGE = ROOT / "docs" / "comparison.md"
COMMIT = "commit.json"
SMALL = {CONFIG, EVALUATIONS, RESULT, RANDOM}

PAIR = (
    "--frames 10240 --set frames_per_batch=512 --set envs_per_worker=4 "
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
PPO_ABOUT = (
    "Does a centralised critic help, and do shared parameters? IPPO has local critics "
    "and MAPPO a centralised one. Each has networks of its own per agent, shared ones, "
    "or shared ones that see which agent acts."
)


@dataclass(frozen=True)
class Study:
    """One comparison.

    Attributes:
        command: arguments of `marl-collect compare`.
        about: description of the study.
        team: return of the team that an evaluation must exceed; None for no anchor.
        agent: return per agent that it must exceed.
        length: mean episode length that it must exceed.
        baselines: further returns of the team that the curves show, by label.
        seeds: of each setup, before which the page does not show the study.
    """

    command: str
    about: str
    team: float | None = None
    agent: float | None = None
    length: float | None = None
    baselines: Mapping[str, float] = field(default_factory=dict)
    seeds: int = 1

    def passed(self, run: Run) -> int | None:
        """Return the frames of the first evaluation that passed, or None."""
        for record in run.evaluations:
            if (
                (self.team is None or record.team > self.team)
                and (self.agent is None or record.agent > self.agent)
                and (self.length is None or record.length > self.length)
            ):
                return record.frames
        return None


STUDIES = {
    "simple_spread_ppo": Study(
        f"simple_spread_v3 {PPO} --frames 500000 --seeds 10",
        PPO_ABOUT,
        baselines={"hand-written": -45.5},
        seeds=10,
    ),
    "multiwalker_ppo": Study(
        f"multiwalker_v9 {PPO} --frames 500000 --seeds 10 --set ppo.anneal=true",
        PPO_ABOUT,
        seeds=10,
    ),
    "lbforaging_ppo": Study(
        f"lbforaging/10x10-3p-3f {PPO} --frames 2000000 --seeds 10 "
        "--set eval_interval=100000",
        PPO_ABOUT,
        seeds=10,
    ),
    "coins_ppo": Study(
        f"meltingpot/coins {PPO} --frames 300000 --seeds 5 "
        "--set eval_episodes=8 --set final_episodes=16",
        PPO_ABOUT,
        seeds=5,
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
    "simple_spread": Study(
        "simple_spread_v3 --setup ippo-local-shared",
        "Three particles must cover three landmarks, with 25 frames per episode. "
        "Anchor: the team's return exceeds -58 in an evaluation. A hand-written policy "
        "that sends agent i to landmark i reaches -45.5.",
        team=-58.0,
        baselines={"hand-written": -45.5},
    ),
    "multiwalker": Study(
        "multiwalker_v9 --frames 300000 --setup ippo-local-shared "
        "--set ppo.anneal=true",
        "Three walkers carry a package. Anchor: in an evaluation, the return per agent "
        "exceeds -60 and episodes are longer than 200 frames. The learning rate decays "
        "to zero.",
        agent=-60.0,
        length=200.0,
    ),
    "multiwalker_long": Study(
        "multiwalker_v9 --frames 300000 --setup ippo-local-own "
        "--setup mappo-local-shared --setup mappo-centralised-own "
        "--setup ippo-centralised-own --set ppo.anneal=true",
        "The other setups that miss the anchor of `multiwalker` with some seed in the "
        "grid below, run with the anchor's command and full number of frames. All four "
        "pass it with every seed, so the runs in the grid are too short. "
        "ippo-local-own has three networks that see only their own walker and learn "
        "independently. It peaks between 152,000 and 240,000 frames and then declines "
        "with every seed. The cause was not examined.",
        agent=-60.0,
        length=200.0,
    ),
    "simple_spread_grid": Study(
        "simple_spread_v3 --frames 100000 --seeds 3 --set eval_interval=20000 "
        "--set eval_episodes=64",
        "All setups with three seeds and a third of the anchor's frames. This shows "
        "early training, not final returns.",
    ),
    "multiwalker_grid": Study(
        "multiwalker_v9 --frames 60000 --seeds 3 --set eval_interval=20000 "
        "--set eval_episodes=16 --set final_episodes=32",
        "All setups with three seeds and a fifth of the anchor's frames. This shows "
        "early training, not final returns. Every setup passes the anchor of "
        "`multiwalker` with at least one seed. ippo-local-own, ippo-local-shared and "
        "mappo-centralised-own miss it with two seeds, ippo-centralised-own and "
        "mappo-local-shared with one. With 300,000 frames, all five pass it with every "
        "seed (`multiwalker` and `multiwalker long` above), so the runs here are too "
        "short. In runs that pass at 0 frames, the walkers stand still: these are the "
        "likeliest actions of the untrained networks.",
        agent=-60.0,
        length=200.0,
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
    runs = packed(name).read_text("utf-8").count(RESULT)
    return runs // max(1, STUDIES[name].command.count("--setup"))


def unpack(name: str, folder: Path) -> None:
    """Write the packed files to ``folder``, except files that exist already."""
    for relative, content in json.loads(packed(name).read_text("utf-8")).items():
        path = folder / relative
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, separators=(",", ":")) + "\n", "utf-8")


def section(name: str) -> str:
    """Return a study's section of the page, and write the picture of its curves."""
    study = STUDIES[name]
    with tempfile.TemporaryDirectory() as folder:
        unpack(name, Path(folder))
        runs, random = read_runs(Path(folder)), read_random(Path(folder))
    picture = PAGE.parent / "comparison" / f"{name}.png"
    picture.parent.mkdir(exist_ok=True)
    title = name.replace("_", " ")
    plot_curves(runs, title, picture, random, study.baselines)
    text = markdown(runs, title, random, f"{picture.parent.name}/{picture.name}")
    heading, remainder = text.split("\n", 1)
    ours = study.command.startswith("workloads.")  # Not in the installed package.
    path = "PYTHONPATH=benchmarks " if ours else ""
    command = f"```sh\n{path}marl-collect compare {study.command}\n```"
    # The page has the returns of the team; the command's report has all tables.
    returns = remainder.partition("\nReturn per agent")[0].rstrip()
    blocks = [heading, "", study.about, "", command, returns]
    commit = json.loads(packed(name).read_text("utf-8")).get(COMMIT)
    if commit:
        blocks += ["", f"All runs are of commit {commit}."]
    if study.team is not None or study.agent is not None:
        blocks += ["", anchors(study, runs)]
    return "\n".join(blocks)


def anchors(study: Study, runs: list[Run]) -> str:
    """Return a sentence with the frames at which each seed reached the anchor."""
    frames: dict[str, list[str]] = {}
    for run in runs:
        at = study.passed(run)
        frames.setdefault(run.setup, []).append("missed" if at is None else f"{at:,}")
    setups = [f"{setup} {', '.join(seeds)}" for setup, seeds in frames.items()]
    return f"Frames at which each seed passed the anchor: {'; '.join(setups)}."


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
        "command for its runs, whose report also has returns per agent and costs. Runs "
        "of studies for which no commit is given are older, and predate the rule for "
        "[agents that wait or "
        "die](groups_and_masks.md#advantages-of-agents-that-wait-or-die), which does "
        "not affect these tasks: all agents act in every frame. The QMIX results on "
        "pairs predate its mixer's [normalised observations](examples.md#curves). In "
        "the two grids, the third seeds and all seeds of QMIX are newer than the rest."
    )
    legend = LEGEND.partition("- Gradient steps")[0].rstrip()  # The rest is left out.
    blocks = ["# Setups compared", "", about, "", legend]
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
