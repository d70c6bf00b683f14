"""The options of commands that change a live group, and how such a command shows, asks and reports.

No command is defined here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from marshal_py.admin.plans import sessions
from marshal_py.admin.plans.impact import Impact
from marshal_py.admin.plans.operation import Progress
from marshal_py.cli import output
from marshal_py.cli.documents import with_fields
from marshal_py.cli.options import CommonOptions
from marshal_py.client.values.options import read_key
from marshal_py.errors import InvalidOption
from marshal_py.protocol.wire.codec import SigningKey
from marshal_py.protocol.wire.identity import Instant
from marshal_py.transport.clock import SystemClock

if TYPE_CHECKING:
    from marshal_py.admin.group import Group

GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
SessionName = Annotated[str, typer.Argument(metavar="SESSION", help="Its number, its client id or its member name.")]
Reason = Annotated[str, typer.Option("--reason", help="For people; it is kept in the log.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")]
SignWith = Annotated[
    Path | None,
    typer.Option(
        "--sign-with", metavar="FILE", exists=True, dir_okay=False, help="Your key, if the group has admin keys."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
TakeOver = Annotated[bool, typer.Option("--take-over", help="Take any running pause; its admin's operation fails.")]
Adopt = Annotated[
    bool, typer.Option("--adopt", help="Work in a pause of your own that is running, and leave it in place.")
]
Token = Annotated[
    int | None,
    typer.Option(
        "--token",
        min=0,
        help="Work in the running pause of this token, as `marshal pause` printed it, and leave it in place.",
    ),
]

DRY: Final = "dry run: nothing was written"
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
WORDS: Final = {
    "adopted": "working in the pause of {text}, token {offset}, which stays",
    "paused": "paused, token {offset}",
    "renewed": "renewed, token {offset}",
    "paused_again": "the pause was over at {text}, and the consumers continued: paused again, token {offset}",
    "draining": "{tp} is owned by {text}",
    "released": "{tp} is free",
    "evicting": "{text} (session {session}) is silent: waiting until it counts as dead",
    "evicted": "session {session} is evicted",
    "drained": "all partitions are free",
    "accepted": "topic {text} is accepted as it is now, at offset {offset}",
    "moving": "{text} are free: moving",
    "moved": "moved at offset {offset}",
    "changed": "{text} changed at offset {offset}",
    "resumed": "the pause is ended: the group continues",
}

Planned: Final = with_fields("Planned", Impact, group=str, outcome=Literal["dry_run"])


@dataclass(frozen=True, kw_only=True)
class DryRunOptions(CommonOptions):
    """The options of a command that changes a group but takes nothing away, so that it need not ask first."""

    ALSO_PRINTS = (Planned,)
    reason: Reason = ""
    dry_run: DryRun = False
    sign_with: SignWith = None

    def key(self) -> SigningKey | None:
        return None if self.sign_with is None else read_key(self.sign_with)

    def showed_dry_run(self, name: str, look: Callable[[], Impact]) -> bool:
        """With --dry-run, prints what the command would do and returns True. Without it, returns False. `look` returns
        what the command would do to the group `name`."""
        if not self.dry_run:
            return False
        impact = look()
        if self.as_json:
            output.print_json({"group": name, "outcome": "dry_run", **impact._asdict()})
        else:
            print("\n".join([*_sentences(impact), DRY]))
        return True

    def watcher(self) -> Callable[[Progress], None]:
        """Returns a function that prints the events of a waiting operation on stderr; with --json it prints nothing."""

        def watch(event: Progress) -> None:
            words = WORDS.get(event.kind)
            if words is not None and not self.as_json:
                output.say(words.format(**event._asdict()))

        return watch


@dataclass(frozen=True, kw_only=True)
class ChangeOptions(DryRunOptions):
    """The options of a command that takes something away from somebody, and therefore asks first."""

    yes: Yes = False

    def confirmed(self, name: str, look: Callable[[], Impact], question: str) -> bool:
        """Shows what the command would do, asks `question`, and returns True if the answer is yes. Any other answer
        ends the command with exit code 1. With --yes it neither shows nor asks. With --dry-run it only shows, and
        returns False. `look` returns what the command would do to the group `name`."""
        if self.showed_dry_run(name, look):
            return False
        if not self.yes:
            for line in _sentences(look()):
                output.say(line)
            ask(question, self.yes)
        return True

    def ask_about_take_over(self, group: str, take_over: bool) -> None:
        """Asks twice before a command with --take-over continues; any answer but yes ends it with exit code 1. Taking a
        pause over makes another admin's operation fail, so one hasty yes is not enough."""
        if take_over:
            ask(f"Take the pause of {group!r} over from whoever holds it, if anybody does?", self.yes)
            ask("Their operation will fail. Do they know?", self.yes)


@dataclass(frozen=True, kw_only=True)
class PauseOptions(ChangeOptions):
    """The options of a command that pauses the group for its change, or works in a pause that is running."""

    token: Token = None
    adopt: Adopt = False
    take_over: TakeOver = False

    def pause(self) -> dict[str, Any]:
        """Returns the arguments that say in which pause to work, as the methods of Group take them."""
        return {"token": self.token, "adopt": self.adopt, "take_over": self.take_over}


def _sentences(impact: Impact) -> list[str]:
    lines = list(impact.does)
    lines += [f"  {owner} would release {partition}" for partition, owner in impact.releases.items()]
    return lines + [f"  {name}: {change['from']} -> {change['to']}" for name, change in impact.settings.items()]


def seconds(text: str) -> float:
    """Returns a duration like `90s`, `10m`, `1.5h` or `500ms` in seconds. Any other text ends in exit code 2."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no duration in ms, s, m or h: 90s, 10m, 1.5h")
    return float(found[1]) * _UNITS_S[found[2]]


def ask(question: str, yes: bool) -> None:
    """Ends the command with exit code 1 unless the answer is yes. Asks on stderr: stdout is for the result."""
    if not yes:
        try:
            typer.confirm(question, abort=True, err=True)
        except typer.Abort as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # typer makes no difference between ctrl-C and a no
                raise KeyboardInterrupt from None
            raise


def mappings(given: list[str]) -> dict[str, list[int]]:
    """Returns the partitions of each member, from texts like `m1=0,1,2`. Any other text ends in exit code 2. Raises
    InvalidOption if a member is named twice."""
    found: dict[str, list[int]] = {}
    for text in given:
        name, _, numbers = text.partition("=")
        try:
            partitions = [int(number) for number in numbers.split(",")] if numbers else []
        except ValueError:
            partitions = []
        if not name or not partitions:
            raise typer.BadParameter(f"{text!r}: expected NAME=PARTITIONS, as m1=0,1,2")
        if name in found:
            raise InvalidOption("mappings", name, "each member has one mapping: give all of its partitions at once")
        found[name] = partitions
    return found


def now() -> Instant:
    return SystemClock().now()


def find_session(group: Group, given: str | None) -> int:
    """Returns the live session that `given` names, as sessions.find_session does. Raises GroupMissing."""
    with group.runner() as runner:
        return sessions.find_session(runner.context, given)
