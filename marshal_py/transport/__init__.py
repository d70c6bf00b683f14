"""The transports: the interfaces to a cluster (ports.py), and what implements them for Kafka and in memory.

A transport carries out what it is asked to and reports what happened. It makes no decision of the protocol.
"""
