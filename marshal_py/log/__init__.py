"""Opens and follows the logs of a coordination topic: finds the root, begins at a snapshot, folds, looks back.

The background thread, admin operations, observers and tools use it. It decides nothing, and creates no topic.
"""
