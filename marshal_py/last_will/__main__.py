"""Starts a witness with little memory: `python -P .../last_will/__main__.py witness`, or `run HELD... -- COMMAND`.

It is run by its path. The packages `marshal_py` and `confluent_kafka` are entered as empty shells before anything is
imported from them, because their own `__init__` would import all of the library: 23 MB instead of 80.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def _shell(name: str, folders: list[str]) -> None:
    module = ModuleType(name)
    module.__path__ = folders
    sys.modules[name] = module


def main(arguments: list[str]) -> int:
    """Runs a witness, or `marshal run`. Returns the exit status."""
    if arguments[:1] == ["witness"]:
        if os.fork():  # the consumer should have no child that its own code could meet in os.wait
            return 0
    _shell("marshal_py", [str(Path(__file__).resolve().parents[1])])
    found = find_spec("confluent_kafka")
    _shell("confluent_kafka", list(found.submodule_search_locations or []) if found is not None else [])
    _shell("confluent_kafka.admin", [])
    for name in ("ClusterMetadata", "BrokerMetadata", "TopicMetadata", "PartitionMetadata"):
        setattr(sys.modules["confluent_kafka.admin"], name, type(name, (), {}))  # of an answer that nobody reads
    from marshal_py.last_will import runner

    if arguments[:1] == ["witness"]:
        return runner.serve_parent()
    words = arguments.index("--")
    return runner.run(arguments[words + 1 :], frozenset(map(int, arguments[1:words])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
