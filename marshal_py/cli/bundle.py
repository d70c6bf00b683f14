"""`marshal bundle`: one file about a group for a bug report, which every command reads that takes --dump."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from msgspec import Struct

from marshal_py.admin import archive, bundling
from marshal_py.admin.examination import Examination
from marshal_py.admin.watch import Watch
from marshal_py.cli import changes, output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import CommonOptions, Force, command, require_group

EXAMPLE: Final = output.example("marshal bundle billing -o billing.bundle")


class Bundled(Struct, frozen=True):
    """The file, how many records are in it, and of how many something was left out."""

    file: str
    records: int
    left_out: int


@command
@prints(Bundled)
def bundle(
    options: CommonOptions,
    group: changes.GroupName,
    path: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="Write there.")],
    force: Force = False,
) -> None:
    """Write one file about a group for a bug report: its log, what the doctor finds, lag, versions and settings.

    Every command that takes --dump reads it, and `marshal doctor --dump FILE` prints what the doctor found. The first
    line of the file has the rest as JSON.

    It holds no key and no value of a message. Left out are words of handlers (why they ended a message, and the keys
    that hold up a `process`), what others wrote into the coordination topic, and every setting that may be secret. It
    holds names of groups, topics and hosts, client ids, and the reasons that admins gave; also those of other groups in
    the same log. Look at it with `marshal log tail --dump FILE` before you send it.
    """
    settings, transport = options.settings(), options.transport()
    with Watch(options.observer, group) as watch:
        watch.refresh()
        require_group(watch.observer, group)
        (health,) = watch.groups()
    asked = Examination(options.coordination_topic, group)
    checks = list(asked.checks({"bootstrap.servers": settings["bootstrap.servers"]}, lambda: transport))
    admin = transport.admin()
    try:
        cluster = admin.describe_cluster()
    finally:
        admin.close()
    with options.observer() as observer:
        records = observer.records(sorted({0, *observer.logs_of(group)}))
        left_out = sum(bundling.without_words(observer.root, record) is not record for record in records)
    about = bundling.about(settings, checks, health, cluster, left_out)
    with output.opened(path, force) as file, options.observer() as observer:
        root = observer.root
        count = archive.dump(
            observer, file, group, about=about, change=lambda record: bundling.without_words(root, record)
        )
    text = f"{count} records in {path}; of {left_out} of them words were left out"
    options.print_result(Bundled(str(path), count, left_out), text)
