"""Calls of the user's code in a worker."""

import threading

import pytest

from marl_collect.errors import WorkerError
from marl_collect.processes.context import Raised, attempt, result


def test_a_result_is_pickled_in_the_worker_and_returned_in_the_trainer() -> None:
    reply = attempt(divmod, 7, 2)
    assert isinstance(reply, bytes)
    assert result(reply, 1) == (3, 1)


@pytest.mark.parametrize(
    ("function", "error"),
    [(lambda: 1 // 0, ZeroDivisionError), (threading.Lock, TypeError)],
    ids=["raises", "cannot_be_sent"],
)
def test_an_error_of_the_users_code_is_raised_in_the_trainer(
    function: object, error: type[Exception]
) -> None:
    reply = attempt(function)  # type: ignore[arg-type]
    assert isinstance(reply, Raised)
    with pytest.raises(error) as raised:
        result(reply, 1)
    assert isinstance(raised.value.__cause__, WorkerError)
    assert raised.value.__cause__.worker == 1
