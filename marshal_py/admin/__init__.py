"""Operates on live groups: pauses them, moves positions, changes settings, evicts, deletes. Also writes snapshots of
logs.

A plan (Operation and its subclasses) decides. It is a state machine without clock and I/O: it reads verdicts, counts
its own waits and says what to send. It learns what became of its records by reading them, as members do (PROTOCOL.md
T17). OperationRunner drives one plan over a real log. Group is the API for programs.
"""
