"""Public module for tracing: spans and metrics of OpenTelemetry around messages. Needs the extra `otel`."""

from marshal_py.client.tracing import record_received, settling, traced

__all__ = ["record_received", "settling", "traced"]
