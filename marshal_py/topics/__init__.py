"""Reads any message of a topic by offset, time or key ("Direct Get"), apart from any consumer group.

`topic.py` has the object that users hold, `request.py` checks what they ask, `reads.py` finds the messages, and
`key_index.py` finds them faster by a key index. `changes.py` changes topics. Nothing here joins a group, claims,
commits or writes to the coordination topic.
"""
