"""The heart: records, fold, leases, delivery, one consumer's mind. Pure.

No clock, thread, socket, randomness, logging or Kafka may be imported in this room (tests/test_architecture.py proves
it). Time and random bits enter as arguments; what shall be done leaves as values.
"""
