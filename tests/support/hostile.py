"""Values for a log from a seeded generator: records that fit the world, and hostile bytes of every kind.

`plausible` looks at a world and writes what a member or an admin might write now; most of it is accepted. `hostile`
takes what was written before and what fits now, and breaks it in one of the ways that a topic open to everybody allows.
Neither judges anything. All randomness comes from the `Random` that the caller passes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from marshal_py.protocol.fold.world import Group, Partition, Session, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    OFFSET_MAX,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Mapping,
    MessageRange,
    Move,
    Note,
    PauseWaited,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from tests.support import wire
from tests.support.differential_log import INCARNATION, OTHER_INCARNATION, genesis

GROUPS = ("billing", "g", "grüppe")
TOPICS = ("t", "u")
TOPIC_IDS = ("", "one", "two")
CLIENTS = ("a", "b", "c")
PROGRESS_MAX = 512
INTEGERS = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    65_535,
    100_000,
    2**31,
    2**32,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)

# --- records that fit


def plausible(rng: Random, world: World, name: str) -> Record:
    """A record that a member or admin of the group `name` might send now."""
    group = world.groups.get(name) or Group(name)
    if group.deleted and rng.random() < 0.5:
        return GroupConfig(group.config_offset)
    if not group.sessions and group.topics and rng.random() < 0.15:
        return ending(group)
    if not group.sessions and rng.random() < 0.5:
        return _join(rng, group)
    if not group.topics and rng.random() < 0.5:
        return _topology(rng, group)
    if group.paused and rng.random() < 0.2:
        return ReleaseGroup(group.pause_change, group.pause_change, 0)
    parked = [known for known in group.partitions.values() if known.parked]
    if group.paused and parked and rng.random() < 0.4:
        known = rng.choice(parked)
        return SetPosition(group.pause_change, (Move(known.tp.topic, known.tp.partition, known.version, 9),), True)
    maker = rng.choices(_MAKERS, _WEIGHTS)[0]
    # What the group's mode or its lack of claims refuses is tried seldom.
    if maker in (_grant, _seek) and rng.random() < 0.8:
        maker = _grant if group.mode == AT_MOST_ONCE else _seek
    if maker in (_grant, _seek, _release) and rng.random() < 0.9:
        if not any(known.tp.partition >= 0 for known in group.claims.values()):
            maker = _claim_partition
    if maker is _set_position and not group.paused and rng.random() < 0.5:
        maker = _release_group
    return maker(rng, group)


def ending(group: Group) -> Record:
    """The next record on the way of a group to its deletion, and from there to its revival."""
    if group.deleted:
        return GroupConfig(group.config_offset)
    if group.sessions:
        return Leave(min(group.sessions))
    return GroupConfig(group.config_offset, deleted=True)


def progress(rng: Random) -> bytes:
    """What may stand in a field for progress: mostly a list of ranges, or a bitmap, else bytes that are none."""
    kind = rng.randrange(9)
    if kind == 8:
        size = rng.choice((1, 3, 500))
        return b"\0\0" + leb128(rng.choice((0, 1, 300))) + leb128(size) + rng.randbytes(size) + b"\x02\x01\x03"
    if kind < 3:
        return b""
    if kind < 6:
        made = b""
        for _ in range(rng.choice((1, 2, 3, 200))):
            triple = (rng.choice((0, 1, 7, 2**62)), rng.choice((1, 2, 300)), rng.choice((0, 0, 1, 200)))
            more = b"".join(leb128(number) for number in triple)
            made = made + more if len(made + more) <= PROGRESS_MAX else made
        return made
    if kind == 6:
        # A number that does not end, a length of 0, a number of ten bytes, two numbers instead of three.
        return rng.choice((b"\x80", b"\x01\x00\x00", b"\x80" * 9 + b"\x01\x01\x00", b"\x01\x01"))
    return rng.randbytes(rng.choice((1, 3, 40, PROGRESS_MAX)))


def leb128(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + leb128(high) if high else bytes([low])


def _near(rng: Random, right: int) -> int:
    """The right number, or seldom one beside it."""
    return right if rng.random() < 0.93 else max(NONE, right + rng.choice((-1, 1)))


def _session(rng: Random, group: Group) -> int:
    if not group.sessions or rng.random() < 0.04:
        return rng.randrange(60)
    return rng.choice(list(group.sessions))


def _claim(rng: Random, group: Group) -> tuple[int, int]:
    """(session, epoch) of a live claim, or of none."""
    if not group.claims or rng.random() < 0.05:
        return _session(rng, group), rng.randrange(60)
    # Whole topics and the pin have no messages: mostly a claim on a partition is asked for.
    real = [epoch for epoch, known in group.claims.items() if known.tp.partition >= 0]
    epoch = rng.choice(real if real and rng.random() < 0.8 else list(group.claims))
    return group.claims[epoch].owner, epoch


def _join(rng: Random, group: Group) -> Record:
    predecessor = _session(rng, group) if rng.random() < 0.3 else NONE
    mode = group.mode or rng.choice((1, 2))
    if rng.random() < 0.05:
        mode = 3 - mode
    client = rng.choice(CLIENTS)
    if predecessor in group.sessions and rng.random() < 0.8:
        client = group.sessions[predecessor].join.client_id
    instance = rng.randrange(12 if rng.random() < 0.3 else 2**64).to_bytes(16, "big")
    return Join(
        client,
        instance,
        mode,
        1_000,
        TOPICS[: rng.randrange(3)],
        predecessor,
        rank=rng.randrange(3),
        witness=rng.choice(("", "keeper")),
    )


def _heartbeat(rng: Random, group: Group) -> Record:
    session_id = _session(rng, group)
    session: Session | None = group.sessions.get(session_id)
    entries = []
    for epoch in sorted(session.epochs) if session else ():
        position = min(max(0, group.claims[epoch].position + rng.randrange(-2, 9)), OFFSET_MAX)
        entries.append(ClaimState(epoch, position, *(rng.randrange(9) for _ in range(3)), progress(rng)))
    if group.claims and rng.random() < 0.1:
        entries.append(ClaimState(rng.choice(list(group.claims)), rng.randrange(999)))
    ready = tuple(rng.sample(list(group.claims), rng.randrange(len(group.claims) + 1))) if rng.random() < 0.3 else ()
    pause = PauseWaited(group.pause_change, rng.randrange(9_000)) if group.paused else None
    idle_ms = rng.choice((0, 0, 1, rng.randrange(90_000)))
    return Heartbeat(session_id, rng.randrange(99), tuple(entries), ready, pause, idle_ms=idle_ms)


def _leave(rng: Random, group: Group) -> Record:
    return Leave(_session(rng, group))


def _evict(rng: Random, group: Group) -> Record:
    session = _session(rng, group)
    extended = group.sessions[session].extended if session in group.sessions else 0
    return Evict(session, max(0, _near(rng, extended)), 2_000 if rng.random() < 0.9 else 1_999)


def _claim_partition(rng: Random, group: Group) -> Record:
    topic = rng.choice((*group.topics, *TOPICS, ""))
    partition = rng.choice((-1, 0, 1, 2, 3, 4)) if topic else -1
    free = [tp for tp, known in group.partitions.items() if known.owner == NONE]
    if free and rng.random() < 0.5:
        topic, partition = rng.choice(free)
    known = next((known for tp, known in group.partitions.items() if tp == (topic, partition)), None)
    observed = _near(rng, known.version if known else NONE)
    return ClaimingPartition(_session(rng, group), topic, partition, observed, rng.choice((-1, 0, 7, 100)))


def _release(rng: Random, group: Group) -> Record:
    session, epoch = _claim(rng, group)
    known = group.claims.get(epoch)
    at = known.position if known else 100
    position = min(max(NONE, rng.choice((NONE, at, at + 5, at - 1, 300))), OFFSET_MAX)
    observed, give = NONE, NONE
    # In an at-least-once group nobody reads these two; there they stand seldom.
    if known is not None and rng.random() < (0.7 if group.mode == AT_MOST_ONCE else 0.1):
        observed = min(max(NONE, rng.choice((at, at, at, at, at - 1, at + 1, NONE))), OFFSET_MAX)
        give = _give(rng, known)
    reason = rng.choice(("", "hand-over", "paused"))
    parked = rng.choice(("poison", "DataTopicRecreated")) if rng.random() < 0.15 else ""
    return ReleasingPartition(
        session,
        epoch,
        position,
        rng.choice((-1, _session(rng, group))),
        reason,
        observed,
        give,
        rng.randrange(5),
        rng.randrange(5),
        progress(rng),
        parked,
    )


def _give(rng: Random, known: Partition) -> int:
    """Mostly between where the claim began and the position, both included; else beside one of them, or none."""
    if rng.random() < 0.2:
        return min(max(NONE, rng.choice((NONE, known.floor - 1, known.position + 1))), OFFSET_MAX)
    low, high = max(0, known.floor), max(0, known.position)
    return rng.choice((low, high, rng.randint(low, max(low, high))))


def _grant(rng: Random, group: Group) -> Record:
    session, epoch = _claim(rng, group)
    held = sorted(group.sessions[session].epochs) if session in group.sessions else []
    epochs = [epoch, *rng.choices([epoch, *held, rng.randrange(60)], k=rng.choice((0, 0, 1, 2, 5)))]
    rng.shuffle(epochs)
    # The position of each partition after the ranges before, if they are granted: one record may ask for two in a row.
    ends = {epoch: known.position for epoch, known in group.claims.items()}
    ranges = []
    for each in epochs:
        from_ = min(max(0, _near(rng, ends.get(each, 0))), OFFSET_MAX)
        start = min(max(0, from_ + rng.choice((0, 0, 0, 3, -1))), OFFSET_MAX)
        to = min(start + rng.choice((1, 10, 10**6, 10**6 + 1, 0)), OFFSET_MAX)
        ranges.append(MessageRange(each, from_, start, to))
        if rng.random() < 0.8:
            ends[each] = to
    return ClaimingMessages(session, tuple(ranges), rng.choice((0, rng.randrange(2**63))))


def _seek(rng: Random, group: Group) -> Record:
    session, epoch = _claim(rng, group)
    return SeekingPartition(session, epoch, rng.choice((0, 5, 100, 300, OFFSET_MAX if rng.random() < 0.1 else 7)))


def _release_group(rng: Random, group: Group) -> Record:
    token = group.pause_change if rng.random() < 0.7 else NONE
    duration_ms = rng.choice((0, 1, 5_000))
    return ReleaseGroup(_near(rng, group.pause_change), token, duration_ms, rng.choice((0, 4_999, 5_000)))


def _set_position(rng: Random, group: Group) -> Record:
    places = [(topic, number) for topic in group.topics for number in range(4)] or [("t", 0)]
    listed = []
    for topic, number in rng.sample(places, rng.randrange(min(3, len(places)) + 1)):
        known = next((known for tp, known in group.partitions.items() if tp == (topic, number)), None)
        if known is None or known.owner == NONE or rng.random() < 0.1:
            listed.append(Move(topic, number, _near(rng, known.version if known else NONE), rng.randrange(500)))
    if listed and rng.random() < 0.15:
        listed.append(listed[0])
    return SetPosition(max(0, _near(rng, group.pause_change)), tuple(listed), rng.random() < 0.3)


def _topology(rng: Random, group: Group) -> Record:
    topic = rng.choice(TOPICS)
    known = group.topics.get(topic)
    count = rng.choice((1, 2, 3, 4))
    if known is not None and rng.random() < 0.3:
        count = known.count
    # Most writers know the id that the log knows, or none; another one says that the topic was recreated.
    topic_id = rng.choice((known.id, "")) if known is not None and rng.random() < 0.6 else rng.choice(TOPIC_IDS)
    observed = _near(rng, known.offset if known else group.deleted_at)
    token = group.pause_change if rng.random() < 0.8 else NONE
    return Topology(topic, count, observed, token, topic_id=topic_id)


def _config(rng: Random, group: Group) -> Record:
    deleted = rng.random() < (0.1 if group.sessions else 0.4)
    mappings = (Mapping("m", (0, 3)),) if rng.random() < 0.2 else ()
    return GroupConfig(
        _near(rng, group.config_offset),
        group.pause_change,
        rng.choice((0, 0, 1, 2)),
        deleted,
        rng.choice(("", "greedy")),
        ("p",),
        mappings=mappings,
        on_topic_recreated=rng.choice(("", "fail", "earliest")),
        failover_ms=rng.choice((0, 700)),
        lag_weighted=rng.random() < 0.3,
        release_behind_ms=rng.choice((0, 9)),
    )


def _step_down(rng: Random, group: Group) -> Record:
    session = _session(rng, group)
    return StepDown(session, _near(rng, group.sessions[session].mark if session in group.sessions else NONE))


def _note(rng: Random, group: Group) -> Record:
    return Note(NONE, rng.choice(("probe", "k")), text=str(rng.randrange(9)))


_MAKERS: Sequence[Callable[[Random, Group], Record]] = (
    _join,
    _heartbeat,
    _leave,
    _evict,
    _claim_partition,
    _release,
    _grant,
    _release_group,
    _set_position,
    _topology,
    _config,
    _step_down,
    _note,
    _seek,
)
_WEIGHTS = (6, 14, 2, 2, 16, 6, 8, 6, 6, 5, 3, 3, 1, 3)


# --- everything else


def pack_oddly(rng: Random, value: object, depth: int = 0) -> bytes:
    """MessagePack of a tree in forms of any width that hold it; now and then with an element too many."""
    if value is None or isinstance(value, bool | float | wire.Raw):
        return wire.pack(value)
    if isinstance(value, int):
        forms = [wire.pack(value)]
        for head, form, low, high in (
            (0xCC, "B", 0, 2**8),
            (0xCD, "H", 0, 2**16),
            (0xCE, "I", 0, 2**32),
            (0xCF, "Q", 0, 2**64),
            (0xD0, "b", -(2**7), 2**7),
            (0xD1, "h", -(2**15), 2**15),
            (0xD2, "i", -(2**31), 2**31),
            (0xD3, "q", -(2**63), 2**63),
        ):
            if low <= value < high:
                forms.append(struct.pack(f">B{form}", head, value))
        return rng.choice(forms)
    if isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        head = 0xD9 if isinstance(value, str) else 0xC4
        form = rng.choice([0, 1, 2] if len(raw) < 256 else [1, 2])
        return bytes([head + form]) + len(raw).to_bytes(1 << form, "big") + raw
    assert isinstance(value, list | tuple)
    parts = [pack_oddly(rng, element, depth + 1) for element in value]
    if rng.random() < 0.1:
        parts.append(junk(rng))
    size = len(parts)
    heads = [b"\xdc" + size.to_bytes(2, "big"), b"\xdd" + size.to_bytes(4, "big")]
    if size < 16:
        heads.append(bytes([0x90 | size]))
    return rng.choice(heads) + b"".join(parts)


def junk(rng: Random) -> bytes:
    """One MessagePack value that no field wants, or bytes that only look like one."""
    kind = rng.randrange(10)
    if kind == 0:
        depth = rng.choice((1, 50, 96, 97, 98, 99, 100, 101, 102, 400))
        shapes = rng.choice(((0x91,), (0x81,), (0x91, 0x81)))
        open_ = b"".join(bytes([0x91]) if rng.choice(shapes) == 0x91 else b"\x81\x01" for _ in range(depth))
        return open_ + rng.choice((b"\x01", b"\x90", b"\x80", b"\xc0", b""))
    if kind == 1:
        return rng.choice((b"\xc1", b"\xd9\xff", b"\xdd" + b"\xff" * 4, b"\xdf" + b"\xff" * 4, b"\xc6\x7f\xff\xff\xff"))
    if kind == 2:
        return rng.choice((b"\xa1\xff", b"\xa3\xed\xa0\x80", b"\xa2\xc0\x80", b"\xd9\x04\xf4\x90\x80\x80"))
    if kind == 3:
        return rng.choice((b"\xd4\x01a", b"\xc7\x00\x05", b"\xd6\xff" + bytes(4), b"\xc9\x00\x00\x00\x01\x01a"))
    if kind == 4:
        return rng.choice((b"\xc0", b"\xc2", b"\xc3", b"\xca" + bytes(4), b"\xcb\x3f\xf0" + bytes(6)))
    if kind == 5:
        return rng.randbytes(rng.randrange(12))
    if kind == 6:
        return wire.pack("x" * rng.choice((0, 1, 63, 64, 255, 256)))
    if kind == 7:
        return wire.pack("ü" * rng.choice((63, 64, 127, 128)))
    if kind == 8:
        return wire.pack(bytes(rng.choice((0, 15, 16, 17, PROGRESS_MAX, PROGRESS_MAX + 1))))
    return wire.pack(rng.choice(INTEGERS))


def _mutated(rng: Random, tree: object, depth: int = 0) -> object:
    """The tree with one place changed."""
    if isinstance(tree, list) and tree and (depth == 0 or rng.random() < 0.7):
        at = rng.randrange(len(tree))
        chance = rng.random()
        if chance < 0.08:
            return tree[:at] + tree[at + 1 :]
        if chance < 0.14:
            return [*tree[:at], tree[at], *tree[at:]]
        if chance < 0.2:
            return tree[:at]
        return [*tree[:at], _mutated(rng, tree[at], depth + 1), *tree[at + 1 :]]
    if isinstance(tree, int) and not isinstance(tree, bool):
        chance = rng.random()
        if chance < 0.4:
            return max(-(2**63), min(2**64 - 1, tree + rng.choice((-1, 1, 2))))
        if chance < 0.7:
            return rng.choice(INTEGERS)
        if chance < 0.8:
            return rng.choice((float(tree), bool(tree), None, str(tree)))
    if isinstance(tree, bytes) and rng.random() < 0.5:
        return rng.randbytes(rng.choice((0, 1, len(tree), PROGRESS_MAX, PROGRESS_MAX + 1)))
    if isinstance(tree, str) and rng.random() < 0.3:
        return rng.choice(("", "fail", "earliest", "Fail", *TOPIC_IDS))
    return wire.Raw(junk(rng))


def tampered(rng: Random, record: Record, name: str) -> bytes:
    """A record with one thing wrong in its body or envelope, and a CRC that fits all the same."""
    number = codec.RECORD_TYPES.index(type(record))
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    chance = rng.random()
    if chance < 0.75:
        body = pack_oddly(rng, _mutated(rng, tree))
    elif chance < 0.9:
        body = pack_oddly(rng, tree)
    else:
        body = msgspec.msgpack.encode(record)
        at = rng.randrange(len(body))
        other = body[:at] + rng.randbytes(1) + body[at + 1 :]
        body = rng.choice((body[:at], body + junk(rng), other, rng.randbytes(at)))
    if rng.random() < 0.03:
        number = rng.choice((0, 14, 15, rng.randrange(1, 14)))
    return wire.envelope(name, number, body)


def of_the_log(rng: Random) -> bytes:
    """A Genesis or Snapshot, mostly of some other kind than the log's own."""
    incarnation = rng.choice((INCARNATION, OTHER_INCARNATION))
    versions = {"version": rng.choice((1, 1, 1, 0, 2)), "record_version": rng.choice((1, 1, 1, 0, 2))}
    if rng.random() < 0.4:
        protocol = rng.choice((2, 2, 2, 1, 3))
        return wire.snapshot(incarnation, chain=rng.choice((3, 3, 3, 3, 3, 0)), protocol=protocol, **versions)
    tree: object = [0, incarnation, rng.choice((1, 2, 16)), rng.choice((wire.HASH_NAME, "md5")), rng.choice((1, 2, 2))]
    if rng.random() < 0.3:
        tree = _mutated(rng, tree)
    number = rng.choice((0, 0, 0, 14, 3, 15))
    return wire.envelope("", number, pack_oddly(rng, tree), incarnation=incarnation, **versions)


