"""What a query's progress says: that a batch is committed, to the source; lag and claims, to whoever collects figures.

    spark.streams.addListener(QueryListener(prometheus_gauges()))

The source reports with every trigger what its member holds; Spark shows that as the source's `latestOffset`. The same
figures stand in the coordination log (`marshal lag`) and, as committed offsets, in Kafka's own tools.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from marshal_py.errors import UnsupportedPlatform
from marshal_py.spark import commits

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

log = logging.getLogger("marshal_py.spark")


class Progress(NamedTuple):
    """One batch of one query, as its member saw it. `lag` is in messages, over the partitions that it claims."""

    query: str
    batch: int
    group: str
    claims: int
    lag: int
    rows: int
    rows_per_s: float


Export = Callable[[Progress], None]


class CommitListener(StreamingQueryListener):
    """Tells the sources of `format("marshal")` of each batch as soon as Spark has committed it.

    Spark posts a progress when the batch is in the commit log.
    """

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing to tell."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for source in event.progress.sources:
            report = _report(source.latestOffset)
            if report is not None and report.get("commits") is not None:
                commits.tell(report["commits"], source.endOffset)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Nothing to tell."""


class QueryListener(CommitListener):
    """And logs the progress of every query that reads `format("marshal")`, and hands it to `export`."""

    def __init__(self, export: Export | None = None) -> None:
        self._export = export

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        log.info("query %s started", event.name or event.id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        super().onQueryProgress(event)
        for progress in progress_of(event.progress):
            log.info("query %s, batch %d, group %s: %d claims, lag %d, %d rows, %.0f rows/s", *progress)
            if self._export is not None:
                self._export(progress)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        if event.exception:
            log.error("query %s ended: %s", event.id, event.exception)
        else:
            log.info("query %s ended", event.id)


def progress_of(progress: StreamingQueryProgress) -> list[Progress]:
    """What the sources of ours report in one progress of a query; other sources are passed over."""
    found = []
    for source in progress.sources:
        report = _report(source.latestOffset)
        if report is not None:
            rows_per_s = source.processedRowsPerSecond
            found.append(
                Progress(
                    progress.name or str(progress.id),
                    progress.batchId,
                    report["group"],
                    report["claims"],
                    report["lag"],
                    source.numInputRows,
                    rows_per_s if rows_per_s == rows_per_s else 0.0,
                )
            )  # NaN of an empty batch
    return found


def _report(text: Any) -> dict[str, Any] | None:
    try:
        report = json.loads(text)
    except (TypeError, ValueError):
        return None
    return report if isinstance(report, dict) and report.keys() >= {"group", "claims", "lag"} else None


def prometheus_gauges(registry: Any = None) -> Export:
    """An `export` that sets gauges per query and group. Raises UnsupportedPlatform without prometheus-client."""
    try:
        from prometheus_client import REGISTRY, Gauge
    except ImportError as error:
        raise UnsupportedPlatform(
            "exporting to Prometheus", "a Python without prometheus-client", "pip install 'marshal_py[metrics]'"
        ) from error
    texts = {"lag": "messages behind the end", "claims": "partitions claimed", "rows": "rows of the newest batch"}
    gauges = {
        name: Gauge(f"marshal_spark_{name}", text, ["query", "group"], registry=registry or REGISTRY)
        for name, text in texts.items()
    }

    def export(progress: Progress) -> None:
        for name, gauge in gauges.items():
            gauge.labels(progress.query, progress.group).set(getattr(progress, name))

    return export
