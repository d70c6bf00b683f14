"""`marshal explain`: what happened to a partition or a group, from the log itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from msgspec import Struct, structs

from marshal_py.cli import changes, output
from marshal_py.cli.documents import Time, prints, time_of, with_fields
from marshal_py.cli.options import ReadOptions, ReadTableOptions, command, require_group
from marshal_py.cli.watching import Every, show
from marshal_py.client.values.position_text import EARLIEST, OFFSET, moment_of, parse
from marshal_py.errors import GroupDeleted, InvalidOption
from marshal_py.history import explain as history
from marshal_py.history.explain import LINES_MAX, Cut, Difference, Explanation, Line, PartitionStanding, load_state
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import records as parking
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.transport.option_names import suggestion
from marshal_py.transport.ports import LogRecord

EXAMPLE: Final = output.example("marshal explain billing orders:0 --json")
EPOCH_S: Final = 10**8  # from 1973 on a number is taken for seconds, and 1,000 times that for ms
LAST_HOUR: Final = "-1h"  # of what changed in a group, if nobody says since when


class RecordLine(Struct, frozen=True):
    """A record, and what the fold said of it. `type`, `fields`: as PROTOCOL.md names them. `text`: the record in
    words."""

    offset: int
    group: str
    type: str | None
    fields: dict[str, Any]
    verdict: str
    reason: str
    time: Time | None
    text: str


Explained: Final = with_fields(
    "Explained",
    PartitionStanding,
    group=str,
    topic=str,
    partition=int,
    at_offset=int,
    at=Time | None,
    paused=bool,
    deleted=bool,
    unserved=str | None,
    records=list[RecordLine],
    left_out=int,
    began_at=int,
    notices=list[str],
)


# `left_out`: how many records are older than those of `notable`.
GroupChange: Final = with_fields("GroupChange", Difference, notable=list[RecordLine], notices=list[str], left_out=int)


class Divergence(Struct, frozen=True):
    """How a state that was kept differs from the log's."""

    group: str
    at_offset: int
    first_difference: int
    client_id: str
    reason: str
    left_out: int
    differences: list[history.Differing]


@command
@prints(Explained, GroupChange, Divergence)
def explain(
    options: ReadTableOptions,
    group: changes.GroupName,
    partition: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC:PARTITION", help="Which partition; without it: what changed in the group in the last hour."
        ),
    ] = None,
    at: Annotated[str | None, typer.Option("--at", metavar="TIME|OFFSET", help="As of then; now if left out.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME|OFFSET",
            help="What happened from then on, or `earliest`. Of a partition without it, what led to the state.",
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="At most this many records.")] = LINES_MAX,
    watch: Every = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Instead: compare the state that a consumer kept when it ended with Diverged with the log.",
        ),
    ] = None,
) -> None:
    """Show who owns a partition, its position, and the records that led to this; or what changed in a group.

    A time is ISO-8601, UTC if it names no zone; an offset is one of the group's log. Of a long log it reads what
    follows the newest snapshot, and before that the records alone that the present state comes from, and says where it
    began. --since looks further back. Of the present it says what is wrong with the group, as `marshal state` does.
    With -o csv, and wide, it prints the records.
    """
    if state is not None:
        if partition is not None or at is not None or since is not None:
            raise typer.BadParameter("--state compares at the offset that the file names: it goes alone")
        kept = load_state(state, group)
        with _reader(group, options) as reader:
            _against_log(kept, *reader.history(kept["at_offset"]), options.as_json)
        return
    show(options, watch, lambda: _show(options, group, partition, at, since, count))


def _show(
    options: ReadTableOptions, group: str, partition: str | None, at: str | None, since: str | None, count: int
) -> None:
    cut = Cut() if at is None else _cut(at, options.now_ms)
    if cut.time_ms is not None and cut.time_ms > (now_ms := options.now_ms()):
        output.say(f"--at {at} lies after {time_of(now_ms)}: this is as of then")
        cut = Cut()
    if partition is None and since is None:
        if at is not None:
            raise typer.BadParameter("name TOPIC:PARTITION; or --since, for what changed in the group up to --at")
        since = LAST_HOUR
    begin = cut if since is None else Cut(0) if since == EARLIEST else _cut(since, options.now_ms)
    if partition is not None:
        _explain(options, group, partition, cut, begin, count)
    else:
        _diff(options, group, begin, cut, count)


