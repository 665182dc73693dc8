"""Which workers of an async collector start a batch, and when."""

from marl_collect.collectors.in_flight import InFlight


def test_idle_workers_take_turns() -> None:
    flights = InFlight(None)
    assert flights.idle(range(3)) == [0, 1, 2]
    flights.dispatch(0, 0)
    flights.dispatch(1, 0)
    flights.arrive(0)
    flights.arrive(1)
    assert flights.idle(range(3)) == [2, 0, 1]
    flights.dispatch(2, 0)
    assert flights.idle(range(3)) == [0, 1]
    assert 2 in flights
    assert [*flights] == [2]


def test_no_batch_in_flight_can_become_staler_than_the_limit() -> None:
    flights = InFlight(2)
    flights.dispatch(0, 0)
    assert flights.may_dispatch(1)
    assert not flights.may_dispatch(2)
    flights.dispatch(1, 1)
    assert not flights.may_dispatch(0)  # Two in flight, and one is overtaken already.
    flights.arrive(0)
    assert [*flights] == [1]
    assert not flights.may_dispatch(0)  # The other has seen two batches delivered.
    flights.clear()
    assert flights.may_dispatch(0)
