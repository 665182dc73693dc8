"""Task provider of VMAS: an entry point of ``marl_collect.tasks``."""

from typing import Final

from marl_collect.envs.family import Family


def _listed() -> list[str]:
    import vmas

    return [*vmas.scenarios, *vmas.mpe_scenarios]


def _known(scenario: str) -> bool:
    import vmas

    return scenario in [*_listed(), *vmas.debug_scenarios]


FAMILY: Final = Family(
    name="vmas",
    extra="vmas",
    modules=("vmas",),
    distributions=("vmas",),
    listed=_listed,
    known=_known,
    env="marl_collect.envs.vmas.env:VmasEnv",
    pettingzoo=False,
)
