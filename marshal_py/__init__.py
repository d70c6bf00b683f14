"""Kafka consumers that coordinate through Kafka alone."""

__all__: list[str] = []
