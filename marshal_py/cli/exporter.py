"""`marshal exporter`: metrics of all groups of a coordination topic for Prometheus, without a consumer."""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import typer
from msgspec import Struct

from marshal_py.admin.exporter import GroupsExporter
from marshal_py.admin.watch import Watch
from marshal_py.cli import output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import CommonOptions, check_seconds, command
from marshal_py.client.metrics import LOOPBACK, metrics_url

LATE_S: Final = 5.0  # more than two refreshes: longer than one of 500 groups takes
SWITCH_S: Final = 0.0005  # Python's 5 ms, some ten times per request, would add up while a refresh runs
M_ARENA_MAX: Final = -8  # as malloc.h numbers it
FRUGAL: Final = {"fetch.message.max.bytes": 65_536, "queued.max.messages.kbytes": 1_024, "queued.min.messages": 1_000}
EXAMPLE: Final = output.example("marshal exporter --port 9101 --host 0.0.0.0")


@dataclass(frozen=True, kw_only=True)
class ExporterOptions(CommonOptions):
    """Of a process that runs all the time beside others: librdkafka gives back little of what it has once fetched."""

    def settings(self) -> dict[str, Any]:
        return {**FRUGAL, **super().settings()}


class Serving(Struct, frozen=True):
    """Where metrics are served."""

    url: str


@command
@prints(Serving)
def exporter(
    options: ExporterOptions,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Where to serve; 0 takes a free port.")] = 9101,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="127.0.0.1 is for this machine alone, 0.0.0.0 for all, as in a container."
        ),
    ] = LOOPBACK,
    granularity: Annotated[
        Literal["group", "topic", "partition"],
        typer.Option(help="Up to where figures are split: each step has many more series."),
    ] = "partition",
    names: Annotated[
        Literal["marshal", "kafka-exporter", "kafka-lag-exporter", "kminion"],
        typer.Option(help="Whose names metrics have, for dashboards that exist."),
    ] = "marshal",
    cluster_name: Annotated[
        str, typer.Option(metavar="NAME", help="The label cluster_name, which kafka-lag-exporter's names have.")
    ] = "kafka",
    refresh: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", callback=check_seconds, help="How often it reads what is new.")
    ] = 5.0,
) -> None:
    """Serve metrics of all groups, from the log, until ctrl-C. Joins no group and writes nothing.

    It needs the rights of an observer: Read on the coordination topic, Describe on data topics. With Read there, too,
    the age of what had arrived before its start is known, and with DescribeConfigs when retention deletes it. A request
    never waits for Kafka; while that does not answer, marshal_exporter_up is 0 and figures keep their last value.

    /metrics is for Prometheus, /healthz for a probe (200 while this process works), /keda/GROUP for the scaler
    metrics-api of KEDA: 503 if figures are older than a minute and two refreshes, or the lag is unknown: KEDA
    then holds the scale.
    """
    sys.setswitchinterval(SWITCH_S)
    _share_arenas()
    watch = Watch(options.observer)
    late_s = 2 * refresh + LATE_S
    with (
        output.until_interrupted() as interrupted,
        GroupsExporter(watch, port, host, names, granularity, cluster_name, late_s) as serving,
    ):
        url = metrics_url(host, serving.port)
        if options.as_json:
            output.print_json(Serving(url))
        else:
            output.say(f"metrics at {url}")
        said = ""
        while not interrupted():
            began_s = time.monotonic()
            problem = serving.refresh()
            if problem != said:
                output.say(f"figures are old: {problem}" if problem else "figures are new again")
            said = problem
            time.sleep(max(0.0, began_s + refresh - time.monotonic()))


def _share_arenas() -> None:
    """Has all threads allocate from few arenas: else each one of librdkafka's keeps what it has once used."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 2)
