"""Which file may import what, proven by reading the imports. CONTRIBUTING.md says why the rooms stand in this order.

`violations(root)` walks the package that lies in `root`, parses every file and returns what it finds; nothing is
imported or run. Imports inside functions and under TYPE_CHECKING count: a name that a type needs is a dependency too.

The second half plants one fault per rule in a small tree and demands that exactly that rule is reported. A checker
that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "marshal_py"
REPOSITORY = Path(__file__).resolve().parent.parent

# A file imports from its own room and from rooms further left.
ROOMS = ("errors", "protocol", "history", "transport", "client", "admin", "simulator", "spark", "cli")

# The public doors show what is inside, so they import from everywhere; nobody inside goes through them.
DOORS = ("__init__", "embedded", "metrics", "aio")

# What the heart must not touch: clocks, threads, sockets, chance, the machine, Kafka. `importlib` because it would let
# any of them in by a string. errors.py is held to the same list: the heart imports it.
IMPURE = frozenset(
    {"time", "datetime", "threading", "asyncio", "concurrent", "socket", "select", "os", "subprocess", "logging"}
    | {"random", "secrets", "uuid", "confluent_kafka", "importlib"}
)

# Names that say nothing about what lives there, so that everything ends up there.
EMPTY_NAMES = frozenset({"utils", "helpers", "common", "base", "manager"})

# A file should be read in one sitting: about 450 lines is where one looks for a seam, and 50 more is room to find it.
MODULE_LINES_MAX = 500

# The one tree of errors is a list that is looked up and not read: a sentence per error, and nothing else in it.
LOOKED_UP = f"{PACKAGE}/errors.py"


class Violation(NamedTuple):
    rule: str
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.message}"


class Module(NamedTuple):
    """One file: its path below the root, and its dotted name in parts (a package's `__init__` names the package)."""

    path: str
    name: tuple[str, ...]
    is_package: bool
    text: str

    @property
    def room(self) -> str:
        """The second part of the name; a door's own file name for the files that stand beside the rooms."""
        return self.name[1] if len(self.name) > 1 else "__init__"


class Import(NamedTuple):
    target: tuple[str, ...]
    line: int


def modules_of(root: Path) -> list[Module]:
    found = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        relative = file.relative_to(root)
        is_package = file.name == "__init__.py"
        name = relative.parent.parts if is_package else relative.with_suffix("").parts
        found.append(Module(relative.as_posix(), name, is_package, file.read_text(encoding="utf-8")))
    return found


def imports_of(module: Module, known: frozenset[tuple[str, ...]]) -> Iterator[Import]:
    """Every import of a file, resolved: `from .a import b` is the module `a.b` if there is one, otherwise `a`."""
    for node in ast.walk(ast.parse(module.text, filename=module.path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(tuple(alias.name.split(".")), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            source = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                package = module.name if module.is_package else module.name[:-1]
                source = package[: len(package) - (node.level - 1)] + source
            for alias in node.names:
                inner = (*source, alias.name)
                yield Import(inner if inner in known else source, node.lineno)
        elif isinstance(node, ast.Call):
            # import_module("a.b") and __import__("a.b"): an import that happens to be spelled as a call.
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            argument = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield Import(tuple(str(argument.value).split(".")), node.lineno)


def stands_alone(module: Module) -> bool:
    """The oracle and the auditor judge the rest, so they share no code with it."""
    return module.room == "simulator" and len(module.name) > 2 and module.name[2].startswith(("oracle", "auditor"))


def may_touch_kafka(module: Module) -> bool:
    return module.room == "transport" or module.path == f"{PACKAGE}/spark/reading.py"


def broken_by(module: Module, target: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The rules that one import breaks, each with its sentence."""
    dotted = ".".join(target)
    if target[0] != PACKAGE:
        if module.room in ("protocol", "errors") and target[0] in IMPURE:
            yield "heart", f"imports {dotted}; the heart gets it as an argument or does without"
        if target[0] == "confluent_kafka" and not may_touch_kafka(module):
            yield "kafka", f"imports {dotted}; only transport/ and spark/reading.py speak to Kafka"
        return

    if stands_alone(module):
        judges = ("oracle", "auditor") if module.name[2].startswith("auditor") else ("oracle",)
        if target[1:2] != ("simulator",) or not (target[2:3] and target[2].startswith(judges)):
            yield "alone", f"imports {dotted}; a judge shares no code with what it judges"
        return

    if module.room in DOORS or module.room not in ROOMS:
        return  # doors import from everywhere; a file in no room is reported once, by its place
    room = target[1] if len(target) > 1 else "__init__"
    if room == "transport" and module.room == "history":
        yield "history", f"imports {dotted}; history reads verdicts and never Kafka"
    if room not in ROOMS:
        yield "rooms", f"imports {dotted}; that is a public door, and the inside does not go through doors"
    elif ROOMS.index(room) > ROOMS.index(module.room):
        yield "rooms", f"imports {dotted}; {room} comes after {module.room}"


def violations(root: Path) -> list[Violation]:
    modules = modules_of(root)
    known = frozenset(module.name for module in modules)
    found = []
    for module in modules:
        if module.room not in ROOMS and module.room not in DOORS:
            found.append(Violation("place", module.path, 1, f"{module.room} is no room and no door"))
        for part in module.name[1:]:
            if part.strip("_") in EMPTY_NAMES:
                found.append(Violation("name", module.path, 1, f"{part} does not say what lives there"))
        lines = len(module.text.splitlines())
        if lines > MODULE_LINES_MAX and module.path != LOOKED_UP:
            found.append(Violation("length", module.path, lines, f"{lines} lines; at most {MODULE_LINES_MAX}"))
        for target, line in imports_of(module, known):
            found.extend(Violation(rule, module.path, line, message) for rule, message in broken_by(module, target))
    return sorted(set(found))


def test_the_package_keeps_its_rules() -> None:
    found = violations(REPOSITORY)
    assert not found, "\n".join(map(str, found))


def test_the_checker_reads_the_package() -> None:
    """A wrong path would make the test above pass on nothing."""
    paths = {module.path for module in modules_of(REPOSITORY)}
    assert f"{PACKAGE}/__init__.py" in paths
    assert f"{PACKAGE}/errors.py" in paths
    assert any(path.startswith(f"{PACKAGE}/protocol/") for path in paths)


# A tree that keeps every rule, and uses each of the freedoms that the rules leave.
CLEAN = {
    "__init__.py": "from marshal_py import aio, embedded\nfrom marshal_py.client.marshal import connect\n",
    "aio.py": "from marshal_py.client import marshal\n",
    "embedded.py": "from marshal_py.transport.embedded import Broker\n",
    "errors.py": "import enum\n",
    "protocol/__init__.py": "",
    "protocol/codec.py": "import msgspec\nfrom .. import errors\nfrom . import records\n",
    "protocol/records.py": "from marshal_py.errors import BadInput\n",
    "history/explain.py": "from ..protocol.codec import decode\n",
    "transport/embedded.py": "import os, threading\nfrom confluent_kafka import Producer\n",
    "transport/kafka.py": "import confluent_kafka.admin\nfrom marshal_py.protocol import records\n",
    "client/marshal.py": "import time\nimport marshal_py.transport.kafka\nfrom marshal_py import errors\n",
    "admin/pause.py": "from marshal_py.client import marshal\n",
    "simulator/__init__.py": "",
    "simulator/oracle.py": "import struct\nfrom marshal_py.simulator.oracle_wire import decode\n",
    "simulator/oracle_wire.py": "import zlib\n",
    "simulator/auditor.py": "from marshal_py.simulator import auditor_evidence, oracle\n",
    "simulator/auditor_evidence.py": "",
    "simulator/cluster.py": "from marshal_py.protocol import codec\nfrom . import auditor\n",
    "spark/reading.py": "from confluent_kafka import Consumer\n",
    "cli/__init__.py": "from marshal_py.simulator import cluster\n",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in {**CLEAN, **files}.items():
        file = root / PACKAGE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def test_a_clean_tree_has_no_violation(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, {})) == []


def test_a_file_of_the_longest_length_is_allowed(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, {"client/delivery_queue.py": "x = 1\n" * MODULE_LINES_MAX})) == []


PLANTED = [
    # (a) the order of the rooms, however the import is spelled
    ("rooms", "errors.py", "from marshal_py.protocol import records"),
    ("rooms", "protocol/world.py", "from marshal_py.history.explain import explain"),
    ("rooms", "protocol/world.py", "from ..transport import kafka"),
    ("rooms", "protocol/world.py", "from .. import client"),
    ("rooms", "transport/memory.py", "import marshal_py.client.marshal"),
    ("rooms", "client/loop.py", "from marshal_py.admin import pause"),
    ("rooms", "admin/plan.py", "def run():\n    from marshal_py.cli import main"),
    ("rooms", "admin/plan.py", "if TYPE_CHECKING:\n    from marshal_py.simulator.cluster import Cluster"),
    ("rooms", "simulator/run.py", "from importlib import import_module\nimport_module('marshal_py.spark.ranges')"),
    ("rooms", "spark/source.py", "__import__('marshal_py.cli')"),
    # nobody inside goes through a public door
    ("rooms", "cli/demo.py", "import marshal_py"),
    ("rooms", "cli/demo.py", "from marshal_py import connect"),
    ("rooms", "client/loop.py", "from marshal_py import embedded"),
    ("rooms", "client/loop.py", "from marshal_py.aio import connect"),
    # the judges stand alone
    ("alone", "simulator/oracle.py", "from marshal_py.protocol import codec"),
    ("alone", "simulator/oracle_fold.py", "from marshal_py.errors import BadInput"),
    ("alone", "simulator/oracle.py", "from . import cluster"),
    ("alone", "simulator/oracle.py", "from marshal_py.simulator import auditor"),
    ("alone", "simulator/auditor.py", "from marshal_py.simulator import run_seed"),
    ("alone", "simulator/auditor_model.py", "import marshal_py"),
    # a file in no room
    ("place", "extras.py", ""),
    ("place", "server/http.py", ""),
    # (c) who speaks to Kafka
    ("kafka", "client/loop.py", "import confluent_kafka"),
    ("kafka", "spark/source.py", "from confluent_kafka import Consumer"),
    ("kafka", "cli/produce.py", "def run():\n    from confluent_kafka.admin import AdminClient"),
    ("kafka", "__init__.py", "import confluent_kafka as kafka"),
    ("kafka", "simulator/oracle.py", "import confluent_kafka"),
    # (d) names that say nothing
    *[("name", f"client/{name}.py", "") for name in sorted(EMPTY_NAMES)],
    ("name", "client/_helpers.py", ""),
    ("name", "transport/common/__init__.py", ""),
    # (e) length
    ("length", "client/delivery_queue.py", "x = 1\n" * (MODULE_LINES_MAX + 1)),
]


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, rule: str, name: str, text: str) -> None:
    found = violations(plant(tmp_path, {name: text}))
    assert {(violation.rule, violation.path) for violation in found} == {(rule, f"{PACKAGE}/{name}")}


@pytest.mark.parametrize("name", ["protocol/world.py", "protocol/assignment/greedy.py", "errors.py"])
@pytest.mark.parametrize("module", sorted(IMPURE))
@pytest.mark.parametrize("spelling", ["import {}", "from {} import x", "import {}.inner as y"])
def test_the_heart_touches_nothing_impure(tmp_path: Path, name: str, module: str, spelling: str) -> None:
    """(b) Each forbidden module, by each way to import it. Kafka breaks two rules at once."""
    found = violations(plant(tmp_path, {name: spelling.format(module)}))
    expected = {"heart", "kafka"} if module == "confluent_kafka" else {"heart"}
    assert {violation.rule for violation in found} == expected


def test_history_that_reaches_for_a_transport_breaks_two_rules(tmp_path: Path) -> None:
    """(c) It is out of order, and it is the one thing that history must never do."""
    found = violations(plant(tmp_path, {"history/lag.py": "from ..transport.kafka import read"}))
    assert {violation.rule for violation in found} == {"history", "rooms"}


def test_a_violation_says_where(tmp_path: Path) -> None:
    (found,) = violations(plant(tmp_path, {"protocol/lease.py": '"""Doc."""\n\nimport time\n'}))
    assert str(found).startswith("marshal_py/protocol/lease.py:3: [heart] imports time")