def hostile(rng: Random, world: World, written: Sequence[bytes | None]) -> bytes | None:
    """One value for the end of the log; about half of them are records that fit, so that there is a state to attack."""
    name = rng.choice(GROUPS)
    chance = rng.random()
    if chance < 0.35:
        return codec.encode(plausible(rng, world, name), name, INCARNATION)
    if chance < 0.65:
        return tampered(rng, plausible(rng, world, name), name)
    old = rng.choice(written) if written else genesis()
    if old is None or chance < 0.67:
        return None if rng.random() < 0.3 else rng.randbytes(rng.randrange(60))
    if chance < 0.77:
        return old
    if chance < 0.83:
        at = rng.randrange(max(1, len(old)))
        return old[:at] + bytes(b ^ (1 << rng.randrange(8)) for b in old[at : at + 1]) + old[at + 1 :]
    if chance < 0.86:
        other = (rng.choice(written) if written else None) or b""
        return old[: rng.randrange(len(old) + 1)] + other[rng.randrange(len(other) + 1) :]
    if chance < 0.88:
        return old[: rng.randrange(len(old) + 1)]
    if chance < 0.93:
        return of_the_log(rng)
    record = plausible(rng, world, name)
    body = msgspec.msgpack.encode(record)
    number = codec.RECORD_TYPES.index(type(record))
    if chance < 0.96:
        return wire.envelope(name, number, body, incarnation=OTHER_INCARNATION, version=rng.choice((1, 1, 2)))
    if chance < 0.975:
        return wire.envelope(name, number, body, version=rng.choice((0, 2, 255)))
    # What makes a group opaque ends the attack on it, so it goes mostly to a group of its own.
    victim = name if rng.random() < 0.05 else f"opaque-{rng.randrange(9)}"
    return wire.envelope(victim, rng.choice((number, 16, 17, 255)), body, record_version=rng.choice((0, 1, 2, 255)))
