"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Task = Annotated[
    str,
    typer.Argument(
        help="Name of a task, as for `marl-collect collect`, or the folder of a "
        "`compare` run, which supplies task, settings and policy. A run of your own "
        "`module:name` needs the name, and `--policy RUN`."
    ),
]
POLICY_HELP = (
    "`random` (random actions), `mlp` (one untrained network per group), the folder of "
    "a `compare` run, or a file with a `save_policy` policy or the `state_dict` of an "
    "mlp.  [default: the run's, or random]"
)


def not_empty(value: str | None) -> str | None:
    """Refuse an empty text, such as that of an unset variable of the shell."""
    if value == "":
        raise typer.BadParameter("It is empty. Pass a value, or omit the option.")
    return value


Policy = Annotated[str | None, typer.Option(help=POLICY_HELP, callback=not_empty)]
AsInFile = Annotated[bool, typer.Option(help="Must match the policy in the file.")]
Episodes = Annotated[int, typer.Option(min=1, help="Episodes to play.")]
MaxFramesPerTraj = Annotated[
    int | None,
    typer.Option(
        "--max-frames-per-traj",
        "--max-frames",
        min=1,
        help="Truncate episodes at this length.",
    ),
]
Stochastic = Annotated[
    bool,
    typer.Option(
        "--stochastic",
        help="Sample actions, as `collect` does; by default they are deterministic.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed for episodes and actions.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Keyword argument for the environment; VALUE is JSON or text. Repeatable.",
    ),
]
Curriculum = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Your function `curriculum(seed, episode, level)`, which returns the task "
        "of an episode. Its environment is told it before it resets.",
    ),
]
Level = Annotated[
    int,
    typer.Option(min=0, help="Level that the curriculum gets."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        help="Folder for decoded frames and for what is fetched from URLs, as for "
        "`open_dataset(cache=)`.  [default: .cache in the dataset's folder]",
    ),
]


def typed_arguments(context: typer.Context) -> list[str]:
    """Return the arguments that the user has typed, such as ``TASK`` or ``--seeds``."""
    typed = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            is_argument = parameter.param_type_name == "argument"
            typed.append(name.upper() if is_argument else parameter.opts[0])
    return typed
