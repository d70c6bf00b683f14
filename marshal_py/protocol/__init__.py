"""The core: records, the fold, leases, delivery, assignment, and one consumer as a state machine (member/member.py).

Rooms, each built on those before it: wire, fold, policy, claims, time, member, duties.

It is pure: no file here imports a clock, threads, sockets, randomness, logging or Kafka (tests/test_architecture.py
checks that). Time and random bits come in as arguments; what the driver must do goes out as values.
"""
