"""`marshal advisories`: what happened to a group, or to all, as the log says; and what happens now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated, Any, Final

import typer
from msgspec import structs

from marshal_py.cli import output
from marshal_py.cli.documents import Time, prints, time_of, with_fields
from marshal_py.cli.options import NOBODY, ReadLineOptions, Since, Until, command, require_group, say_where_it_begins
from marshal_py.history.advisories import to_text
from marshal_py.log.observer import Judged
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.advisory import ALARMING, KINDS, Advisory
from marshal_py.protocol.wire.identity import NONE

EXAMPLE: Final = output.example("marshal advisories billing --kind claimed --kind evicted --json")

UNKNOWN: Final = (NONE, "")  # what stands in an Advisory for what it does not have
PrintedAdvisory: Final = with_fields(
    "PrintedAdvisory",
    Advisory,
    **{name: str | None for name in ("client_id", "topic", "text")},
    **{name: int | None for name in ("partition", "epoch", "offset", "to", "session", "log", "log_offset")},
    time=Time,
)


@command
@prints(PrintedAdvisory)
def advisories(
    options: ReadLineOptions,
    group: Annotated[str | None, typer.Argument(help="One group; all if left out.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until ctrl-C.")] = False,
    count: Annotated[
        int | None,
        typer.Option(
            "-n", min=0, help="This many of the last ones; all if left out. Without --since of 200,000 records."
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="This kind only; may be repeated. `alarming` selects those that somebody should look at.",
        ),
    ] = None,
) -> None:
    """Show what happened: claims, releases, evictions, pauses, moves, lost offsets, stuck handlers.

    Every reader of the log sees the same, also about the past. With --json one object per line.
    """
    if until is not None and follow:
        raise typer.BadParameter("--until goes without --follow")
    kinds = _kinds(kind or [])
    with output.until_interrupted(follow), options.observer() as observer:
        if observer.root is None:
            output.say(NOBODY)

        def told(world: World, records: Iterator[Judged]) -> Iterator[Advisory]:
            for one in _wanted(observer.told(group, world, records), kinds):
                if until_ms is None or one.time_ms <= until_ms:
                    yield one

        since_ms, until_ms = options.period(since, until)
        found = observer.newest(group, told, count, since_ms)
        require_group(observer, group, follow and options.dump is None)
        say_where_it_begins(observer)
        found = [one for one in found if since_ms is None or one.time_ms >= since_ms]
        found.sort(key=lambda advisory: (advisory.time_ms, advisory.log, advisory.log_offset))
        shown: Iterable[Advisory] = found if count is None else found[max(0, len(found) - count) :]
        if follow and observer.root is not None and options.dump is None:
            shown = chain(shown, _wanted(observer.advisories(group, follow=True), kinds))
        options.show(shown, ("time", *Advisory.__struct_fields__), _text, _document)


def _kinds(given: list[str]) -> frozenset[str]:
    """Returns the kinds to print; the empty set means all. `alarming` stands for all alarming kinds. An unknown kind
    ends the command with exit code 2."""
    unknown = sorted(set(given) - KINDS.keys() - {"alarming"})
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is no kind: alarming, {', '.join(KINDS)}")
    return frozenset(given) | (ALARMING if "alarming" in given else frozenset())


def _wanted(found: Iterable[Advisory | None], kinds: frozenset[str]) -> Iterator[Advisory]:
    return (advisory for advisory in found if advisory is not None and (not kinds or advisory.kind in kinds))


def _document(advisory: Advisory) -> dict[str, Any]:
    known = {name: None if value in UNKNOWN else value for name, value in structs.asdict(advisory).items()}
    return {"time": time_of(advisory.time_ms), **known}


def _text(advisory: Advisory) -> str:
    place = f"{time_of(advisory.time_ms)}  {advisory.log}:{advisory.log_offset:<6} {advisory.group}"
    return f"{place}  {to_text(advisory)}"
