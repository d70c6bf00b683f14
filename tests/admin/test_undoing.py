"""An operation that an error ends in the middle ends its own pause first, or says that the group stays paused (M9)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import pytest

import marshal_py
from marshal_py.admin.group import Group
from marshal_py.admin.plans.operation import Author, Progress
from marshal_py.errors import AccessDenied, AdminBusy, AdminFailed, LogGap, MarshalError, MessageTooLarge
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

RELEASE_GROUP, SET_POSITION, GROUP_CONFIG = 8, 9, 11  # PROTOCOL.md 4.2
TOO_LARGE: Final = MessageTooLarge("a coordination record", 900, "the test says so")
GAP: Final = LogGap(0, 10, 12)
DENIED: Final = AccessDenied("User:alice", "Write", "topic", "__marshal")


class Failing(MemoryTransport):
    """A transport whose logs take no record of type `kind`: the error is raised, or is the answer of `refused` from
    then on. `all`: from then on they take none at all. `after`: not before one of this type."""

    def __init__(
        self, broker: MemoryBroker, kind: int, error: MarshalError, raised: bool, takes_none: bool, after: int = 0
    ) -> None:
        super().__init__(broker)
        self.kind, self.error, self.raised, self.takes_none, self.after = kind, error, raised, takes_none, after

    def log(self, *arguments: Any, **named: Any) -> Any:
        return FailingLog(super().log(*arguments, **named), self)


class FailingLog:
    def __init__(self, real: Any, how: Failing) -> None:
        self._real, self._how, self._failed, self._begun = real, how, False, not how.after

    def append(self, log: int, key: bytes, value: bytes) -> bool:
        kind = value[13 + value[11]]
        refused = self._begun and kind == self._how.kind
        self._begun = self._begun or kind == self._how.after
        self._failed = self._failed or refused
        if refused and self._how.raised:
            raise self._how.error
        return refused or (self._failed and self._how.takes_none) or bool(self._real.append(log, key, value))

    def poll(self, timeout_s: float) -> Any:
        if self._failed and isinstance(self._how.error, LogGap):
            raise self._how.error
        return self._real.poll(timeout_s)

    def refused(self) -> MarshalError | None:
        return self._how.error if self._failed and not self._how.raised else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.create_topic("orders", 2)
    with marshal_py.connect(MemoryTransport(made)) as marshal, marshal.consumer("billing", ["orders"]):
        pass
    return made


def front(transport: MemoryTransport, run: bytes = b"1234") -> Group:
    return Group(transport, "billing", "__marshal", author=Author.of("alice", "desk", "test", run))


def moves(group: Group) -> object:
    return group.set_position("orders", 0)


def changes(group: Group) -> object:
    return group.set_config(delivery="at_most_once")


@pytest.mark.parametrize("raised", [True, False])
@pytest.mark.parametrize(("kind", "call"), [(SET_POSITION, moves), (GROUP_CONFIG, changes)])
def test_what_is_too_large_leaves_no_pause(
    broker: MemoryBroker, kind: int, call: Callable[[Group], object], raised: bool
) -> None:
    """By the client's limit, or by the broker's, which it says again and again."""
    with pytest.raises(MarshalError, match="of 900 bytes is too large: the test says so") as caught:
        call(front(Failing(broker, kind, TOO_LARGE, raised, takes_none=False)))
    assert "stays paused" not in str(caught.value)
    assert front(MemoryTransport(broker)).info().pause is None


@pytest.mark.parametrize("error", [GAP, DENIED])
@pytest.mark.parametrize(("kind", "call"), [(SET_POSITION, moves), (GROUP_CONFIG, changes)])
def test_a_pause_that_cannot_be_ended_is_in_the_error(
    broker: MemoryBroker, kind: int, call: Callable[[Group], object], error: MarshalError
) -> None:
    with pytest.raises(AdminFailed) as caught:
        call(front(Failing(broker, kind, error, False, takes_none=True)))
    pause = front(MemoryTransport(broker)).info().pause
    assert pause is not None
    text = str(caught.value)
    assert str(error) in text
    assert "group 'billing' stays paused until 20" in text
    assert "marshal resume billing ends it" in text
    until = text.partition("stays paused until ")[2].partition(",")[0]
    assert datetime.fromisoformat(until).tzinfo is not None
    assert front(MemoryTransport(broker), b"4321").resume(), "as the error says: by the same person"


def test_a_change_that_was_made_is_in_the_error_of_a_pause_that_cannot_be_ended(broker: MemoryBroker) -> None:
    with pytest.raises(AdminFailed, match="stays paused") as caught:
        changes(front(Failing(broker, RELEASE_GROUP, DENIED, False, takes_none=True, after=GROUP_CONFIG)))
    assert str(caught.value).startswith("the change of the settings was made; ")
    assert front(MemoryTransport(broker)).info().delivery == "at_most_once"


def test_a_watcher_that_raises_leaves_no_pause(broker: MemoryBroker) -> None:
    """As a pipe does that nobody reads any more, or a program's own function."""

    def watch(event: Progress) -> None:
        raise BrokenPipeError(event.kind)

    with pytest.raises(BrokenPipeError, match="paused"):
        front(MemoryTransport(broker)).pause(60, keep=True, watcher=watch)
    assert front(MemoryTransport(broker)).info().pause is None


@pytest.mark.parametrize("own", [True, False])
def test_a_deletion_names_no_option_that_it_lacks(broker: MemoryBroker, own: bool) -> None:
    """M15: it is made in a pause of its own alone, so it can be given none."""
    paused = Group(MemoryTransport(broker), "billing", "__marshal", author=Author.of("alice", "desk", "a", b"1"))
    token = paused.pause(60).token
    user = "alice" if own else "bob"
    other = Group(MemoryTransport(broker), "billing", "__marshal", author=Author.of(user, "desk", "a", b"2"))
    with pytest.raises(AdminBusy) as caught:
        other.delete(force=True)
    which = "" if own else f" --token {token}"
    assert f"left; nothing was changed: wait, or end it (marshal resume billing{which}); " in str(caught.value)
    assert other.resume(token=None if own else token)
    assert other.delete(force=True)
