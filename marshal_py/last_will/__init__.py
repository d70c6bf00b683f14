"""Last wills: a process on the same machine ends the session of a consumer whose process has died (PROTOCOL.md T19).

kept_file.py is what a consumer keeps for it, messages.py how the two talk, death.py how a death is proven, witness.py
the process that acts, runner.py `marshal run` around it. connecting.py is the consumer's side.
"""
