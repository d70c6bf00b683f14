"""The oracle's own reading of snapshots (PROTOCOL.md N1 to N5): joins chunks, judges the state's bytes.

Written from PROTOCOL.md alone, like the rest of the oracle: it may import the standard library and the oracle's own
decoder and state, and nothing else of marshal_py.
"""

from typing import Any, NamedTuple

from marshal_sim.oracle.state import Group, Partition, Session, Topic, group_digest, packed, text_hash, word_hash
from marshal_sim.oracle.wire import HASH_NAME, PROTOCOL_VERSION, Record, decode_messagepack, decode_record

FORMAT, KEYED_FORMAT = 3, 4
FOLD_VERSION = 4

Name = tuple[bytes, int, int, int, int]  # instance, N, number of chunks, state digest, chain digest


class LogState(NamedTuple):
    """The state of one log at the checkpoint `at`."""

    incarnation: bytes
    partitions: int
    at: int
    groups: dict[str, Group]


class Snapshots:
    """Collects the snapshots of a log: their chunks by name (N1), and the witnesses that confirm them (N5)."""

    def __init__(self) -> None:
        self.chunks: dict[Name, dict[int, dict[str, Any]]] = {}
        self.witnesses: dict[tuple[int, int, int], set[bytes]] = {}

    def read(self, record: Record, offset: int) -> None:
        """Takes the Snapshot record at `offset`."""
        fields = record.fields
        if fields["at"] > offset:
            return  # N1: no reader can have folded so far when it was written
        if refusal(fields["genesis"]):
            return  # L6: no reader may begin with it
        at, state, chain = fields["at"], fields["state"], fields["chain"]
        if fields["data"] == b"":
            self.witnesses.setdefault((at, state, chain), set()).add(fields["instance"])
        elif fields["chunk"] < fields["chunks"]:
            name = (fields["instance"], at, fields["chunks"], state, chain)
            self.chunks.setdefault(name, {}).setdefault(fields["chunk"], fields)

    def confirmed(self, log: int, first: int = 0) -> list[tuple[LogState, int]]:
        """Returns the sound and confirmed snapshots at or above `first`, the newest first, each with its chain
        digest.
        """
        found = []
        for name, pieces in self.chunks.items():
            _, at, count, state, chain = name
            if len(pieces) == count and at >= first and self.witnesses.get((at, state, chain)):
                read = sound(log, name, pieces)
                if read is not None:
                    found.append((read, chain))
        return sorted(found, key=lambda pair: -pair[0].at)


def refusal(genesis: dict[str, Any]) -> str:
    """Returns the reason why a Genesis is refused, or "" (L6)."""
    if genesis["hash"] != HASH_NAME:
        return "hash"
    return "" if genesis["protocol"] == PROTOCOL_VERSION else "protocol"


def sound(log: int, name: Name, pieces: dict[int, dict[str, Any]]) -> LogState | None:
    """Returns the state that a snapshot holds, or None if readers must pass the snapshot over (N4)."""
    _, at, count, state, _ = name
    genesis = pieces[0]["genesis"]
    data = b"".join(pieces[number]["data"] for number in range(count))
    try:
        value: Any = decode_messagepack(data)
        if written(value) != data or at % 16 != 0:
            return None
        form, fold, number, packed_groups = value
        groups = dict(read_group(each, form == KEYED_FORMAT) for each in array(packed_groups))
        keyed = any(group.keys for group in groups.values())
        if (form, fold, number) != (KEYED_FORMAT if keyed else FORMAT, FOLD_VERSION, log):
            return None
    except (ValueError, TypeError, KeyError):
        return None
    total = sum(word_hash(packed(5, text_hash(title), group_digest(title, group))) for title, group in groups.items())
    ordered = list(groups) == sorted(groups, key=lambda title: title.encode("utf-8"))
    if total % 2**64 != state or not ordered or len(groups) != len(packed_groups):
        return None
    return LogState(genesis["incarnation"], genesis["partitions"], at, groups)


