"""Builds the policy that ``--policy`` names, and describes it for the dataset."""

import hashlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

MLP = "mlp"
RANDOM = "random"
SAVED = "saved"


@dataclass(frozen=True)
class PolicyRequest:
    """The command line's options about the policy.

    Attributes:
        source: ``"mlp"``, ``"random"``, or a path: a file of ``save_policy``, the
            folder of a run of ``compare``, or the ``state_dict`` of an MLP. Empty if
            ``what_to_play`` is to choose it.
        centralised: whether each agent sees the observations of its whole group.
        share_params: whether the agents of a group share one network.
        seed: of the weights.
    """

    source: str
    centralised: bool
    share_params: bool
    seed: int

    def check(self) -> None:
        """Check the source.

        Raises:
            ValueError: if it is neither a known name nor a path, or if options describe
                networks that it does not have.
        """
        if self.source not in (MLP, RANDOM) and not Path(self.source).exists():
            raise ValueError(
                f"--policy {self.source}: expected mlp, random, the folder of a run of "
                "compare, or the file of a policy, but no such path exists. In Python, "
                "save_policy(path, policy, make_env) writes one."
            )
        if self.source == RANDOM or Path(self.source).is_dir():
            self._check_networks()

    def _check_networks(self) -> None:
        """Check that no option describes networks that are not built from it.

        Raises:
            ValueError: if one does.
        """
        options = ["--centralised"] * self.centralised
        options += ["--no-share-params"] * (not self.share_params)
        if options:
            policy = "random" if self.source == RANDOM else f"that of {self.source}"
            raise ValueError(
                f"{' and '.join(options)}: these options describe the networks of mlp, "
                f"but the policy is {policy}. Omit them, or pass --policy mlp."
            )

    def describe(self) -> dict[str, Any]:
        """Return plain data about the policy, for the dataset's description."""
        if self.source == RANDOM:
            return {"kind": RANDOM}
        about: dict[str, Any] = {
            "kind": MLP,
            "centralised": self.centralised,
            "share_params": self.share_params,
        }
        if self.source == MLP:
            return about | {"weights_seed": self.seed}
        saved = import_module("marl_collect.models.saved_policy")
        path = saved.policy_file(Path(self.source))
        options = saved.saved_options(path)
        if options is not None:  # --centralised and --share-params do not apply.
            about = {"kind": SAVED, **options}
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return about | {"checkpoint": str(path.absolute()), "sha256": digest}

    def build(self, description: Any) -> Any:
        """Build the policy for an environment, or return None for random actions.

        Args:
            description: ``EnvDescription`` of the environment.

        Raises:
            ValueError: if the checkpoint does not fit, or if options describe other
                networks; says what differs.
        """
        if self.source == RANDOM:
            return None
        import torch

        if self.source != MLP and self._is_saved_policy():
            self._check_networks()
            return import_module("marl_collect.models").load_policy(
                self.source, description
            )
        torch.manual_seed(self.seed)
        # Imported by name, because the engine does not depend on the models.
        make_policy = import_module("marl_collect.models").make_policy
        policy = make_policy(
            description, centralised=self.centralised, share_params=self.share_params
        )
        if self.source != MLP:
            weights = import_module("marl_collect.models.saved_policy").read_tensors(
                Path(self.source)
            )
            try:
                policy.load_state_dict(weights)
            except (RuntimeError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{self.source} does not fit the policy that --centralised and "
                    f"--share-params describe: {error}"
                ) from error
        return policy

    def _is_saved_policy(self) -> bool:
        """Return whether the path has a policy with its description."""
        if Path(self.source).is_dir():
            return True
        saved = import_module("marl_collect.models.saved_policy")
        return saved.saved_options(self.source) is not None
