"""Models."""

if __name__ != "marl_collect.models":
    raise ImportError(
        f"Import marl_collect.models, not {__name__}: it would exist twice."
    )
