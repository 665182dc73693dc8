"""Envs."""

if __name__ != "marl_collect.envs":
    raise ImportError(
        f"Import marl_collect.envs, not {__name__}: it would exist twice."
    )
