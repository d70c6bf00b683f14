"""A cluster in virtual time: a broker, clients, faults, administrators."""

from typing import Final

DOORS: Final = ("broker", "client", "clock", "cluster", "dump_state", "faults", "process", "run", "scenario", "witness")
