"""Ctrl-C and SIGTERM: raised once, or deferred to the end of a section."""

import os
import signal
import time

import pytest

from marl_collect.programs.interruption import Interruption


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_interrupts_and_sets_the_exit_code() -> None:
    with Interruption() as interruption:
        assert not interruption.happened
        with pytest.raises(KeyboardInterrupt):
            press()
        press()  # A repeated delivery of the same Ctrl-C.
        assert interruption.happened
    assert interruption.exit_code == 130
    press()  # Ignored: the command is exiting.


def test_a_deferred_signal_raises_nothing_until_it_is_asked_for() -> None:
    with Interruption() as interruption:
        with interruption.deferred():
            press()
        assert interruption.happened
        with pytest.raises(KeyboardInterrupt):
            interruption.raise_if_happened()


def test_a_later_signal_interrupts_the_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Interruption():
        with pytest.raises(KeyboardInterrupt):
            press()
        later = time.monotonic() + 5
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            press()


def test_a_later_signal_ends_a_long_section_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[str] = []
    with (
        Interruption() as interruption,
        interruption.deferred(lambda: messages.append("")),
    ):
        press()
        press()  # The same Ctrl-C.
        assert len(messages) == 1
        later = time.monotonic() + 5
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            press()
    assert len(messages) == 1


def test_without_a_signal_the_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interruption() as interruption:
        assert signal.getsignal(signal.SIGTERM) != before[1]
        interruption.raise_if_happened()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_without_its_context_it_handles_no_signals() -> None:
    with Interruption().deferred(), pytest.raises(KeyboardInterrupt):
        press()
