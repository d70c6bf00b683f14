"""Writes messages to the dead-letter topic: those delivered too often, and those that handlers ended by `term`.

A message is done when Kafka has acknowledged its dead letter, and not before; so a crash between the two repeats the
letter and loses none. The letters are written on a thread of their own, which begins with the first one. What the
cluster refuses is tried again until the claim ends, with growing delays. A message that is too large for the
dead-letter topic gets a letter without its content: the source topic has that, and the letter says where. The headers
are those of Kafka's own dead-letter topics (KIP-1191).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from marshal_py.client.connection.context import Context
from marshal_py.client.connection.threads import Ask, Rest, Tasks, TaskSteps
from marshal_py.client.values.reports import Reports
from marshal_py.client.values.requests import payload_bytes
from marshal_py.errors import MarshalError, MessageTooLarge
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.claims.delivery import AtLeastOnce, OffsetRun
from marshal_py.protocol.member.member import Member
from marshal_py.transport.ports import MessageWriter, RawMessage

LETTERS_AT_ONCE: Final = 500  # written between two waits for acknowledgements
WRITE_TIMEOUT_S: Final = 30.0  # for their acknowledgements, then they are written again
RETRY_S: Final = 1.0  # after the first failure; it doubles with each further one
RETRY_S_MAX: Final = 60.0
REASONS_MAX: Final = 100  # remembered, so that each is reported once; texts may name sizes and places
HEADERS: Final = "__dlq.errors."  # headers with this prefix are ours; a letter that failed before has older ones


class Letter(NamedTuple):
    """A message on its way to the dead-letter topic. `deliveries`: by the log. `reason`: why. `refused`: what the topic
    said of its size; then it has no content."""

    claim: Claim
    run: OffsetRun
    at: int
    message: RawMessage
    deliveries: int
    reason: str
    refused: str = ""

    @property
    def needed(self) -> bool:
        """Returns whether it must still be written: the claim is held, and nobody has acked the message meanwhile."""
        return not self.claim.sealed and not self.run.is_finished(self.at)

    @property
    def offset(self) -> int:
        return self.run.offsets[self.at]


class DeadLetters:
    """Writes the dead letters of one consumer."""

    def __init__(
        self, topic: str, member: Member, context: Context, reports: Reports, open_writer: Callable[[], MessageWriter]
    ) -> None:
        """Prepares letters to `topic`. Nothing is opened or started before the first one."""
        self.topic: str = topic
        self.written: int = 0
        self.held_bytes: int = 0  # of the keys and values of the letters that wait
        self._member, self._context, self._reports, self._open_writer = member, context, reports, open_writer
        self._waiting: deque[Letter] = deque()
        self._worker: Tasks | None = None
        self._writer: MessageWriter | None = None
        self._closed = False
        self._failed: set[str] = set()  # why attempts failed since a letter has waited without a break
        self._retry_s = RETRY_S

    @property
    def pending(self) -> bool:
        """Returns whether a letter is on its way. Called with the Marshal's lock held."""
        return any(letter.needed for letter in self._waiting)

    def post(self, letter: Letter) -> None:
        """Has a letter written soon. Called with the Marshal's lock held; waits for nothing."""
        if self._worker is None:
            self._worker = self._context.new_worker(f"marshal-dead-letters-{self._member.name}")
        self._waiting.append(letter)
        self.held_bytes += payload_bytes((letter.message,))
        self._worker.submit(f"group {self._member.name}: dead letters", self._write_all)

    def close(self) -> None:
        """Writes nothing more, and disconnects soon."""
        self._closed = True
        if self._worker is not None:
            self._worker.submit(f"group {self._member.name}: the end of dead letters", self._close_writer)
            self._worker.end()

    # --- on the thread

    def _write_all(self) -> TaskSteps:
        """Writes until no letter waits. After a failure one letter at a time is tried, so that one stops no other."""
        at_once = LETTERS_AT_ONCE
        while not self._closed and (letters := self._next(at_once)):
            try:
                yield Ask(partial(self._write, letters))
            except Exception as error:
                at_once = 1
                self._close_writer()
                if isinstance(error, MessageTooLarge) and self._leave_out(letters, error):
                    continue
                if not isinstance(error, MarshalError):
                    self._context.logger.exception("group %s: a dead letter was not written", self._member.name)
                self._note_failure(str(error) or repr(error), letters[0])
                yield Rest(self._retry_s)
                self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)
            else:
                self._finish(letters)

    def _leave_out(self, letters: Sequence[Letter], error: MessageTooLarge) -> bool:
        """Has a letter that is too large written without content. False if none is left to try. Which one of several it
        is, is not known."""
        letter = letters[0]
        if len(letters) == 1 and not letter.refused:
            with self._context.lock:
                self._waiting[0] = letter._replace(refused=error.reason)  # only this thread takes any away
            return True
        return len(letters) > 1

    def _next(self, at_once: int) -> list[Letter]:
        with self._context.lock:
            needed = [letter for letter in self._waiting if letter.needed]
            self._waiting = deque(needed)
            self.held_bytes = sum([payload_bytes((letter.message,)) for letter in needed])
            if not needed or len(self._failed) >= REASONS_MAX:
                self._failed.clear()
            return needed[:at_once]

    def _write(self, letters: Sequence[Letter]) -> None:
        if self._writer is None:
            self._writer = self._open_writer()
        for letter in letters:
            value, key = (None, None) if letter.refused else (letter.message.value(), letter.message.key())
            self._writer.write(self.topic, value, key, self._headers(letter))
        self._writer.flush(WRITE_TIMEOUT_S)

    def _headers(self, letter: Letter) -> list[tuple[str, bytes | None]]:
        own = {
            "topic": letter.claim.tp.topic,
            "partition": str(letter.claim.tp.partition),
            "offset": str(letter.offset),
            "group": self._member.name,
            "delivery.count": str(letter.deliveries),
            "message": letter.reason,
        }
        kept = [(name, value) for name, value in letter.message.headers() or () if not name.startswith(HEADERS)]
        if letter.refused:
            kept, own["left.out"] = [], f"key, value ({len(letter.message)} bytes) and headers: {letter.refused}"
        return [*kept, *((HEADERS + name, text.encode()) for name, text in own.items())]

    def _finish(self, letters: Sequence[Letter]) -> None:
        """Counts the messages as done, because Kafka has acknowledged their letters."""
        self._retry_s = RETRY_S
        with self._context.outbox, self._context.lock:
            for letter in letters:
                self.written += 1
                if letter.needed:
                    assert isinstance(letter.claim.tracker, AtLeastOnce)
                    letter.claim.tracker.finish_posted(letter.run, letter.at)
                    place = f"in {self.topic}" + ", without its content, which is too large for it" * bool(
                        letter.refused
                    )
                    self._reports.note("dead_letter", letter.claim, letter.offset, f"{place}: {letter.reason}")
            self._member.request_tick()
            self._context.changed.notify_all()

    def _note_failure(self, reason: str, letter: Letter) -> None:
        """Tells the user once for each reason, moves the letter behind the others, and tries again later."""
        with self._context.lock:
            if self._waiting and self._waiting[0] is letter:
                self._waiting.rotate(-1)
            if reason not in self._failed:
                self._failed.add(reason)
                text = f"not written to {self.topic}, tried again: {reason}"
                self._member.advise(
                    "dead_letter_failed", letter.claim.tp, epoch=letter.claim.epoch, offset=letter.offset, text=text
                )
                self._member.request_tick()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
