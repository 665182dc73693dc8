"""Every option of ParallelEnv, checked before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from marl_collect.core.factories import Factory
from marl_collect.options import Option, RejectedKeyword, only
from marl_collect.parallel_env.cpus import effective_cpus, is_rationed
from marl_collect.processes.closing import CLOSE_SECONDS
from marl_collect.processes.options import ProcessOptions

# Many environments need about this long for a step.
_SPIN_SECONDS = 1e-3

_SHARED = "environments and trainer share memory in any case"
_ALIKE = "all environments of a batch have the same keys, in shared memory"
TORCHRL = {
    "device": RejectedKeyword(
        "environments run on the CPU: move what the policy reads", only(None, "cpu")
    ),
    "non_blocking": RejectedKeyword(
        "nothing is copied between devices", only(None, False)
    ),
    "shared_memory": RejectedKeyword(_SHARED, only(True)),
    "memmap": RejectedKeyword(_SHARED, only(False)),
    "use_buffers": RejectedKeyword(_SHARED, only(None, True)),
    "share_individual_td": RejectedKeyword(_ALIKE, only(None, False)),
    "consolidate": RejectedKeyword("nothing is pickled in a step", only(True)),
    "metadata_from_workers": RejectedKeyword(
        "keys and spaces always come from the processes", only(False, True)
    ),
    "auto_wrap_envs": RejectedKeyword(
        "factories need no EnvCreator", only(False, True)
    ),
    "daemon": RejectedKeyword(
        "the processes always end with the trainer", only(False, True)
    ),
    "shutdown_timeout": RejectedKeyword(
        f"close() waits for {CLOSE_SECONDS:g} seconds", only(CLOSE_SECONDS)
    ),
    "policy_proof": RejectedKeyword("the policy is not needed", only(None)),
    "allow_step_when_done": RejectedKeyword(
        "`_step` selects the environments that step",
        only(False),
    ),
}
"""Arguments of TorchRL that are missing here, with replacements.

Values that match our behaviour are accepted.
"""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(ProcessOptions):
    """The arguments of ``ParallelEnv``."""

    rejected_keywords: ClassVar[Mapping[str, RejectedKeyword]] = TORCHRL
    torchrl_keywords: ClassVar[Mapping[str, str]] = {"mp_start_method": "start_method"}

    num_workers: Annotated[
        int,
        Option(
            "N, the number of **environments** (TorchRL: also of processes)", at_least=1
        ),
    ] = field(kw_only=False)
    create_env_fn: Annotated[
        Factory | Sequence[Factory],
        Option(
            "one factory for all, or a list with one per environment", checked=False
        ),
    ] = field(kw_only=False)
    create_env_kwargs: Annotated[
        Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        Option("passed to every factory, or a list with one per environment"),
    ] = None
    serial_for_single: Annotated[
        bool,
        Option(
            "with one environment, build a `SerialEnv`, which steps it in this process"
        ),
    ] = False
    num_processes: Annotated[
        int | None,
        Option(
            "number of processes; by default one per available processor (counted by "
            "affinity and control group), at most one per environment",
            at_least=1,
        ),
    ] = None
    envs_per_process: Annotated[
        int | None, Option("alternative to `num_processes`", at_least=1)
    ] = None
    groups: Annotated[
        int,
        Option(
            "2: a collector's policy acts for one half of the environments while the "
            "other half steps",
            at_least=1,
        ),
    ] = 1
    pin_processes: Annotated[
        bool,
        Option(
            "pin each process to one processor if there are exactly as many processes "
            "as processors, and `num_sub_threads` is 1"
        ),
    ] = True

    @property
    def processes(self) -> int:
        """The number of processes."""
        if self.num_processes is not None:
            return self.num_processes
        if self.envs_per_process is not None:
            return -(-self.num_workers // self.envs_per_process)
        return min(self.num_workers, effective_cpus())

    def check(self) -> None:
        """Check that sizes fit the number of environments.

        Raises:
            ValueError: naming the options that do not fit.
        """
        n, per, processes = self.num_workers, self.envs_per_process, self.num_processes
        if processes is not None and processes > n:
            raise ValueError(
                f"num_processes={processes} is more than the {n} environments: use at "
                f"most num_processes={n}."
            )
        if per is not None and processes is not None and per * processes != n:
            raise ValueError(
                f"envs_per_process={per} and num_processes={processes} make "
                f"{per * processes} environments, but num_workers is {n}: give one of "
                "the two."
            )
        if self.groups > n:
            raise ValueError(
                f"groups={self.groups} is more than the {n} environments: a group "
                "cannot be empty."
            )


def spin_seconds(processes: int) -> float:
    """Return the seconds to spin before sleeping, in processes and trainer.

    Spinning also pays with more processes than processors, because it yields to
    processes that have work to do. It does not pay if a control group limits processor
    time: spinning would use up the quota.
    """
    enough = processes < effective_cpus() or not is_rationed()
    return _SPIN_SECONDS if enough else 0.0
