"""``SerialBatch``: several environments of this process."""

from typing import Any

import pytest
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect import SerialEnv
from marl_collect.core.batch import SerialBatch


class Closes:
    """A CountingEnv that raises ``error`` when it is closed."""

    def __init__(self) -> None:
        self.env: Any = CountingEnv()
        self.error: Exception | None = None
        self.closed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def close(self) -> None:
        self.closed += 1
        self.env.close()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("raising", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_close_closes_everything_and_raises_the_first_error(raising: list[int]) -> None:
    envs: list[Any] = [Closes() for _ in range(3)]
    errors = {k: OSError(f"environment {k}") for k in raising}
    for k, error in errors.items():
        envs[k].error = error
    with pytest.raises(OSError, match=f"environment {raising[0]}") as excinfo:
        SerialBatch(envs).close()
    assert excinfo.value is errors[raising[0]]
    assert [env.closed for env in envs] == [1, 1, 1]


def test_environments_built_before_an_error_are_closed() -> None:
    closed: list[CountingEnv] = []

    def good() -> CountingEnv:
        env: Any = CountingEnv()
        close = env.close

        def noting() -> None:
            closed.append(env)
            close()

        env.close = noting
        return env

    with pytest.raises(CountingError):
        SerialEnv(3, [good, good, lambda: CountingEnv(fault=Fault("raise", "create"))])
    assert len(closed) == 2
