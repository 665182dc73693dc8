"""``marl-collect view``: a page with the episodes of a dataset."""

import os
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marl_collect.buffers.layout import LEVEL
from marl_collect.cli import arguments
from marl_collect.cli.consoles import err, out, user_errors
from marl_collect.cli.file_tasks import UntrustedTaskError, checked_task
from marl_collect.cli.tasks import find_curriculum, find_factory, parse_settings
from marl_collect.files.atomic import require_folder

if TYPE_CHECKING:
    from marl_collect.cli.viewer.episodes import Episodes
    from marl_collect.rollout.episodes import Curriculum


def view(  # noqa: PLR0913 - one argument per option
    path: Annotated[str, typer.Argument(help="Folder or URL of a dataset.")],
    *,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Write one HTML file that needs no server, such as x.html, instead "
            "of opening the page."
        ),
    ] = None,
    episode: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Number of an episode to save. Repeatable.  [default: the episodes "
            "with the highest, median and lowest return]",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Task that renders the episodes, such as your own `module:name`.  "
            "[default: the dataset's, if its family is registered]",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Keyword argument for the environment that renders the episodes, in "
            "place of the dataset's; VALUE is JSON or text. Repeatable.",
        ),
    ] = None,
    curriculum: arguments.Curriculum = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Server port; 0 picks a free port.")
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    cache: arguments.Cache = None,
) -> None:
    """View the episodes of a dataset in a browser.

    The page plays an episode from its stored pictures, or renders it by replaying its
    actions in the environment. It also shows rewards, returns, actions, masks and
    policy outputs. It is served until Ctrl-C, to browsers of this machine that have
    its address: the token in it keeps other users out.

    Example: `marl-collect view data`, or `marl-collect view data --save best.html`
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame opens no window.
    with ExitStack() as stack, user_errors(OSError, ValueError, TypeError, ImportError):
        from marl_collect.cli.viewer import server

        chosen = tuple(dict.fromkeys(episode or ()))
        if chosen and save is None:
            raise ValueError("--episode chooses what --save writes: add --save x.html.")
        if save is not None:
            if port or not browser:
                raise ValueError(
                    "--port and --no-browser are for the server, which --save does "
                    "not start: omit them."
                )
            require_folder(save)
        typed = parse_settings(env or [])
        tasks = find_curriculum(curriculum)
        opened = _episodes(path, task, cache, typed, tasks.get("curriculum"))
        shown = stack.enter_context(closing(opened))
        chosen = shown.known(chosen)
        listed = chosen if save else None
        answers: server.Answers = {
            "/about": shown.about,
            "/episodes": lambda begin: shown.listed(begin, listed),
            "/episode": shown.episode,
            "/picture": shown.picture,
        }
        if save is not None:
            with err.status("Drawing and writing the page"):
                server.save(save, answers, _requests(shown, chosen))
            size = save.stat().st_size / 1e6
            out.print(f"{save}: {size:,.1f} MB", soft_wrap=True)
            return
        serving = stack.enter_context(server.Viewer(answers, port))
        out.print(f"{serving.address} (Ctrl-C ends it)", soft_wrap=True)
        if browser:
            webbrowser.open(stack.enter_context(server.redirection(serving.address)))
        with suppress(KeyboardInterrupt):
            serving.serve_forever()


def _episodes(
    path: str | Path,
    task: str | None,
    cache: Path | None = None,
    typed: Mapping[str, Any] = MappingProxyType({}),
    curriculum: "Curriculum | None" = None,
) -> "Episodes":
    """Open a dataset.

    Args:
        path: folder or URL.
        task: that draws the episodes; None for the dataset's.
        cache: as for ``open_dataset``.
        typed: settings of the task, which replace the dataset's.
        curriculum: that the episodes were recorded with.

    Raises:
        FileNotFoundError: if there is none; says where the curves of runs are.
        ValueError: if it is damaged, there is no such task, its settings in the
            dataset are not safe, or only one of dataset and user has a curriculum.
    """
    from marl_collect.cli.viewer.episodes import Episodes
    from marl_collect.storage import open_dataset
    from marl_collect.training.run_folder import PROGRESS

    try:
        trajectories = open_dataset(path, cache=cache).trajectories
    except FileNotFoundError as error:
        # Not of all folders below: there may be millions.
        if any(any(Path(path).glob("*/" * k + PROGRESS)) for k in range(4)):
            raise FileNotFoundError(
                f"{path} has training runs, but no dataset. {PROGRESS} has their "
                f"numbers; `marl-collect compare --report {path}` draws the curves of "
                "a comparison."
            ) from error
        raise
    about = trajectories.description
    has_levels = any(field.key == LEVEL for field in trajectories.keys)
    if curriculum is not None and not has_levels:
        raise ValueError(
            f"{trajectories.name} was recorded without a curriculum: omit --curriculum."
        )

    def find(typed_task: str | None = None) -> Callable[[], Any]:
        if has_levels and curriculum is None:
            raise ValueError(
                f"{trajectories.name} was recorded with a curriculum, whose tasks are "
                "not in the data: add --curriculum MODULE:FUNCTION."
            )
        chosen, kwargs = checked_task(
            trajectories.name,
            about.task,
            dict(about.env_kwargs),
            typed,
            typed_task=typed_task,
            how=lambda name: f"add --task {name}",
        )
        return find_factory(chosen, kwargs, pictures=True)

    def find_recorded() -> Callable[[], Any] | str:
        try:
            return find()
        except UntrustedTaskError as error:
            return f"The episodes are not drawn. {error}"
        except (ValueError, ImportError) as error:
            return f"The episodes cannot be drawn. {error}"

    if task is None:
        return Episodes(trajectories, find_recorded, curriculum)
    factory = find(task)
    return Episodes(trajectories, lambda: factory, curriculum)


def _requests(shown: "Episodes", chosen: Sequence[int]) -> Iterator[str]:
    """Yield the requests of the page for some episodes."""
    begin = 0
    yield "/about"
    while begin is not None:
        yield f"/episodes?begin={begin}"
        begin = shown.listed(begin, chosen)["next"]
    for number in chosen:
        for begin in shown.parts(number):
            yield f"/episode?number={number}&begin={begin}"
        for source, frame in shown.pictures(number):
            yield f"/picture?number={number}&source={source}&frame={frame}"
