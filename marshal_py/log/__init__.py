"""Opens and follows the logs of a coordination topic: finds the root, begins at a snapshot, folds, looks back.

Background thread, admin operations, observers and tools use it; it writes nothing.
"""
