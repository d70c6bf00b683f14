"""Topics as objects: reading any message of a topic by offset, time or key ("Direct Get"), apart from any group.

`topic.py` is what users hold, `request.py` checks what they ask, `reads.py` finds the messages. Nothing here joins a
group, claims, commits or writes to the coordination topic.
"""
