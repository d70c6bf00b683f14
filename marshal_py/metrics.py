"""Public module for metrics: the values of `Marshal.metrics()`, and the Prometheus exporter of the extra `metrics`."""

from marshal_py.client.exporter import Collector, Exporter, serve
from marshal_py.client.metrics import ConsumerMetrics, Metrics, PartitionMetrics

__all__ = ["Collector", "ConsumerMetrics", "Exporter", "Metrics", "PartitionMetrics", "serve"]
