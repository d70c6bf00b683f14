"""Pure readers of verdicts: what a log says, for people and programs.

Nothing here reads a clock or a cluster, and nothing changes a world. Whoever has folded a log hands the verdicts in.
"""
