"""The judge of handlers that work in parallel (`process`).

S26: the order of each lane, and what no handler ever had. S30: which lane is next.

In place of S10, which says that a claim delivers its messages in order, each message is preceded here by those of its
own lane alone. So a message is found that one owner forgets and a later one delivers, too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from marshal_sim.judge.claims import claim_of
from marshal_sim.judge.evidence import Client, Delivery, Key, LaneStep, Violation
from marshal_sim.judge.facts import FOREVER, ClaimSpan
from marshal_sim.judge.history import History
from marshal_sim.judge.messages import ended_ms, is_lost
from marshal_sim.judge.model import AT_LEAST_ONCE


class _Lane(NamedTuple):
    """Holds what one client has handled of one lane under one claim."""

    handled: list[Delivery]
    offsets: deque[int]  # of the lane, from the claim's position on


def s26_lanes(history: History) -> Iterator[Violation]:
    """Yields each breach of S26: a handler of a `process` begins with a message only if none of its lane is in work
    under the same claim, and all before it in the lane are finished, or became dead letters under this claim, or are
    before it in the same list.
    """
    lanes: dict[tuple[Client, str, int, Hashable], _Lane] = {}
    finished = ended_ms(history) if history.evidence.lanes else {}
    letters = {(letter.key, letter.epoch, letter.offset): letter.posted_ms for letter in history.evidence.letters}

    def working(one: Delivery, ms: float) -> bool:
        """Tells whether a handler has the message. Not if it has ended it, and the letter is not written yet."""
        return not (0 <= one.end_ms <= ms or 0 <= letters.get((one.key, one.epoch, one.offset), -1) <= ms)

    for d in history.deliveries if history.evidence.lanes else ():
        named, claim = history.evidence.lanes.get(d.client), claim_of(history, d)
        if named is None or claim is None or claim.mode != AT_LEAST_ONCE:
            continue
        history.counted["S26"] += 1
        name = named(d.topic, d.partition, d.offset)
        place = (d.client, d.group, d.epoch, (d.offset, None) if name is None else name)
        lane = lanes.get(place)
        if lane is None:
            offsets = [] if history.is_gone(claim, d.begin_ms) else history.offsets(claim)
            after = offsets[bisect_left(offsets, claim.position) :] if name is not None else ()
            mine = deque(at for at in after if named(d.topic, d.partition, at) == name)
            lane = lanes[place] = _Lane([], mine)
        what = f"client {d.client} begins with {d.key} {d.offset}"
        mates = [one for one in lane.handled if d.together == one.together > 0 and one.offset < d.offset]
        lane.handled[:] = [one for one in lane.handled if one in mates or working(one, d.begin_ms)]
        before = {one.offset for one in mates}
        busy = next((one for one in lane.handled if one not in mates), None)
        if busy is not None:
            yield Violation("S26", d.begin_ms, d.epoch, f"{what}, and has {busy.offset} of the same lane in work")
        lane.handled.append(d)
        earlier = islice(lane.offsets, bisect_left(lane.offsets, d.offset))
        for first in [at for at in earlier if at not in before]:
            if not (
                0 <= finished.get((d.key, claim.generation, first), -1) <= d.begin_ms
                or 0 <= letters.get((d.key, d.epoch, first), -1) <= d.begin_ms
                or _reported(claim, first)
                or is_lost(history, d.key, first)
            ):
                yield Violation("S26", d.begin_ms, d.epoch, f"{what}, and {first} of the same lane comes first")
                break
            lane.offsets.remove(first)


def _reported(claim: ClaimSpan, offset: int) -> bool:
    """Tells whether the log had reported the message as finished to the owner of this claim."""
    return any(start <= offset < to for start, to in claim.finished)


def s26_letters(history: History) -> Iterator[Violation]:
    """Yields each breach of S26 by a dead letter of a message that no handler had: its limit of deliveries is not over.

    A crash counts a delivery that did not reach a handler (D11), and `after_dead_letter="key"` sends messages behind a
    dead letter. So only what is left is judged: partitions of which no owner died, and of no such user.
    """
    begun: set[tuple[Key, int]] = set()
    for d in history.evidence.deliveries + history.evidence.other_deliveries:
        begun.add((d.key, d.offset))
    died = {claim.key for claim in history.claims.values() if claim.died or claim.ended_by in ("Evict", "Join")}
    for letter in history.evidence.letters:
        if letter.client in history.evidence.lanes and letter.key not in died:
            history.counted["S26"] += 1
            if (letter.key, letter.offset) not in begun and letter.client not in history.evidence.follows:
                text = f"{letter.key} {letter.offset} becomes a dead letter, and no handler of {letter.client} had it"
                yield Violation("S26", letter.written_ms, letter.epoch, text)


def s26_silent(history: History) -> Iterator[Violation]:
    """Yields each breach of S26: an owner gives up a handler as silent, and none had the message: it was in a lane.

    Where all its handlers are silent, the owner gives up what waits for them, too.
    """
    begun: dict[Client, list[Delivery]] = {}
    for d in history.deliveries if history.evidence.lanes and history.stuck else ():
        begun.setdefault(d.client, []).append(d)
    clients = {offset: client for offset, client, _ in history.claimants}
    for sent_ms, group, fields in history.stuck if begun else ():
        claims = history.by_key.get((group, fields["topic"], fields["partition"]), ())
        mine = [claim for claim in claims if claim.session == fields["session"] and claim.ms <= sent_ms]
        client = clients.get(mine[-1].epoch) if mine else None
        if client not in history.evidence.lanes:
            continue
        history.counted["S26"] += 1
        claim = mine[-1]
        timeout_ms = history.evidence.handler_intervals * history.sessions[group, claim.session].interval_ms
        busy = [d for d in begun.get(client, ()) if d.gate_ms <= sent_ms and not 0 <= d.end_ms < sent_ms]
        has = any((d.epoch, d.offset) == (claim.epoch, fields["from"]) for d in busy)
        silent = sum(d.gate_ms <= sent_ms - timeout_ms / 2 for d in busy)
        if not has and silent < history.evidence.workers.get(client, 1):
            text = f"client {client} gives up {claim.key} {fields['from']} as silent, and no handler had it"
            yield Violation("S26", sent_ms, claim.epoch, text)


_Place = tuple[int, str, int, int]  # epoch, topic, partition, offset
_Claim = tuple[int, str, int]  # epoch, topic, partition
_Name = tuple[int, str, int, Hashable]  # of a lane, under one claim


class _Waiting:
    """What waits for handlers in the lanes of one client's `process`, as far as its calls show that.

    Where these leave a doubt, a message does not count as one that may begin: so of a lane in which an answer is on its
    way, one that ends its message for good, or of which something was given back that has not come again.
    """

    def __init__(self, lane: Callable[[str, int, int], Hashable], letters: set[_Place]) -> None:
        """`letters`: what became dead letters, which others of a lane may follow."""
        self._lane = lane
        self._ended = set(map(self.name, letters))
        self._busy: defaultdict[_Name, set[_Place]] = defaultdict(set)  # handlers have them; under whichever claim
        self._back: defaultdict[_Name, set[_Place]] = defaultdict(set)
        self.offsets: defaultdict[_Claim, list[int]] = defaultdict(list)  # that wait

    def name(self, place: _Place) -> _Name:
        name = self._lane(*place[1:])
        return (*place[:3], (place[3], None) if name is None else name)

    def note(self, step: LaneStep, since: Sequence[LaneStep]) -> None:
        """Takes what a call has done. `since`: what others did meanwhile."""
        if step.what == "attached":  # what waited for the `process` before was put back
            for claim, offsets in self.offsets.items():
                for offset in offsets:
                    self._back[self.name((*claim, offset))].add((*claim, offset))
            self.offsets.clear()
        begun = {place for one in since if one.what == "begun" for place in one.places}
        for place in step.places:
            name, offsets = self.name(place), self.offsets[place[:3]]
            if step.what in ("back", "over"):
                self._back[name].add(place)
            else:
                self._back[name].discard(place)
            if step.what == "came" and place not in begun:
                insort(offsets, place[3])
            elif step.what == "begun":
                self._busy[_anyones(name)].add(place)
                if place[3] in offsets:
                    offsets.remove(place[3])
            elif step.what in ("ended", "back"):
                self._busy[_anyones(name)].discard(place)

    def first(self, claim: _Claim, below: int = FOREVER, beside: Container[_Name] = ()) -> int | None:
        """Returns the lowest offset of a claim that may begin, below `below` and not in one of the lanes `beside`."""
        for offset in self.offsets.get(claim, ()):
            if offset >= below:
                break
            name = self.name((*claim, offset))
            free = not self._busy.get(_anyones(name)) and not self._back.get(name)
            if free and name not in beside and name not in self._ended:
                return offset
        return None


def _anyones(name: _Name) -> _Name:
    return (-1, *name[1:])


def s30_turns(history: History) -> Iterator[Violation]:
    """Yields each breach of S30: of what waits in the lanes of a claim and may begin, a `process` begins with the
    oldest. No partition has two turns while another one has such a message.

    A list has a turn per lane, and what must be alone in a list gives its turn away: then only the first half is
    judged.
    """
    for client, steps in history.evidence.lane_steps.items():
        letters = {(one.epoch, *one.key[1:], one.offset) for one in history.evidence.letters if one.client == client}
        follow = {place[0] for place in letters if client in history.evidence.follows}
        waiting = _Waiting(history.evidence.lanes[client], letters)
        owed: dict[_Claim, dict[_Claim, int]] = {}  # by claim: what could have begun of others when it had its turn
        whole = False  # whether all that waits is known
        for at, step in enumerate(steps):
            whole = step.what == "attached" or (whole and step.what != "over")
            if step.what in ("attached", "shut") or not step.alone:
                owed.clear()
            if step.what == "begun" and step.alone and whole:
                history.counted["S30"] += 1
                yield from _begins_with_the_oldest(client, step, waiting)
                yield from _has_its_turn(client, step, waiting, owed, follow)
            waiting.note(step, steps[step.since : at])


def _begins_with_the_oldest(client: Client, step: LaneStep, waiting: _Waiting) -> Iterator[Violation]:
    lanes: dict[_Name, _Place] = {}
    for place in sorted(step.places):
        lanes.setdefault(waiting.name(place), place)
    for place in lanes.values():
        first = waiting.first(place[:3], place[3], lanes)
        if first is not None:
            text = f"client {client} begins with {place[1]} {place[2]} {place[3]}, and {first} has waited"
            yield Violation("S30", -1, place[0], text)


def _has_its_turn(
    client: Client, step: LaneStep, waiting: _Waiting, owed: dict[_Claim, dict[_Claim, int]], follow: set[int]
) -> Iterator[Violation]:
    """Judges a turn. `follow`: the claims of which messages follow dead letters, in turns that nobody sees."""
    claim = step.places[0][:3]
    for other, offset in owed.pop(claim, {}).items():
        if other[0] in step.may and waiting.first(other, offset + 1) == offset:
            text = f"client {client} begins twice with {claim[1:]}, and {offset} of {other[1:]} has waited"
            yield Violation("S30", -1, other[0], text)
    for others in owed.values():
        others.pop(claim, None)
    left = {other[1:]: other[0] for other, offsets in sorted(waiting.offsets.items(), reverse=True) if offsets}
    could = {  # not what comes behind messages of an older claim, which take turns until the `process` looks
        other: waiting.first(other)
        for other in waiting.offsets
        if other != claim and other[0] in step.may and other[0] not in follow and left.get(other[1:]) == other[0]
    }
    owed[claim] = {other: offset for other, offset in could.items() if offset is not None}
