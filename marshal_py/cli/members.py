"""`marshal members step-down` and `marshal evict`: the consumers of a live group."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from msgspec import Struct

from marshal_py.admin.plans import impact
from marshal_py.cli import changes, output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import command

STEP_DOWN_EXAMPLE: Final = output.example("marshal members step-down billing worker-1 --reason 'slow disk' --yes")
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


@app.command("step-down", epilog=STEP_DOWN_EXAMPLE)
@command
@prints(SteppedDown)
def step_down(
    options: changes.ChangeOptions,
    group: changes.GroupName,
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="SESSION",
            help="Its number, its client id or its member name; the pinned one if left out (policy pinned).",
        ),
    ] = None,
) -> None:
    """Demote a session: it stays, but receives only partitions that nobody else can take.

    The pinned one finishes its handlers, and another one is pinned. This lasts until its process is restarted or
    somebody runs `marshal groups update`, which clears it for all.
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
    ended_by = target.evict(number, reason=options.reason, watcher=options.watcher())
    by = "" if ended_by in ("left", "ended") else ended_by
    options.print_result(
        Evicted(group, number, by),
        f"session {number} of group {group!r} has ended; it was evicted by {by}"
        if by
        else f"session {number} of group {group!r} has ended by itself",
    )
