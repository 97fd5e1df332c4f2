"""An interrupt waits until it may be raised, and does not wait twice."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsjax.engine.interrupts import deferred_interrupts


@pytest.mark.usefixtures("interrupts_are_raised")
@pytest.mark.parametrize("asked", [True, False])
def test_one_interrupt_is_raised_where_it_is_asked_for_or_at_the_end(asked):
    came = []

    def interrupted():
        with deferred_interrupts() as raise_interrupt:
            signal.raise_signal(signal.SIGINT)
            came.append("waits")
            if asked:
                raise_interrupt()
            came.append("the end")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert came == (["waits"] if asked else ["waits", "the end"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupts_are_raised")
def test_an_interrupt_is_raised_though_the_block_raises():
    def interrupted():
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("a step has failed")

    with pytest.raises(KeyboardInterrupt) as raised:
        interrupted()
    assert isinstance(raised.value.__context__, ValueError)


def test_in_another_thread_there_is_nothing_to_keep():
    def handler_inside():
        with deferred_interrupts() as raise_interrupt:
            raise_interrupt()
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(handler_inside).result() is signal.getsignal(signal.SIGINT)
