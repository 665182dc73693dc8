"""Every option of ParallelEnv, checked before anything starts."""

from dataclasses import dataclass
from typing import TypedDict, final

from marl_collect.parallel_env.cpus import effective_cpus, is_rationed
from marl_collect.processes.launcher import StartMethod, check_start_method

# As long as many an environment steps.
_SPIN_SECONDS = 1e-3


class ParallelKeywords(TypedDict, total=False):
    """The keyword arguments of ParallelEnv; see ParallelOptions."""

    envs_per_process: int | None
    num_processes: int | None
    groups: int
    timeout: float | None
    start_timeout: float | None
    start_method: StartMethod | None
    preload: tuple[str, ...]
    num_sub_threads: int
    num_threads: int | None
    pin_processes: bool


@final
@dataclass(frozen=True)
class ParallelOptions:
    """How environments are spread over processes, and how long one waits for them.

    Attributes:
        envs_per_process: environments of each process, where ``num_processes`` is
            not given.
        num_processes: by default one per processor that may be used, and no more
            than there are environments.
        groups: 2 lets half of the environments step while a collector's policy acts
            for the other half.
        timeout: seconds without progress after which a process counts as hung,
            None for never.
        start_timeout: the same while environments are built.
        start_method: "forkserver" or "spawn"; None for the best on this system.
        preload: modules that the fork server imports before it forks; they must not
            start threads.
        num_sub_threads: threads of numerical libraries in each process.
        num_threads: torch threads of this process, where the policy acts; None leaves
            them alone.
        pin_processes: where there are exactly as many processes as processors, and
            ``num_sub_threads`` is 1, keep each process to one of them.
    """

    envs_per_process: int | None = None
    num_processes: int | None = None
    groups: int = 1
    timeout: float | None = 300.0
    start_timeout: float | None = 120.0
    start_method: StartMethod | None = None
    preload: tuple[str, ...] = ()
    num_sub_threads: int = 1
    num_threads: int | None = None
    pin_processes: bool = True

    def check(self, environments: int) -> None:
        """Check every option.

        Raises:
            TypeError: for a value of the wrong type.
            ValueError: for a value that makes no sense, with what it must be.
        """
        for name in ("groups", "num_sub_threads"):
            require_positive(name, getattr(self, name))
        for name in ("envs_per_process", "num_processes", "num_threads"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        for name in ("timeout", "start_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(
                    f"{name} must be positive seconds or None: {seconds!r}."
                )
        if isinstance(self.preload, str):
            raise TypeError(
                f"preload must be a sequence of module names, such as ({self.preload!r}"
                ",), but is a string."
            )
        if not isinstance(self.pin_processes, bool):
            raise TypeError(
                f"pin_processes must be True or False, but is {self.pin_processes!r}."
            )
        check_start_method(self.start_method)
        self._check_sizes(environments)

    def processes(self, environments: int) -> int:
        """Return how many processes step so many environments."""
        if self.num_processes is not None:
            return self.num_processes
        if self.envs_per_process is not None:
            return -(-environments // self.envs_per_process)
        return min(environments, effective_cpus())

    def spin(self, processes: int) -> float:
        """Return the seconds to spin before sleeping; the trainer does so too.

        It also pays with more processes than processors, since those who have work to
        do get the processor between two looks. Not if processor time is rationed and
        may run out: it would be lost to them.
        """
        enough = processes < effective_cpus() or not is_rationed()
        return _SPIN_SECONDS if enough else 0.0

    def _check_sizes(self, environments: int) -> None:
        n, per, processes = environments, self.envs_per_process, self.num_processes
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


def require_positive(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, but is {value!r}.")