def numbers(*values: Any) -> None:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise ValueError("no integer where one must be")


def read_group(value: Any, has_flag: bool) -> tuple[str, Group]:
    if not has_flag:
        value = (*array(value), 0)
    name, mode, pause_change, pause_ms, config_offset, config, deleted_at, topics, sessions, partitions, keyed = value
    numbers(mode, pause_change, pause_ms, config_offset, deleted_at, keyed)
    group = Group(mode, pause_change, pause_ms, config_offset=config_offset, deleted_at=deleted_at)
    if config_offset != -1:
        group.config, group.config_body = decode_record(11, config, 2 if keyed else 1), config
    elif config != b"":
        raise ValueError("a config without an offset")
    for title, count, first_count, offset, topic_id in array(topics):
        numbers(count, first_count, offset)
        group.topics[text(title)] = Topic(count, first_count, offset, text(topic_id))
    for session, join, extended, mark, ready, idle_ms, sequence in array(sessions):
        numbers(session, extended, mark, *array(ready), idle_ms, sequence)
        fields = decode_record(1, join).fields
        group.sessions[session] = Session(session, fields, join, extended, mark, ready, idle_ms, sequence)
    for title, number, *rest, progress, parked in array(partitions):
        numbers(number, *rest)
        if len(rest) != 11 or not isinstance(progress, bytes) or len(progress) > 512:
            raise ValueError("no partition of the form of N2")
        partition = group.partitions[text(title), number] = Partition(*rest)
        partition.progress, partition.parked = progress, text(parked)
    for given, by in ((topics, group.topics), (sessions, group.sessions), (partitions, group.partitions)):
        if len(given) != len(by):
            raise ValueError("something stands there twice")
    places = [(title.encode("utf-8"), number) for title, number in group.partitions]
    titles = [title.encode("utf-8") for title in group.topics]
    if places != sorted(places) or titles != sorted(titles) or list(group.sessions) != sorted(group.sessions):
        raise ValueError("not in order")
    if keyed != len(group.keys[:1]):
        raise ValueError("no flag for keys, or another one")
    return text(name), group


def array(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise ValueError("no array where one must be")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode("utf-8")) > 255:
        raise ValueError("no text")
    return value


def written(value: object) -> bytes:
    """Encodes a value in the shortest MessagePack forms. It may consist only of arrays, integers, str and bin, as a
    state does.
    """
    if isinstance(value, bool):
        raise ValueError("no boolean stands in a state")
    if isinstance(value, int):
        return written_int(value)
    if isinstance(value, str):
        raw = value.encode("utf-8")
        forms = ((32, lambda n: bytes([0xA0 | n])), (2**8, head(0xD9, 1)), (2**16, head(0xDA, 2)))
        return counted(len(raw), forms) + raw
    if isinstance(value, bytes):
        return counted(len(value), ((2**8, head(0xC4, 1)), (2**16, head(0xC5, 2)), (2**32, head(0xC6, 4)))) + value
    if type(value) is tuple:
        start = counted(len(value), ((16, lambda n: bytes([0x90 | n])), (2**16, head(0xDC, 2)), (2**32, head(0xDD, 4))))
        return start + b"".join(written(each) for each in value)
    raise ValueError("no such value stands in a state")


def head(first: int, size: int) -> Any:
    return lambda number: bytes([first]) + number.to_bytes(size, "big")


def counted(number: int, forms: tuple[tuple[int, Any], ...]) -> bytes:
    """Returns the header for a length of `number`, in the first of these forms that is wide enough."""
    for limit, form in forms:
        if number < limit:
            made: bytes = form(number)
            return made
    raise ValueError("too long")


def written_int(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return bytes([value + 256])
    if value >= 0:
        return counted(
            value,
            tuple((2 ** (8 * size), head(first, size)) for first, size in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))),
        )
    for first, size in ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8)):
        if value >= -(2 ** (8 * size - 1)):
            return bytes([first]) + value.to_bytes(size, "big", signed=True)
    raise ValueError("too small")
