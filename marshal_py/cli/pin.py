"""`marshal pin info / unpin`: who is pinned in a group with the policy pinned."""

from __future__ import annotations

from typing import Final

import typer
from msgspec import structs

from marshal_py.admin.plans import impact
from marshal_py.cli import changes, output
from marshal_py.cli.options import CommonOptions, command

INFO_EXAMPLE: Final = output.example("marshal pin info billing")
UNPIN_EXAMPLE: Final = output.example("marshal pin unpin billing --reason 'move it to the other rack' --yes")

app: Final = typer.Typer(help="Administer the pinned consumer of a group.", no_args_is_help=True, rich_markup_mode=None)


@app.command("info", epilog=INFO_EXAMPLE)
@command
def info(options: CommonOptions, group: changes.GroupName) -> None:
    """Show which consumer is pinned, the id of its pin, and who stands by."""
    found = options.group(group).pin_info()
    if options.as_json:
        output.print_json(found)
        return
    for key, value in structs.asdict(found).items():
        shown = ", ".join(value) if isinstance(value, tuple) else value
        print(f"{key.replace('_', ' ')}: {shown if shown not in (None, '') else '-'}")


@app.command("unpin", epilog=UNPIN_EXAMPLE)
@command
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
        done += f"(marshal pin info {group})"
    options.print_result({"group": group, "session": session, "given_back": given_back}, done)
