"""Public module for metrics: the values of `Marshal.metrics()`, and the Prometheus exporter of the extra `metrics`."""

from marshal_py.client.metrics import Collector, ConsumerMetrics, Exporter, Metrics, PartitionMetrics, serve

__all__ = ["Collector", "ConsumerMetrics", "Exporter", "Metrics", "PartitionMetrics", "serve"]
