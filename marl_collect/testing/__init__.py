"""``check_env`` validates an environment; ``PairEnv`` has a known optimum."""
