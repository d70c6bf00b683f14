"""Reads the letters of a dead-letter topic, and puts their messages back where they came from, each one once.

A copy goes to the topic and the partition of the message, so that it comes behind later ones of its key in the same
lane. In the same transaction a marker goes to the dead-letter topic: a record without content whose header
`__dlq.redriven` names the message and the group that gave it up. A letter that is not newer than such a marker was put
back. A newer one is about another failure: the group was moved back to the message, or its topic was created again.
Two runs at once cannot miss each other's markers: a run reads the topic only after its producer has fenced those before
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Final, NamedTuple

from marshal_py.client.messages.answers import HEADERS
from marshal_py.errors import BadRequest, InvalidOption, MessageNotFound
from marshal_py.topics.request import GetRequest, StoredMessage
from marshal_py.topics.topic import Topic
from marshal_py.transport.ports import Transport
from marshal_py.transport.producer import TransactionalWriter

REDRIVEN: Final = "__dlq.redriven"
AT_ONCE: Final = 500  # letters of one transaction, which ends in time whatever their size
READ_AT_ONCE: Final = 1_000
LETTERS_MAX: Final = 100_000  # that are held at once; another run takes those behind them, once these are put back

Select = Callable[["Letter"], bool]


class Letter(NamedTuple):
    """A dead letter. `group` gave the message at `topic`, `partition`, `offset` up after so many `deliveries`.

    `at`: the letter itself. `left_out`: what it lacks of the message, because the dead-letter topic refused its size.
    """

    at: StoredMessage
    group: str
    topic: str
    partition: int
    offset: int
    deliveries: int
    error: str
    left_out: str
    redriven: bool = False

    @property
    def message(self) -> str:
        """Names the message and the group for good, as the header REDRIVEN does."""
        return f"{self.topic}/{self.partition}/{self.offset} {self.group}"


class Found(NamedTuple):
    """Letters, by message. `before`: how many of those that were read were put back. `more`: there are others behind
    the LETTERS_MAX that are held at once."""

    letters: Sequence[Letter]
    before: int
    more: bool


class Redriven(NamedTuple):
    """Says what became of letters: put back, or without content whose message is gone from its topic, too. `before`,
    `more`: as in Found."""

    put_back: Sequence[Letter]
    lost: Sequence[Letter]
    before: int
    more: bool


Markers = dict[str, list[StoredMessage]]  # by message: what says that it was put back, by partition the last


def read(transport: Transport, name: str, select: Select = lambda letter: True, left: bool = False) -> Found:
    """Returns the letters that `select` takes, LETTERS_MAX at most; of several about one message and group the newest.
    `left`: only those that were not put back.

    Of other records of the topic nothing is returned. Raises TopicMissing, ClusterUnreachable, AccessDenied.
    """
    markers: Markers = {}
    with closing(Topic(transport, name)) as topic:
        found, more = _read(topic, select, markers)
        letters = [letter._replace(redriven=_is_redriven(letter, markers)) for letter in found]
        before = sum(letter.redriven for letter in letters)
        if left and more:  # those that were put back must not take the places of the others
            letters, more = _read(topic, lambda letter: select(letter) and not _is_redriven(letter, markers), {})
    wanted = (letter for letter in letters if not (left and letter.redriven))
    return Found(sorted(wanted, key=lambda letter: (letter.topic, letter.partition, letter.offset)), before, more)


def _read(topic: Topic, select: Select, markers: Markers) -> tuple[list[Letter], bool]:
    """Returns letters, and whether there are more; adds to `markers`."""
    letters: dict[str, Letter] = {}
    more = False
    for page in topic.pages(GetRequest(batch=READ_AT_ONCE)):
        for stored in page:
            letter, headers = _letter(stored), dict(stored.headers)
            if letter is None and REDRIVEN in headers:
                message = (headers[REDRIVEN] or b"").decode(errors="replace")
                others = [one for one in markers.get(message, ()) if one.partition != stored.partition]
                markers[message] = [*others, stored]
            elif letter is not None and select(letter):
                known = letters.get(letter.message)
                if known is None and len(letters) == LETTERS_MAX:
                    more = True
                elif known is None or _is_after(stored, known.at):
                    letters[letter.message] = letter
    return [*letters.values()], more


def _is_redriven(letter: Letter, markers: Markers) -> bool:
    return any(_is_after(marker, letter.at) for marker in markers.get(letter.message, ()))


def _is_after(one: StoredMessage, other: StoredMessage) -> bool:
    """Returns whether a record of the dead-letter topic was written after another: within a partition as the offsets
    say, because clocks differ. Without a key, letters of one message may be in several partitions."""
    if one.partition == other.partition:
        return one.offset > other.offset
    return one.timestamp >= other.timestamp


def redrive(transport: Transport, name: str, select: Select) -> Redriven:
    """Puts the messages of the letters that `select` takes back, except those that were put back before.

    Each transaction has at most AT_ONCE of them; what ends the call keeps those that are committed. Raises what `read`
    and the transaction raise; InvalidOption for letters of several groups, or of the dead-letter topic itself.
    """
    put_back: list[Letter] = []
    lost: list[Letter] = []
    with closing(TransactionalWriter(transport, f"marshal-redrive-{name}")) as writer:
        letters, before, more = read(transport, name, select, left=True)
        check(letters, name)
        for at in range(0, len(letters), AT_ONCE):
            there = [*_with_content(transport, letters[at : at + AT_ONCE])]
            with writer.transaction():
                for letter, content in there:
                    if content is None:
                        lost.append(letter)
                        continue
                    ours = (REDRIVEN, letter.message.encode())
                    kept = [one for one in content.headers if not one[0].startswith(HEADERS) and one[0] != REDRIVEN]
                    writer.write(letter.topic, content.value, content.key, [*kept, ours], letter.partition)
                    writer.write(name, None, None, [ours], letter.at.partition)
            put_back += (letter for letter, content in there if content is not None)
    return Redriven(put_back, lost, before, more)


def check(letters: Iterable[Letter], name: str) -> None:
    """Raises InvalidOption unless these letters of the dead-letter topic `name` can be put back together."""
    groups = sorted({letter.group for letter in letters})
    if len(groups) > 1:
        rule = "letters of one group: a copy reaches every group that consumes the topic"
        raise InvalidOption("group", ", ".join(groups), rule)
    if any(letter.topic == name for letter in letters):
        raise InvalidOption("topic", name, "another one than that of the messages")


def _with_content(transport: Transport, letters: Iterable[Letter]) -> Iterator[tuple[Letter, StoredMessage | None]]:
    """Yields each letter with what has its content: itself, or the message in its topic; None if that is gone, or the
    topic was created again, where the offset names another message."""
    for letter in letters:
        content: StoredMessage | None = letter.at
        if letter.left_out:
            with closing(Topic(transport, letter.topic)) as topic:
                try:
                    topic_id = (dict(letter.at.headers).get(f"{HEADERS}topic.id") or b"").decode(errors="replace")
                    place = GetRequest(offset=letter.offset, partition=letter.partition, topic_id=topic_id)
                    content = topic.find(place)
                except (MessageNotFound, BadRequest):
                    content = None
        yield letter, content


def _letter(stored: StoredMessage) -> Letter | None:
    """Returns what a record of the dead-letter topic says; None if it is no letter."""
    own = {
        name[len(HEADERS) :]: (value or b"").decode(errors="replace")
        for name, value in stored.headers
        if name.startswith(HEADERS)
    }
    try:
        return Letter(
            stored,
            own.get("group", ""),
            own["topic"],
            int(own["partition"]),
            int(own["offset"]),
            int(own.get("delivery.count", 0)),
            own.get("message", ""),
            own.get("left.out", ""),
        )
    except (KeyError, ValueError):
        return None
