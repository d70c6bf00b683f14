"""Exhaustive search: every interleaving of small models, with the shipped fold, Member and admin plans inside.

actors.py drives one process by hand, state_store.py remembers what each process, log and network can become, search.py
takes the steps, bfs.py visits the states, configurations.py lists the models. marshal_sim/judge/step_checker.py judges
each step by the oracle. Nothing here makes a protocol decision.
"""

from typing import Final

DOORS: Final = ("bfs", "configurations", "explore")