def sentences(options: ReadOptions, group: str, tp: TopicPartition, at_ms: int | None) -> list[str]:
    """Returns what `marshal explain GROUP TOPIC:PARTITION` prints, as of a time (since 1970) or of now. Raises
    MarshalError."""
    cut = Cut(time_ms=at_ms)
    found, began_at, way_back = _find(options, group, tp, cut, cut, LINES_MAX)
    return list(_sentences(group, found, began_at, way_back))


def _find(
    options: ReadOptions, group: str, tp: TopicPartition, cut: Cut, begin: Cut, count: int
) -> tuple[Explanation, int, str]:
    """Returns what is found of a partition, from where on the log was read for it, and how to look further back."""
    with _reader(group, options) as reader:
        found = reader.explain(tp, cut, count, reader.offset_of(begin))
        way_back = reader.way_back() if reader.began_at else ""
        begin_ms = reader.begin_ms() if cut.time_ms is not None and found.at_offset == NONE else None
    if begin_ms is not None:
        raise output.CommandFailed(f"--at lies before the log of {group!r}, which begins at {time_of(begin_ms)}")
    if not found.known and found.deleted:
        raise output.CommandFailed(f"{GroupDeleted(group)}; as it was before: --at {max(found.causes) - 1}")
    if not found.known:
        topics = _known(group, options)
        near = (
            f" ({topics[tp.topic]} partitions of {tp.topic!r})" if tp.topic in topics else suggestion(tp.topic, topics)
        )
        raise output.CommandFailed(f"group {group!r} has no partition {tp} up to there{near}")
    _check_end(cut, begin, found.at_offset)
    return found, reader.began_at, way_back


def _explain(options: ReadTableOptions, group: str, partition: str, cut: Cut, begin: Cut, count: int) -> None:
    topic, colon, number = partition.rpartition(":")
    if not colon or not number.isdecimal():
        raise typer.BadParameter(f"{partition!r} is not TOPIC:PARTITION")
    tp = TopicPartition(topic, int(number))
    found, began_at, way_back = _find(options, group, tp, cut, begin, count)
    notices = _notices(options, group, cut)
    if not options.for_people:
        lines = [_line(line) for line in found.lines]
        options.show(
            {
                "group": group,
                "topic": topic,
                "partition": int(number),
                "at_offset": found.at_offset,
                "at": time_of(found.at_ms),
                **structs.asdict(found.standing),
                "paused": found.paused,
                "deleted": found.deleted,
                "unserved": found.unserved or None,
                "records": lines,
                "left_out": found.left_out,
                "began_at": began_at,
                "notices": notices,
            },
            lines,
            RecordLine.__struct_fields__,
        )
        return
    for line in (*_sentences(group, found, began_at, way_back), *(f"! {notice}" for notice in notices)):
        print(line)


def _notices(options: ReadOptions, group: str, cut: Cut) -> list[str]:
    """Returns what is wrong with the group, if the question is about the present of a cluster."""
    if cut != Cut() or options.dump is not None:
        return []
    with options.watch(group, "states") as watch:
        return list(watch.states()[0].notices)


def _sentences(group: str, found: Explanation, began_at: int, way_back: str) -> Iterator[str]:
    """Yields what was found of a partition."""
    now, partition = found.standing, f"{found.tp.topic}:{found.tp.partition}"
    owner = f"owned by {now.owner} (session {now.session})" if now.owner is not None else "owned by nobody"
    position = f"position {now.position}" if now.position is not None else "without a position"
    parked = f", parked: {parking.parked_text(group, found.tp, now.parked)}" if now.parked else ""
    unserved = f", {found.unserved}" if found.unserved else ""
    paused = ", the group is paused" if found.paused else ", the group is deleted" if found.deleted else ""
    when = f"at offset {found.at_offset}, {time_of(found.at_ms)}"
    yield f"{partition} of group {group!r} {when}: {owner}, {position}{paused}{parked}{unserved}"
    if found.left_out:
        yield f"({found.left_out} older records left out)"
    if way_back:
        yield f"(read from offset {began_at} of the log on; {way_back})"
    yield from map(_text, found.lines)


