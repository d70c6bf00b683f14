"""The doors to Kafka: the ports, the real one, the in-memory one and the embedded broker. Decides nothing."""
