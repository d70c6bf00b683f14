"""What the commands that change a live group share: the group, questions before, and news while they wait."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from marshal_py.admin.group import Group
from marshal_py.admin.impact import Impact
from marshal_py.admin.operation import GroupContext, Progress
from marshal_py.cli import frame
from marshal_py.protocol.identity import NONE, Instant
from marshal_py.transport.clock import SystemClock

Name = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
Session = Annotated[str, typer.Argument(metavar="SESSION", help="Its number, or its client id.")]
Reason = Annotated[str, typer.Option("--reason", help="For people; it stands in the log.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
TakeOver = Annotated[bool, typer.Option("--take-over", help="Take any running pause; its admin's operation fails.")]
Adopt = Annotated[
    bool, typer.Option("--adopt", help="Work in a pause of your own that is running, and leave it in place.")
]
PauseToken = Annotated[int | None, typer.Option("--token", min=0, help="Of the pause, as `marshal release` printed.")]
TokenOption = Annotated[
    int | None,
    typer.Option(
        "--token",
        min=0,
        help="Work in the running pause of this token, as `marshal release` printed it, and leave it in place.",
    ),
]

DRY: Final = "dry run: nothing was written"
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
WORDS: Final = {
    "adopted": "in the pause of {text}, token {offset}, which stays",
    "paused": "paused, token {offset}",
    "renewed": "renewed, token {offset}",
    "draining": "{tp} is held by {text}",
    "released": "{tp} is free",
    "evicting": "{text} (session {session}) is silent: waited out",
    "evicted": "session {session} is evicted",
    "drained": "everybody has let go",
    "accepted": "topic {text} is accepted as it is now, at offset {offset}",
    "moving": "{text} are free: moving",
    "moved": "moved at offset {offset}",
    "changed": "{text} changed at offset {offset}",
}


def open_group(name: str, servers: str | None, config: Path | None, topic: str) -> Group:
    return Group(frame.open_transport(servers, config), name, topic)


def seconds(text: str) -> float:
    """`90s`, `10m`, `1.5h`, `500ms`. Wrong usage for anything else."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no duration: 90s, 10m, 1.5h")
    return float(found[1]) * _UNITS_S[found[2]]


def ask(question: str, yes: bool) -> None:
    """Ends the command with exit code 1 unless the answer is yes. On stderr: stdout belongs to the result."""
    if not yes:
        typer.confirm(question, abort=True, err=True)


def foresee(
    group: Group,
    judge: Callable[[GroupContext], Impact],
    *,
    dry_run: bool,
    as_json: bool,
    question: str = "",
    yes: bool = False,
) -> bool:
    """Shows what the command would do and asks `question`, if it has one; False after a dry run, which was all."""
    return foresee_by(
        group.name, lambda: group.impact(judge), dry_run=dry_run, as_json=as_json, question=question, yes=yes
    )


def foresee_by(
    name: str, look: Callable[[], Impact], *, dry_run: bool, as_json: bool, question: str = "", yes: bool = False
) -> bool:
    """The same for what no scene alone can tell."""
    if not dry_run and (yes or not question):
        return True
    seen = look()
    if dry_run and as_json:
        frame.print_json({"group": name, "outcome": "dry_run", **seen._asdict()})
        return False
    tell = print if dry_run else frame.say
    for line in seen.does:
        tell(line)
    for partition, owner in seen.releases.items():
        tell(f"  {owner} would let go of {partition}")
    for name, change in seen.settings.items():
        tell(f"  {name}: {change['from']} -> {change['to']}")
    if dry_run:
        print(DRY)
    else:
        ask(question, yes)
    return not dry_run


def now() -> Instant:
    return SystemClock().now()


def ask_twice(group: str, take_over: bool, yes: bool) -> None:
    """Taking a pause over makes another admin's operation fail, so one hasty yes is not enough."""
    if take_over:
        ask(f"Take the pause of {group!r} over from whoever holds it, if anybody does?", yes)
        ask("Their operation will fail. Do they know?", yes)


def watcher(quiet: bool) -> Callable[[Progress], None]:
    """Tells what happens while a command waits."""

    def tell(event: Progress) -> None:
        words = WORDS.get(event.kind)
        if words is not None and not quiet:
            frame.say(words.format(**event._asdict()))

    return tell


def find_session(group: Group, given: str) -> int:
    """A live session by its number or its client id."""
    members = group.members()
    found = [m["session"] for m in members if given in (str(m["session"]), m["client_id"], m["member"])]
    if len(found) != 1:
        there = ", ".join(f"{m['session']} ({m['client_id']})" for m in members) or "nobody"
        many = "no live session is" if not found else f"{len(found)} live sessions are"
        raise frame.CommandFailed(f"{many} {given!r} in group {group.name!r}; there is {there}")
    return int(found[0])


def number_or_none(value: int) -> int | None:
    return None if value == NONE else value
