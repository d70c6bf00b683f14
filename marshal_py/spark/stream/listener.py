"""Listeners for a query's progress: they report commits to the source, and export lag and claims as metrics.

    spark.streams.addListener(QueryListener(prometheus_gauges()))

At every trigger the source reports what its member holds, and Spark shows that as the source's `latestOffset`. The
same figures are in the coordination log (`marshal state --lag`) and, as committed offsets, in Kafka's own tools.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from marshal_py.errors import UnsupportedPlatform
from marshal_py.spark.stream import commits

logger: Final = logging.getLogger("marshal_py.spark")


class Progress(NamedTuple):
    """One batch of one query, as its member saw it. `lag`: messages, over all partitions that it owns."""

    query: str
    batch: int
    group: str
    claims: int
    lag: int
    rows: int
    rows_per_s: float


Export = Callable[[Progress], None]


class CommitListener(StreamingQueryListener):
    """Reports each batch to our sources as soon as Spark has committed it: the event follows the commit log."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Does nothing. Spark calls it when a query starts."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for source in event.progress.sources:
            report = _report(source.latestOffset)
            if report is not None and report.get("commits") is not None:
                commits.report(report["commits"], source.endOffset)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Does nothing. Spark calls it when a query ends."""


class QueryListener(CommitListener):
    """Does what CommitListener does; also logs the progress of each `format("marshal")` query and passes it to
    `export`."""

    def __init__(self, export: Export | None = None) -> None:
        self._export = export

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        logger.info("query %s started", event.name or event.id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        super().onQueryProgress(event)
        for progress in progress_of(event.progress):
            logger.info("query %s, batch %d, group %s: %d claims, lag %d, %d rows, %.0f rows/s", *progress)
            if self._export is not None:
                self._export(progress)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        if event.exception:
            logger.error("query %s ended: %s", event.id, event.exception)
        else:
            logger.info("query %s ended", event.id)


def progress_of(progress: StreamingQueryProgress) -> list[Progress]:
    """Returns what sources of `format("marshal")` report in one progress event of a query."""
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
                    0.0 if math.isnan(rows_per_s) else rows_per_s,  # NaN: the batch was empty
                )
            )
    return found


def _report(text: Any) -> dict[str, Any] | None:
    try:
        report = json.loads(text)
    except (TypeError, ValueError):
        return None
    return report if isinstance(report, dict) and report.keys() >= {"group", "claims", "lag"} else None


def prometheus_gauges(registry: Any = None) -> Export:
    """Returns an `export` for QueryListener. It sets a gauge per query and group: marshal_spark_lag, _claims, _rows.
    `registry` is by default the global one of prometheus-client. Raises UnsupportedPlatform without
    prometheus-client."""
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
