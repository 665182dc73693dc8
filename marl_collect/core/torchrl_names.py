"""Attributes of TorchRL's classes that ours lack, and what to use instead."""

_BRIDGE = (
    "transforms, specs and other parts of TorchRL need an EnvBase: "
    "marl_collect.interop.torchrl.to_torchrl(env) makes one of this environment"
)
_SPACES = (
    "it has observation_space and action_space, Gymnasium spaces nested like the keys"
)
_RESUMES = (
    "a collector saves and resumes running episodes: collector.state_dict() and "
    "collector.load_state_dict(state)"
)
_ADVICE = {
    "load_state_dict": _RESUMES,
    "state_dict": _RESUMES,
    "done_key": "done flags are at 'done' and (group, 'done')",
    "done_keys": "done flags are at 'done' and (group, 'done')",
    "maybe_reset": "use step_and_maybe_reset(tensordict)",
    "observation_keys": "the keys are in env.description.observed()",
    "available_envs": "use marl_collect.envs.available_envs()",
    "auto_register_info_dict": "pass PettingZooEnv(..., info_keys=[...])",
    "set_info_dict_reader": "pass PettingZooEnv(..., info_keys=[...])",
}
_BRIDGED = frozenset(
    {
        "all_actions",
        "allow_done_after_reset",
        "_allow_done_after_reset",
        "append_transform",
        "base_env",
        "batch_locked",
        "cardinality",
        "from_spec",
        "insert_transform",
        "is_spec_locked",
        "output_spec",
        "input_spec",
        "reset_keys",
        "run_type_checks",
        "_run_type_checks",
        "set_spec_lock_",
        "specs",
        "state_keys",
        "transform",
    }
)


def advice_on(name: str) -> str | None:
    """Return what to use instead of an attribute of TorchRL's environments, if any."""
    if name in _BRIDGED:
        return _BRIDGE
    if name.endswith(("_spec", "_specs", "_spec_unbatched")):
        return f"{_SPACES}; {_BRIDGE}"
    return _ADVICE.get(name)


def missing_attribute(kind: str, name: str, advice: str | None) -> AttributeError:
    """Return the error for an attribute that an object does not have.

    Args:
        kind: name of the object's class.
        name: of the attribute.
        advice: what to use instead, if TorchRL's class has it.
    """
    if advice is None:
        return AttributeError(f"{kind!r} object has no attribute {name!r}")
    return AttributeError(
        f"{kind} has no {name}: {advice}. "
        'See the page "Coming from TorchRL" of the documentation.'
    )
