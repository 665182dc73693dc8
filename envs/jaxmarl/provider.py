"""Task provider of JaxMARL, and what the adapter knows of its environments' names."""

import contextlib
import inspect
import io
import pkgutil
import sys
import warnings
from typing import Any, Final

from marl_collect.envs.common import defaults_of
from marl_collect.envs.family import Family
from marl_collect.errors import imports_of

TASKS: Final = {
    "MPE_simple_v3": "SimpleMPE",
    "MPE_simple_adversary_v3": "SimpleAdversaryMPE",
    "MPE_simple_crypto_v3": "SimpleCryptoMPE",
    "MPE_simple_facmac_v1": "SimpleFacmacMPE",
    "MPE_simple_push_v3": "SimplePushMPE",
    "MPE_simple_reference_v3": "SimpleReferenceMPE",
    "MPE_simple_speaker_listener_v4": "SimpleSpeakerListenerMPE",
    "MPE_simple_spread_v3": "SimpleSpreadMPE",
    "MPE_simple_tag_v3": "SimpleTagMPE",
    "MPE_simple_world_comm_v3": "SimpleWorldCommMPE",
    "SMAX": "SMAX",
    "HeuristicEnemySMAX": "HeuristicEnemySMAX",
    "hanabi": "Hanabi",
    "overcooked": "Overcooked",
    "overcooked_v2": "OvercookedV2",
    "switch_riddle": "SwitchRiddle",
    "coin_game": "CoinGame",
}
"""Name of each task to its class in ``jaxmarl.environments``.

Left out: facmac's fixed sizes, which are arguments of ``MPE_simple_facmac_v1``; storm,
whose observations have no agents' names; jaxnav, whose limit has not been compared;
MABrax and JaxRobotarium, which need other packages; an enemy with a learned policy,
which needs its network.
"""


def arguments(task: str) -> dict[str, Any]:
    """Return the keyword arguments of a task and their defaults."""
    defaults: dict[str, Any] = {}
    for kind in _classes(task):
        for name, parameter in inspect.signature(kind.__init__).parameters.items():
            if parameter.default is not parameter.empty:
                defaults.setdefault(name, parameter.default)
    return defaults


def build(task: str, options: dict[str, Any]) -> Any:
    """Build an environment of the library.

    Args:
        task: a name of ``TASKS``.
        options: its keyword arguments. ``scenario`` of SMAX and ``layout`` of
            Overcooked may be names.

    Raises:
        TypeError: for an unknown argument. The library ignores some of them.
        ValueError: if there is no such task, scenario or layout.
    """
    FAMILY.require(task)
    known = arguments(task)
    if unknown := sorted(options.keys() - known.keys()):
        raise TypeError(
            f"{task} has no argument {', '.join(unknown)}. Expected one of: "
            f"{', '.join(sorted(known))}."
        )
    with warnings.catch_warnings():
        # Overcooked recommends its second version.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _classes(task)[0](**_named(task, options))


def episode_limit(task: str, env: Any) -> int | None:
    """Return the number of frames after which an episode is cut; None for no limit."""
    if task == "hanabi":
        return None
    if task == "coin_game":
        return int(env.num_inner_steps * env.num_outer_steps)
    # MPE and SMAX compare the number of frames before the step with the limit.
    late = task.startswith("MPE") or task.endswith("SMAX")
    return int(env.max_steps) + late


def _environments() -> Any:
    # The import prints two lines, and sets both streams to those that Python began
    # with, although a notebook, for example, has replaced them.
    first = {name: vars(sys)[name] for name in ("__stdout__", "__stderr__")}
    with (
        imports_of("jaxmarl", "JaxMarlEnv"),
        contextlib.redirect_stdout(io.StringIO()) as silent,
        contextlib.redirect_stderr(sys.stderr),
    ):
        vars(sys).update(__stdout__=silent, __stderr__=sys.stderr)
        try:
            import jaxmarl.environments
        finally:
            vars(sys).update(first)
    return jaxmarl.environments


def _classes(task: str) -> list[Any]:
    """Return the class of a task, and those that get its further arguments."""
    library = _environments()
    kind = getattr(library, TASKS[task])
    others = [library.SMAX] if task == "HeuristicEnemySMAX" else []
    return [*kind.__mro__[:-1], *others]


def _named(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """Replace the names of scenarios and layouts by what they mean."""
    library = _environments()
    tables: dict[str, Any] = {}
    if task == "overcooked":
        tables = {"layout": library.overcooked_layouts}
    elif task.endswith("SMAX"):
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

        tables = {"scenario": MAP_NAME_TO_SCENARIO}
    replaced = dict(options)
    for name, table in tables.items():
        value = options.get(name)
        if isinstance(value, str):
            if value not in table:
                raise ValueError(
                    f"{task} has no {name} {value!r}. Expected one of: "
                    f"{', '.join(table)}."
                )
            replaced[name] = table[value]
    return replaced


_ENV = "marl_collect.envs.jaxmarl.env:JaxMarlEnv"


def _defaults(task: str) -> dict[str, Any]:
    return arguments(task) | defaults_of(pkgutil.resolve_name(_ENV))


FAMILY: Final = Family(
    name="jaxmarl",
    extra="jaxmarl",
    modules=("jaxmarl",),
    distributions=("jaxmarl", "jax"),
    listed=TASKS.keys,
    known=TASKS.__contains__,
    env=_ENV,
    defaults=_defaults,
    pettingzoo=False,
    safe=(
        *("group_map", "action_type", "score_function", "scenario", "layout"),
        *("observation_type", "attack_mode", "hand_size", "agent_view_size"),
    ),
)