def _diff(options: ReadTableOptions, group: str, earlier: Cut, later: Cut, count: int) -> None:
    with _reader(group, options) as reader:
        world, records = reader.reaching(earlier, reader.offset_of(earlier))
        try:
            found = history.diff(world, records, group, earlier, later)
        except InvalidOption as error:
            raise typer.BadParameter("--at lies before --since") from error
    if not found.records:
        _known(group, options)  # else nothing happened between them
    _check_end(later, earlier, found.to_offset)
    notices, left_out = _notices(options, group, later), max(0, len(found.notable) - count)
    if not options.for_people:
        notable = [_line(line) for line in found.notable[left_out:]]
        options.show(
            {**structs.asdict(found), "notable": notable, "notices": notices, "left_out": left_out},
            notable,
            RecordLine.__struct_fields__,
        )
        return
    start = "the beginning" if found.from_offset == NONE else f"offset {found.from_offset}"
    print(f"group {group!r} from {start} to offset {found.to_offset}")
    for one in found.joined:
        print(f"+ {one.client_id} joined (session {one.session})")
    for one in found.ended:
        print(f"- {one.client_id} ended (session {one.session})")
    for key, change in found.settings.items():
        print(f"{key.replace('_', ' ')}: {_in_words(change['from'])} -> {_in_words(change['to'])}")
    for each in found.partitions:
        print(f"{each.topic}:{each.partition}: {_place(each.from_)} -> {_place(each.to)}")
    if left_out:
        print(f"({left_out} older records left out)")
    for line in found.notable[left_out:]:
        print(_text(line))
    for kind, number in found.records.items():
        print(f"{number} x {kind}")
    for notice in notices:
        print(f"! {notice}")


def _place(standing: PartitionStanding) -> str:
    return f"{standing.owner or 'nobody'} at {'none' if standing.position is None else standing.position}"


def _in_words(value: Any) -> str:
    """Returns the value of a setting, or those of all topics."""
    if isinstance(value, dict):
        value = ", ".join(f"{topic} {each or 'unknown'}" for topic, each in value.items())
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value or "none")


def _against_log(kept: dict[str, Any], world: World, records: Iterator[LogRecord], as_json: bool) -> None:
    """Prints how the state that a diverged client saved differs from what the log folds to at the same offset."""
    group, at_offset, found = kept["group"], kept["at_offset"], history.compare_with_log(kept, world, records)
    if found is None:
        raise output.CommandFailed(
            f"the state is of offset {at_offset} of log {kept['log']}, incarnation "
            f"{kept['incarnation']}; this history does not reach there"
        )
    if as_json:
        told = {name: kept[name] for name in ("at_offset", "first_difference", "client_id", "reason", "left_out")}
        output.print_json(Divergence(group=group, differences=list(found), **told))
        return
    print(
        f"{kept['client_id']} in group {group!r} after offset {at_offset}, first different at offset "
        f"{kept['first_difference']}: {kept['reason']}"
    )
    for each in found:
        print(f"{each.entry}, {each.field}: {each.held} held, {each.log} by the log")
    if kept["left_out"]:
        print(f"({kept['left_out']} sessions and partitions were left out of the file)")
    if not found:
        print("the same in all entries: the states had differed before, or only in the bytes that led to them")


