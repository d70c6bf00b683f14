"""What a shell offers after TAB: groups, topics and consumers of the cluster that the command line names so far.

Whatever goes wrong, the shell gets no answer: it has no place for an error.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import typer
from typer.models import ParameterInfo

from marshal_command import ANSWER_S
from marshal_py.cli.options import CommonOptions, ReadOptions

TYPED: Final[dict[str, Any]] = {
    "bootstrap_servers": str,
    "command_config": Path,
    "coordination_topic": str,
    "dump": Path,
}
# A shell may expand what it gets, and whoever joins a group chooses its client id.
SAFE: Final = re.compile(r"[\w.@:/+-]+", re.ASCII)
Names = Callable[[CommonOptions, dict[str, Any]], Iterator[str]]


def attach(command: Callable[..., None]) -> None:
    """Has the parameters of a command offer names, by what they are called."""
    for parameter in inspect.signature(command).parameters.values():
        for about in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(about, ParameterInfo) and parameter.name in COMPLETERS:
                about.autocompletion = _offering(COMPLETERS[parameter.name])


def _offering(names: Names) -> Callable[[typer.Context, str], list[str]]:
    def offer(ctx: typer.Context, incomplete: str) -> list[str]:
        given = {key: of(ctx.params[key]) for key, of in TYPED.items() if ctx.params.get(key) is not None}
        try:
            with closing((ReadOptions if "dump" in given else CommonOptions)(**given, timeout=ANSWER_S)) as options:
                offered = (name for name in names(options, ctx.params) if SAFE.fullmatch(name))
                return sorted({name for name in offered if name.startswith(incomplete)})
        except Exception:  # also of a broken file of settings
            return []

    offer.__annotations__ = {"ctx": typer.Context, "incomplete": str}  # typer reads them
    return offer


def _groups(options: CommonOptions, _: dict[str, Any]) -> Iterator[str]:
    """Offers the groups that are not deleted."""
    with options.observer() as observer:
        observer.fold()
        yield from (group.name for _, group in observer.groups() if not group.deleted)


def _topics(options: CommonOptions, _: dict[str, Any]) -> Iterator[str]:
    """Offers the topics that the client may see, without Kafka's own."""
    with closing(options.transport().admin()) as admin:
        yield from (name for name in admin.topics() if not name.startswith("__"))


def _sessions(options: CommonOptions, typed: dict[str, Any]) -> Iterator[str]:
    """Offers the client ids and member names of the group's live sessions; a number where a shell might run the id."""
    with options.observer() as observer:
        observer.fold(typed["group"])
        for _, group in observer.groups():
            for session in group.sessions.values() if group.name == typed["group"] else ():
                client_id = session.join.client_id
                yield from (client_id if SAFE.fullmatch(client_id) else str(session.id), session.join.member)


# By the name of a parameter.
COMPLETERS: Final = {"group": _groups, "topic": _topics, "topics": _topics, "session": _sessions}
