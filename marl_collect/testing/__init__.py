"""``check_env`` validates an environment."""
