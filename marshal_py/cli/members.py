"""`marshal members step-down / unpin` and `marshal evict`: the consumers of a live group."""

from __future__ import annotations

from typing import Final

import typer
from msgspec import Struct

from marshal_py.admin.plans import impact
from marshal_py.cli import changes, output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import command

STEP_DOWN_EXAMPLE: Final = output.example("marshal members step-down billing worker-1 --reason 'slow disk' --yes")
UNPIN_EXAMPLE: Final = output.example("marshal members unpin billing --reason 'move it to the other rack' --yes")
EVICT_EXAMPLE: Final = output.example("marshal evict billing 4711 --yes")

app: Final = typer.Typer(help="Administer the consumers of a group.", no_args_is_help=True, rich_markup_mode=None)


class SteppedDown(Struct, frozen=True):
    """A session that has stepped down. `mark`: the offset of the record."""

    group: str
    session: int
    mark: int


class Evicted(Struct, frozen=True):
    """A session that has ended. `ended_by`: who has evicted it; "" if it has ended by itself."""

    group: str
    session: int
    ended_by: str


class Unpinned(Struct, frozen=True):
    """The session whose pin is to end. `given_back`: whether it has ended already."""

    group: str
    session: int
    given_back: bool


@app.command("step-down", epilog=STEP_DOWN_EXAMPLE)
@command
@prints(SteppedDown)
def step_down(options: changes.ChangeOptions, group: changes.GroupName, session: changes.SessionName) -> None:
    """Demote a session: it stays, but receives only partitions that nobody else can take.

    This lasts until its process is restarted or somebody runs `marshal groups update`, which clears it for all.
    """
    target = options.group(group)
    number = changes.find_session(target, session)
    found = target.impact(lambda context: impact.of_step_down(context, number))
    if not options.confirmed(group, lambda: found, f"Demote session {number} of group {group!r}?"):
        return
    mark = target.step_down(number, options.reason)
    options.print_result(
        SteppedDown(group, number, mark), f"session {number} of group {group!r} has stepped down. {found.does[-1]}"
    )


@command
@prints(Evicted)
def evict(options: changes.ChangeOptions, group: changes.GroupName, session: changes.SessionName) -> None:
    """End a session that is silent for twice its heartbeat interval, counted from now. Refused if it is alive.

    There is no --force: a consumer that only this machine cannot see must not lose its partitions.
    """
    target = options.group(group)
    number = changes.find_session(target, session)
    if not options.confirmed(
        group,
        lambda: target.impact(lambda context: impact.of_eviction(context, number)),
        f"Evict session {number} of group {group!r}?",
    ):
        return
    by = target.evict(number, reason=options.reason, watcher=options.watcher())
    options.print_result(
        Evicted(group, number, by),
        f"session {number} of group {group!r} has ended; it was evicted by {by}"
        if by
        else f"session {number} of group {group!r} has ended by itself",
    )


@app.command("unpin", epilog=UNPIN_EXAMPLE)
@command
@prints(Unpinned)
def unpin(options: changes.ChangeOptions, group: changes.GroupName) -> None:
    """End the pin. Another consumer is pinned as soon as the handlers of this one are done.

    The consumer that is unpinned stays in the group, the last in line until the group's settings change.
    """
    target = options.group(group)
    if not options.confirmed(
        group, lambda: target.impact(impact.of_unpinning), f"Unpin the consumer of group {group!r}?"
    ):
        return
    before = target.pin_info().pinned_id
    session = target.unpin(options.reason)
    given_back = target.pin_info().pinned_id != before
    done = f"session {session} of group {group!r} "
    if given_back:
        done += "is unpinned"
    else:
        done += "is asked to give the pin back; it has not done so yet: it waits for its handlers, or does not answer "
        done += f"(marshal state {group} --settings)"
    options.print_result(Unpinned(group, session, given_back), done)
