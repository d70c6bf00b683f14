"""Breadth first through every interleaving of small worlds, with the shipped fold, Member and admin plans inside.

actors.py drives one process by hand, state_store.py remembers what each process, log and network can become, search.py
walks through all of it, configurations.py says which worlds there are. The judge is simulator/step_checker.py, over
the oracle. Nothing here makes a protocol decision.
"""
