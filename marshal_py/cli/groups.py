"""`marshal groups ls / create / update / rm`: the groups of a coordination topic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from msgspec import Struct

from marshal_py.admin.plans import impact
from marshal_py.admin.plans.change import Edit, with_mappings, with_members, without_mappings, without_members
from marshal_py.admin.plans.operation import Terms
from marshal_py.admin.views.diagnosis import TITLES
from marshal_py.admin.views.group_info import GroupSummary
from marshal_py.cli import changes, output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import ReadTableOptions, check_topic_name, command
from marshal_py.client.values.options import NAMES, check_settings
from marshal_py.errors import CoordinationTopicMissing, GroupMissing

if TYPE_CHECKING:
    from marshal_py.admin.group import Group as LiveGroup

LS_EXAMPLE: Final = output.example("marshal groups ls")
CREATE_EXAMPLE: Final = output.example(
    "marshal groups create shipping --policy members --max-members 12 --member m1 --member m2 --yes"
)
UPDATE_EXAMPLE: Final = output.example("marshal groups update billing --policy greedy --yes")
RM_EXAMPLE: Final = output.example("marshal groups rm billing --yes")


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """The settings of a group that a command can give. The fields are named as the settings are."""

    delivery: Annotated[
        str | None, typer.Option("--delivery", metavar="MODE", help="at_least_once or at_most_once.")
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="balanced, greedy, or own, so that each consumer follows its own; topic, members, blocks, "
            "prioritized, pinned or overflow, which are for the group's whole life.",
        ),
    ] = None
    on_topic_recreated: Annotated[
        str | None,
        typer.Option(
            "--on-topic-recreated",
            metavar="fail|earliest",
            help="For a data topic that was deleted and created again: its partitions are parked, or consumed from "
            "their beginnings.",
        ),
    ] = None
    max_members: Annotated[
        int | None,
        typer.Option(
            "--max-members",
            metavar="N",
            help="Policies members and blocks: the most members that share the partitions; for blocks and mappings "
            "also the number of partitions.",
        ),
    ] = None
    members: Annotated[
        list[str] | None,
        typer.Option("--member", metavar="NAME", help="Policies members and blocks: a member. Give it for each one."),
    ] = None
    mappings: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="NAME=PARTITIONS", help="Instead of --member: which partitions a member has, as m1=0,1,2."
        ),
    ] = None
    priority_timeout_s: Annotated[
        float | None,
        typer.Option(
            "--priority-timeout",
            metavar="SECONDS",
            help="Policy pinned: after how long without a request of the pinned consumer another one is pinned.",
        ),
    ] = None
    failover_s: Annotated[
        float | None,
        typer.Option(
            "--failover",
            metavar="SECONDS",
            help="Policy overflow: after how long without a request of a consumer without conditions the others take "
            "part; 0: never.",
        ),
    ] = None
    lag_weighted: Annotated[
        bool | None,
        typer.Option(
            "--lag-weighted/--no-lag-weighted",
            help="Policy balanced: share the backlog, too, and not only the number of partitions.",
        ),
    ] = None

    admin_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--admin-key",
            metavar="KEY",
            help="Who alone may administer the group, by --sign-with: a public key of `marshal keys`. Give it for "
            "each one: they replace those that there are. none: whoever may write to the coordination topic.",
        ),
    ] = None

    def wanted(self) -> dict[str, Any]:
        """Returns the settings that were given, by name. Raises InvalidOption for a value that cannot be."""
        given = {name: getattr(self, name, None) for name in NAMES}
        given["mappings"] = changes.mappings(self.mappings or [])
        found = {name: value for name, value in given.items() if value not in (None, [], {})}
        return check_settings(found | ({"admin_keys": []} if self.admin_keys == [EVERYBODY] else {}))


@dataclass(frozen=True, kw_only=True)
class CreateOptions(SettingOptions, changes.ChangeOptions):
    """Adds the settings, and one that is for a group's whole life, to what every change asks."""

    priority_groups: Annotated[
        list[str] | None,
        typer.Option(
            "--priority-group",
            metavar="NAME",
            help="Policies prioritized, pinned and overflow: the name of the priority group.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(SettingOptions, changes.PauseOptions):
    """Adds the settings, and edits of the list of members, to what a change asks that pauses the group."""

    added: Annotated[
        list[str] | None,
        typer.Option("--add-member", metavar="NAME", help="Add a member to the list; the others stay. Repeatable."),
    ] = None
    dropped: Annotated[
        list[str] | None,
        typer.Option("--drop-member", metavar="NAME", help="Drop a member from the list; the others stay. Repeatable."),
    ] = None
    shrink: Annotated[
        str | None,
        typer.Option(
            "--shrink",
            metavar="TOPIC=PARTITIONS",
            help="How many partitions a topic has that was created again with fewer: the group forgets its positions "
            "in the others.",
        ),
    ] = None
    without_map: Annotated[
        bool, typer.Option("--no-map", help="Delete the mappings: nobody consumes until there are members or mappings.")
    ] = False

    def edit(self, wanted: dict[str, Any]) -> Edit | None:
        """Returns the change of the members that was asked for, which keeps the others as they are then; None if only
        settings were. The mappings alone replace the list of members, if the group has one."""
        edits = [with_members(self.added)] if self.added else []
        edits += [without_members(self.dropped)] if self.dropped else []
        edits += [without_mappings] if self.without_map else []
        if wanted.keys() == {"mappings"} and not edits:
            return with_mappings(wanted["mappings"])
        if len(edits) + (self.shrink is not None) > 1 or ((edits or self.shrink is not None) and wanted):
            raise typer.BadParameter(f"{ALONE} go alone: one command for each change")
        return edits[0] if edits else None

    def smaller(self) -> tuple[str, int] | None:
        """Returns the topic of --shrink and how many partitions it has."""
        if self.shrink is None:
            return None
        topic, equals, number = self.shrink.rpartition("=")
        if not equals or not number.isdecimal() or not int(number):
            raise typer.BadParameter(
                f"--shrink {self.shrink!r}: expected TOPIC=PARTITIONS, 1 at least; a group keeps its topics"
            )
        check_topic_name(topic)
        return topic, int(number)


class Created(Struct, frozen=True):
    """`created`: False if the group has had these settings before. `offset`: of the record that set them."""

    group: str
    created: bool
    offset: int


class Updated(Struct, frozen=True):
    """`changed`: the settings that were given, the topic that is smaller, or whether the members have changed.
    `offset`: of the record."""

    group: str
    changed: dict[str, Any] | bool
    offset: int


class Deleted(Struct, frozen=True):
    """`deleted`: False if it was deleted before."""

    group: str
    deleted: bool


EVERYBODY: Final = "none"  # the admin key of a group that whoever may write may administer
ALONE: Final = "--add-member, --drop-member, --no-map and --shrink"
ELSEWHERE: Final = {"paused", "parked", "silent"}  # causes that other words of a group's state tell

app: Final = typer.Typer(help="Administer groups.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls", epilog=LS_EXAMPLE)
@command
@prints(list[GroupSummary])
def ls(
    options: ReadTableOptions,
    deleted: Annotated[bool, typer.Option("--deleted", help="Also those that were deleted.")] = False,
) -> None:
    """List the groups of all coordination partitions, and whether anybody consumes.

    A consumer without a heartbeat for two of its intervals, by this machine's clock, is silent: dead, or cut off.
    """
    with options.watch(None, "summaries") as watch:
        found = [one for one in watch.summaries() if deleted or not one.deleted]
    columns = ("group", "delivery", "consumers", "owned", "partitions", "topics", "state")
    options.show(found, found, GroupSummary.__struct_fields__, columns, _cells)


def _cells(one: GroupSummary) -> list[object]:
    counts = [one.sessions, one.owned, one.partitions]
    return [one.group, one.delivery, *counts, ", ".join(one.topics), _condition(one)]


def _condition(group: GroupSummary) -> str:
    """Returns the state of a group in words: whether it is paused, whether anybody consumes, how much is parked."""
    if group.deleted:
        return "deleted"
    sessions, stale = group.sessions, group.stale
    if not sessions:
        words = "no consumer"
    elif stale == sessions:
        words = f"no live consumer: last heartbeat {output.ago(group.last_sign_s or 0.0)}"
    else:
        words = f"running, {stale} of {sessions} consumers silent" if stale else "running"
        told = [TITLES.get(cause, cause) for cause in group.not_consumed if cause not in ELSEWHERE]
        if told:
            words = f"not all consumed ({', '.join(told)})" + words.removeprefix("running")
    paused = ["paused"] if group.paused else []
    parked = [f"{group.parked} partitions parked"] if group.parked else []
    return ", ".join([*paused, *([words] if words != "running" or not paused else []), *parked])


@app.command("create", epilog=CREATE_EXAMPLE)
@command
@prints(Created)
def create(options: CreateOptions, group: changes.GroupName) -> None:
    """Create a group before its first consumer, or revive one that was deleted.

    Nothing is done if the group has these settings already; if it has others, the command fails and names them.
    A group that nobody created begins with its first consumer. If the coordination topic does not exist yet, it is
    created, as by the first consumer of a cluster.
    """
    target = options.group(group)
    wanted = options.wanted()

    def look() -> impact.Impact:
        try:
            return target.impact(lambda context: impact.of_settings(context, wanted, True, changes.now()))
        except (CoordinationTopicMissing, GroupMissing):  # nobody has used the coordination topic
            settings = {name: {"from": None, "to": value} for name, value in wanted.items()}
            return impact.Impact([f"group {group!r} would be the first of {options.coordination_topic}"], {}, settings)

    if not options.confirmed(group, look, f"Create group {group!r}?"):
        return
    from marshal_py.client.marshal import connect  # which `groups ls` does without

    topic, timeout_s = options.coordination_topic, options.timeout
    with connect(options.settings(), coordination_topic=topic, timeout_s=timeout_s):  # creates it if there is none
        seen: list[str] = []
        offset = target.create(reason=options.reason, watcher=lambda event: seen.append(event.kind), **wanted)
    created = "changed" in seen
    done = "is created" if created else "has these settings already"
    options.print_result(Created(group, created, offset), f"group {group!r} {done}")


@app.command("update", epilog=UPDATE_EXAMPLE)
@command
@prints(Updated)
def update(options: UpdateOptions, group: changes.GroupName) -> None:
    """Change the settings of a group; what is not named stays.

    Another delivery pauses the group during the change and ends its consumers: start them again with the new one.
    Positions stay. Refused if somebody else changes the settings meanwhile. Before --add-member, start a consumer of
    the member: from then on its partitions belong to it alone. --shrink pauses the group, too; a topic that grows needs
    no command.
    """
    wanted = options.wanted()
    edit, smaller = options.edit(wanted), options.smaller()
    if edit is None and smaller is None and not wanted:
        raise typer.BadParameter("name what should change: an option of a setting, such as --policy")
    target = options.group(group)
    if edit is not None:
        _change_members(options, group, target, edit)
        return

    def look() -> impact.Impact:
        if smaller is not None:
            return target.impact_of_shrink(*smaller, **options.pause())
        terms = Terms(**options.pause())
        return target.impact(lambda context: impact.of_settings(context, wanted, False, changes.now(), terms))

    if not options.confirmed(group, look, f"Change group {group!r}?"):
        return
    options.ask_about_take_over(group, options.take_over)
    how: Any = {"reason": options.reason, **options.pause(), "watcher": options.watcher()}
    if smaller is not None:
        wanted = dict([smaller])
        offset = target.shrink(*smaller, **how)
    else:
        offset = target.set_config(**how, **wanted)
    options.print_result(Updated(group, wanted, offset), f"group {group!r} is changed")


def _change_members(options: UpdateOptions, name: str, target: LiveGroup, edit: Edit) -> None:
    """Changes the members of the group `name`, after asking, and prints what came of it."""
    look = partial(target.impact, lambda context: impact.of_settings(context, edit, False, changes.now()))
    if not options.confirmed(name, look, f"Change the members of group {name!r}?"):
        return
    seen: list[str] = []
    offset = target.change_members(edit, options.reason, lambda event: seen.append(event.kind))
    changed = "changed" in seen
    done = f"the members of group {name!r} are changed"
    done = done if changed else f"nothing to change: the members of group {name!r} are as wanted already"
    options.print_result(Updated(name, changed, offset), done)


@app.command("rm", epilog=RM_EXAMPLE)
@command
@prints(Deleted)
def rm(
    options: changes.ChangeOptions,
    group: changes.GroupName,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it with its live consumers, in a pause; they end with GroupDeleted.")
    ] = False,
) -> None:
    """Delete a group and its positions. Refused while a consumer lives; silent consumers are evicted first."""
    target = options.group(group)
    if not options.confirmed(
        group,
        lambda: target.impact(lambda context: impact.of_deletion(context, changes.now(), force)),
        f"Delete group {group!r} and all its positions?",
    ):
        return
    deleted = target.delete(force=force, reason=options.reason, watcher=options.watcher())
    options.print_result(
        Deleted(group, deleted), f"group {group!r} is deleted" if deleted else f"group {group!r} was deleted before"
    )
