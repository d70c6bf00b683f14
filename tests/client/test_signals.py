"""stop_on_signals: it stops consumers, calls the former handlers, and puts them back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from marshal_py import Consumer, stop_on_signals
from marshal_py.client.signals import SignalHandlers
from marshal_py.errors import InvalidOption
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster, joined

SIGNALS = (signal.SIGUSR1, signal.SIGINT)


@pytest.fixture
def consumer(memory: MemoryTestCluster) -> Iterator[Consumer]:
    with memory.connect() as marshal, joined(marshal, memory.group(), [memory.topic()]) as one:
        yield one


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[int]]:
    """A program that handles SIGUSR1 and leaves the other signals to Python."""
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGUSR2)}
    signal.signal(signal.SIGUSR1, lambda number, frame: noted.append(number))
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield noted
    for number, handler in before.items():
        signal.signal(number, handler)


def now() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


def asked(consumer: Consumer) -> bool:
    return consumer._ending._stop_at is not None


def test_the_former_handlers_are_put_back(consumer: Consumer) -> None:
    before = now()
    with stop_on_signals(consumer, signals=SIGNALS):
        assert not set(now()) & set(before)
    assert now() == before
    plain = stop_on_signals(consumer, signals=SIGNALS)
    plain.restore()
    plain.restore()
    assert now() == before


def test_the_handler_of_the_program_is_called_too(consumer: Consumer, handlers: list[int]) -> None:
    """Without it uvicorn, whose handlers these are, did not stop."""
    with stop_on_signals(consumer, signals=SIGNALS):
        signal.raise_signal(signal.SIGUSR1)
        assert (handlers, asked(consumer)) == ([signal.SIGUSR1], True)
        assert [*consumer] == []
        signal.raise_signal(signal.SIGUSR1)
        assert handlers == [signal.SIGUSR1] * 2
    signal.raise_signal(signal.SIGUSR1)
    assert handlers == [signal.SIGUSR1] * 3


def test_the_second_signal_does_what_it_did_before(consumer: Consumer) -> None:
    with stop_on_signals(consumer, signals=(signal.SIGINT, signal.SIGUSR2)):
        signal.raise_signal(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL, "it would end the process, also inside C"
        signal.raise_signal(signal.SIGINT)
        assert asked(consumer)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_inside_another(consumer: Consumer, memory: MemoryTestCluster) -> None:
    """Each asks its own consumers; the outer one decides what the second signal does."""
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [memory.topic()]) as other,
        stop_on_signals(other, signals=SIGNALS),
        stop_on_signals(consumer, signals=SIGNALS),
    ):
        signal.raise_signal(signal.SIGINT)
        assert asked(consumer)
        assert asked(other)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_handler_that_came_later_stays(consumer: Consumer, handlers: list[int]) -> None:
    """It may call this handler, which then calls the program's."""
    ours: list[Callable[[int, FrameType | None], object]] = []
    with stop_on_signals(consumer, signals=SIGNALS):
        for number in SIGNALS:
            former = signal.signal(number, lambda number, frame: ours[-1](number, frame))
            assert callable(former)
            ours.append(former)
        later = now()
    assert now() == later
    signal.raise_signal(signal.SIGUSR1)
    assert (handlers, asked(consumer)) == ([signal.SIGUSR1], False)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_handlers_step_aside_once_the_consumers_have_stopped(consumer: Consumer, handlers: list[int]) -> None:
    """After a plain call: the first ctrl-C of the rest of the program was lost."""
    stop_on_signals(consumer, signals=SIGNALS)
    consumer.stop()
    signal.raise_signal(signal.SIGUSR1)
    assert handlers == [signal.SIGUSR1]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_ended_by_the_first_signal(consumer: Consumer) -> None:
    """It has none of the consumers: Process.terminate() had no effect on it."""
    with stop_on_signals(consumer, signals=(signal.SIGUSR2,)):
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR2)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR2
    assert not asked(consumer)


@pytest.mark.parametrize("wrong", [0, 1_000, 10**30, signal.SIGKILL, "SIGTERM", 15.0, None, [15]], ids=str)
def test_what_cannot_be_handled_is_refused_and_nothing_changes(consumer: Consumer, wrong: object) -> None:
    before = now()
    with pytest.raises(InvalidOption, match="signals"):
        stop_on_signals(consumer, signals=(*SIGNALS, wrong))  # type: ignore[arg-type]
    assert now() == before


@pytest.mark.parametrize("wrong", [signal.SIGTERM, "SIGTERM", None], ids=str)
def test_signals_are_a_list(consumer: Consumer, wrong: object) -> None:
    with pytest.raises(InvalidOption, match=f"signals={wrong!r} is not allowed: numbers of signals, .* in a list"):
        stop_on_signals(consumer, signals=wrong)  # type: ignore[arg-type]


def test_a_signal_that_is_named_twice(consumer: Consumer, handlers: list[int]) -> None:
    before = now()
    with stop_on_signals(consumer, signals=(*SIGNALS, *SIGNALS)):
        signal.raise_signal(signal.SIGUSR1)
        assert (handlers, asked(consumer)) == ([signal.SIGUSR1], True)
    assert now() == before


def test_handlers_are_installed_and_put_back_on_the_main_thread_only(consumer: Consumer) -> None:
    errors: list[InvalidOption] = []

    def elsewhere(call: Callable[[], object]) -> None:
        def run() -> None:
            try:
                call()
            except InvalidOption as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(DEADLINE_S)

    before = now()
    elsewhere(lambda: stop_on_signals(consumer, signals=SIGNALS))
    assert now() == before
    with stop_on_signals(consumer, signals=SIGNALS) as installed:
        assert isinstance(installed, SignalHandlers)
        elsewhere(installed.restore)
        assert now() != before
    assert [error.option for error in errors] == ["stop_on_signals"] * 2
    assert now() == before


@pytest.mark.parametrize("given", [(), (1,), ("process",)])
def test_only_consumers_are_stopped(consumer: Consumer, given: tuple[object, ...]) -> None:
    """A process has no end of its own that a signal could begin; it is refused here, and not when the signal comes."""
    with consumer.process(lambda message: None) as work:
        wrong = [work if one == "process" else one for one in given]
        with pytest.raises(InvalidOption, match="one consumer or more"):
            stop_on_signals(*wrong)  # type: ignore[arg-type]


def test_ctrl_c_in_asyncio_run_ends_what_consumers_receive_and_cancels_nothing(consumer: Consumer) -> None:
    """`asyncio.run` has Python's handler for ctrl-C, which cancels the main task."""

    async def main() -> str:
        with stop_on_signals(consumer):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            return "as usual"

    assert asyncio.run(main()) == "as usual"
    assert asked(consumer)

    async def again() -> None:
        with stop_on_signals(consumer):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(DEADLINE_S)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(again())
