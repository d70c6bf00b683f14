"""Operations on live groups: each is a plan that decides and a run that drives it.

Strategy: a plan (Errand and its kinds) is a state machine without clock and I/O. It reads verdicts, counts its own
waits and says what to send; it learns what became of its records by reading them, as members do (PROTOCOL.md T17). Desk
drives one plan over a real log; Group is the front for programs.
"""