class _Reader:
    """Reads the log of one group from where a question needs it."""

    def __init__(self, observer: Observer, group: str) -> None:
        self.group = group
        self.began_at = 0  # offset at which the last reading began
        self._observer = observer
        (self._log,) = observer.logs_of(group)

    def way_back(self) -> str:
        """Returns how one can look further back than `began_at`."""
        oldest = self._observer.oldest(self._log).next_offset
        return "--since looks further back" if oldest < self.began_at else "what was before was deleted"

    def offset_of(self, cut: Cut) -> int:
        """Returns the offset at which, or below which, a reader must begin that wants to see the log at the cut."""
        if cut.offset is not None:
            return cut.offset
        if cut.time_ms is not None:
            return self._observer.first_since([self._log], cut.time_ms)[self._log]
        return self._observer.bounds([self._log])[self._log].end

    def begin_ms(self) -> int | None:
        """Returns when the oldest record was written, in ms since 1970; None without one."""
        bounds = self._observer.bounds([self._log])[self._log]
        found = self._observer.times_of(self._log, [bounds.first] if bounds.first < bounds.end else [])
        return found.get(bounds.first)

    def history(self, at: int) -> tuple[World, Iterator[LogRecord]]:
        """Returns the world at or below the offset `at`, and the records after it."""
        world, records = self._observer.history(self._log, at)
        self.began_at = world.next_offset
        return world, records

    def reaching(self, cut: Cut, at: int) -> tuple[World, Iterator[LogRecord]]:
        """Returns the same. Raises CommandFailed if all records up to the cut were deleted from the log."""
        world, records = self.history(at)
        first = next(records, None)
        if world.began_at and first is not None and cut.excludes(first):
            raise output.CommandFailed(
                f"the history before offset {world.began_at} of log {world.log} was deleted, and "
                f"what is left begins at {time_of(first.timestamp_ms)}: a snapshot tells the state "
                f"there, not how it came about; a dump from before may have it (--dump)"
            )
        return world, records if first is None else chain([first], records)

    def explain(self, tp: TopicPartition, cut: Cut, count: int, at: int) -> Explanation:
        """Returns the answer, with the causes of the present state that lie before what is read for it."""
        world, records = self.reaching(cut, at)
        found = history.explain(world, records, self.group, tp, cut, count)
        earlier = self._observer.records_of(world, [offset for offset in found.causes if offset < self.began_at])
        return history.with_causes(found, [(one.offset, one.timestamp_ms, record) for one, record in earlier], count)


@contextmanager
def _reader(group: str, options: ReadOptions) -> Iterator[_Reader]:
    with options.observer() as observer:
        if observer.root is None:
            raise output.CommandFailed(f"no consumer has ever run with {options.coordination_topic}")
        yield _Reader(observer, group)


def _known(group: str, options: ReadOptions) -> dict[str, int]:
    """Returns the partition count of each topic of the group, from its whole log. Raises CommandFailed if there is no
    such group."""
    with options.observer() as observer:
        observer.fold(group)
        require_group(observer, group)
        (state,) = (found for _, found in observer.groups() if found.name == group)
        return {name: known.count for name, known in state.topics.items()}


def _cut(text: str, now_ms: Callable[[], int]) -> Cut:
    with suppress(InvalidOption):
        found = parse(text).rest
        if found is not None and found.kind == OFFSET:
            return Cut(offset=found.number)
    with suppress(ValueError):
        return Cut(time_ms=moment_of(text, now_ms()))
    raise typer.BadParameter(f"{text!r} is no ISO-8601 time, no time like 14:05 or -5m, and no offset")


def _check_end(cut: Cut, begin: Cut, newest: int) -> None:
    """Raises CommandFailed for an offset beyond the newest record of the log: nobody knows what is as of then. One that
    is as large as a time since 1970 is taken for an offset all the same, and the error has the time as text."""
    for option, given in ("--at", cut.offset), ("--since", begin.offset if cut == Cut() else None):
        if given is not None and given > newest:
            text = f"{option} {given} lies beyond the group's log, whose newest record is at {newest}"
            if EPOCH_S <= given < 1_000_000 * EPOCH_S:
                ms = given if given >= 1_000 * EPOCH_S else given * 1_000
                text += f"; a number is an offset, and the time would be {time_of(ms, 'seconds')}"
            raise output.CommandFailed(text)


def _line(line: Line) -> RecordLine:
    return RecordLine(**line.verdict, time=time_of(line.time_ms), text=line.text)


def _text(line: Line) -> str:
    mark = " " if line.verdict["verdict"] == "accepted" else "x"
    return f"{time_of(line.time_ms)}  {line.offset:<6} {mark} {line.verdict['type'] or '?'}  {line.text}"
