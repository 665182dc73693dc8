"""``CrossGroupCritic`` depends on all groups and equals TorchRL's critic."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from marl_collect.models import CrossCriticGroupSpec, CrossGroupCritic
from marl_collect.weights.materialize import infer_lazy, materialize

SIZES = {"wolf": (2, 3), "sheep": (4, 5)}


def specs(kind: Any = CrossCriticGroupSpec, **changed: Any) -> Any:
    return {
        name: kind(
            **(
                {
                    "obs_dim": size,
                    "n_agents": n,
                    "obs_key": (name, "observation"),
                    "value_key": (name, "state_value"),
                }
                | changed
            )
        )
        for name, (n, size) in SIZES.items()
    }


def batch(*shape: Any) -> Any:
    groups = {
        name: TensorDict({"observation": torch.randn(*shape, n, size)}, shape)
        for name, (n, size) in SIZES.items()
    }
    return TensorDict(groups, shape)


def test_encoders_of_detached_groups_get_no_gradient() -> None:
    critic = CrossGroupCritic(specs(), d_model=8, detach_groups=["wolf"])
    out = critic(batch(3))
    sum(out[name, "state_value"].sum() for name in SIZES).backward()
    assert all(p.grad is None for p in critic.module.encoders["wolf"].parameters())
    assert all(p.grad is not None for p in critic.module.encoders["sheep"].parameters())


@pytest.mark.parametrize("share_params", [False, True])
def test_it_equals_torchrl_with_the_same_weights(share_params: bool) -> None:
    torchrl = pytest.importorskip("torchrl.modules.models")
    critic_file = pytest.importorskip(
        "torchrl.modules.models.cross_group_critic",
        reason="needs a TorchRL that has this critic",
    )
    theirs = torchrl.CrossGroupCritic(
        specs(critic_file.CrossCriticGroupSpec), d_model=8, share_params=share_params
    )
    critic = CrossGroupCritic(specs(), d_model=8, share_params=share_params)
    critic.load_torchrl_state_dict(theirs.state_dict())
    td = batch(5)
    ours, other = critic(td.clone()), theirs(td.clone())
    for name in SIZES:
        key = (name, "state_value")
        torch.testing.assert_close(ours[key], other[key])


def test_sizes_are_inferred_and_weights_are_materialized() -> None:
    with torch.device("meta"):
        critic = CrossGroupCritic(specs(obs_dim=None), d_model=8)
    ready = materialize(infer_lazy(critic, batch(1)), seed=0)
    assert ready(batch(2))["sheep", "state_value"].shape == (2, 4, 1)


def test_bad_input_names_the_group() -> None:
    critic = CrossGroupCritic(specs())
    td = batch(2)
    td["sheep", "observation"] = torch.zeros(2, 3, 5)
    with pytest.raises(Exception, match=r"'sheep'.*n_agents=4.*\[2, 3, 5\]"):
        critic(td)
    with pytest.raises(ValueError, match=r"\['goat'\]"):
        CrossGroupCritic(specs(), detach_groups=["goat"])
