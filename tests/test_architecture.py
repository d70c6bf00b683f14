"""Which file may import what. CONTRIBUTING.md explains the order of the packages.

`violations(root)` parses every file of the package below `root` and returns the rules that it breaks; nothing is
imported or run. Imports inside functions and under TYPE_CHECKING count: a name that a type needs is a dependency too.

The second half plants one fault per rule in a small tree and expects that exactly this rule is reported: a checker that
cannot fail proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "marshal_py"
REPOSITORY = Path(__file__).resolve().parent.parent

# A file may import from its own package and from those further left.
# `testing` is the last one, so that nothing that runs in production can depend on it.
PACKAGES = (
    *(
        "errors",
        "protocol",
        "history",
        "transport",
        "topics",
        "last_will",
        "client",
        "admin",
        "simulator",
        "spark",
        "cli",
    ),
    "testing",
)

# The public modules collect what users import, so they may import anything; nothing inside the package imports them.
PUBLIC_MODULES = ("__init__", "aio", "embedded", "metrics", "sql")

# The core (protocol/) uses no clock, thread, socket, randomness, operating system or Kafka. `importlib` is on the list
# because it could import any of them by a string. errors.py obeys the same list, because the core imports it.
FORBIDDEN_IN_CORE = frozenset(
    {"time", "datetime", "threading", "asyncio", "concurrent", "socket", "select", "os", "subprocess", "logging"}
    | {"random", "secrets", "uuid", "confluent_kafka", "importlib"}
)

# Names that say nothing about their content, so that everything ends up there.
EMPTY_NAMES = frozenset({"utils", "helpers", "common", "base", "manager"})

# A file should be readable in one sitting. At about 450 lines, look for a place to split it.
MODULE_LINES_MAX = 500

# errors.py has no limit: it is a list of errors, looked up and not read from start to end.
LOOKED_UP = f"{PACKAGE}/errors.py"

PYTEST_PLUGIN = f"{PACKAGE}/testing/plugin.py"

ModuleName = tuple[str, ...]
Graph = dict[ModuleName, set[ModuleName]]  # what each module imports


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
    name: ModuleName
    is_package: bool
    text: str

    @property
    def top(self) -> str:
        """The package below marshal_py that the file belongs to, or the file's own name if it is directly in it."""
        return self.name[1] if len(self.name) > 1 else "__init__"


class Import(NamedTuple):
    target: ModuleName
    line: int


def modules_of(root: Path) -> list[Module]:
    found = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        relative = file.relative_to(root)
        is_package = file.name == "__init__.py"
        name = relative.parent.parts if is_package else relative.with_suffix("").parts
        found.append(Module(relative.as_posix(), name, is_package, file.read_text(encoding="utf-8")))
    return found


def imports_of(module: Module, known: frozenset[ModuleName]) -> Iterator[Import]:
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


def is_judge(module: Module) -> bool:
    """Whether this is the oracle or the auditor: they judge the rest, so they share no code with it."""
    return module.top == "simulator" and len(module.name) > 2 and module.name[2].startswith(("oracle", "auditor"))


def may_touch_kafka(module: Module) -> bool:
    return module.top == "transport" or module.path == f"{PACKAGE}/spark/range_reader.py"


def broken_by(module: Module, target: ModuleName) -> Iterator[tuple[str, str]]:
    """The rules that one import breaks, each with a message."""
    dotted = ".".join(target)
    if target[0] != PACKAGE:
        if module.top in ("protocol", "errors") and target[0] in FORBIDDEN_IN_CORE:
            yield "core", f"imports {dotted}; the core gets it as an argument or does without"
        if target[0] == "confluent_kafka" and not may_touch_kafka(module):
            yield "kafka", f"imports {dotted}; only transport/ and spark/range_reader.py use the Kafka client"
        if target[0] in ("pytest", "_pytest") and module.path != PYTEST_PLUGIN:
            yield "pytest", f"imports {dotted}; users who do not test with pytest do not have it"
        return

    if is_judge(module):
        judges = ("oracle", "auditor") if module.name[2].startswith("auditor") else ("oracle",)
        if target[1:2] != ("simulator",) or not (target[2:3] and target[2].startswith(judges)):
            yield "alone", f"imports {dotted}; a judge shares no code with what it judges"
        return

    if module.top in PUBLIC_MODULES or module.top not in PACKAGES:
        return  # a public module may import anything; an unknown place is reported once, by the rule "place"
    top = target[1] if len(target) > 1 else "__init__"
    if top == "transport" and module.top == "history":
        yield "history", f"imports {dotted}; history reads verdicts and never Kafka"
    if top not in PACKAGES:
        yield "order", f"imports {dotted}; that is a public module, which nothing inside the package imports"
    elif PACKAGES.index(top) > PACKAGES.index(module.top):
        yield "order", f"imports {dotted}; {top} comes after {module.top}"


def reachable(graph: Graph, start: ModuleName) -> set[ModuleName]:
    """The modules that `start` imports, directly or through others."""
    found: set[ModuleName] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left.extend(new)
    return found


def circles_of(graph: Graph) -> list[frozenset[ModuleName]]:
    """The sets of modules in which each imports each, directly or through others. Sorted by their first names."""
    below = {name: reachable(graph, name) for name in graph}
    found = {frozenset(other for other in below[name] if name in below[other]) for name in graph if name in below[name]}
    return sorted(found, key=min)


def shortest_circle(graph: Graph, start: ModuleName) -> list[ModuleName]:
    """The shortest way from a module along its imports back to itself."""
    paths, seen = [[start]], {start}
    while True:
        path = paths.pop(0)
        for name in sorted(graph[path[-1]]):
            if name == start:
                return [*path, start]
            if name not in seen:
                seen.add(name)
                paths.append([*path, name])


def circle_violations(modules: list[Module], graph: Graph) -> Iterator[Violation]:
    paths = {module.name: module.path for module in modules}
    for circle in circles_of(graph):
        first, files = min(circle), sorted(name[-1] for name in circle)
        way = " -> ".join(name[-1] for name in shortest_circle(graph, first))
        yield Violation("circle", paths[first], 1, f"{way}; these import each other: {' '.join(files)}")


def violations(root: Path) -> list[Violation]:
    modules = modules_of(root)
    known = frozenset(module.name for module in modules)
    graph: Graph = {name: set() for name in known}
    found = []
    for module in modules:
        if module.top not in PACKAGES and module.top not in PUBLIC_MODULES:
            found.append(
                Violation("place", module.path, 1, f"{module.top} is neither a known package nor a public module")
            )
        for part in module.name[1:]:
            if part.strip("_") in EMPTY_NAMES:
                found.append(Violation("name", module.path, 1, f"{part} does not say what is in it"))
        lines = len(module.text.splitlines())
        if lines > MODULE_LINES_MAX and module.path != LOOKED_UP:
            found.append(Violation("length", module.path, lines, f"{lines} lines; at most {MODULE_LINES_MAX}"))
        for target, line in imports_of(module, known):
            if target in known and target[1:2] == module.name[1:2]:  # across packages, the order forbids circles
                graph[module.name].add(target)
            found.extend(Violation(rule, module.path, line, message) for rule, message in broken_by(module, target))
    found.extend(circle_violations(modules, graph))
    return sorted(set(found))


def test_the_package_obeys_the_rules() -> None:
    found = violations(REPOSITORY)
    assert not found, "\n".join(map(str, found))


def test_the_checker_reads_the_package() -> None:
    """A wrong path would make the test above pass on nothing."""
    paths = {module.path for module in modules_of(REPOSITORY)}
    assert f"{PACKAGE}/__init__.py" in paths
    assert f"{PACKAGE}/errors.py" in paths
    assert any(path.startswith(f"{PACKAGE}/protocol/") for path in paths)


# A tree that obeys every rule and uses everything that the rules allow.
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
    "simulator/clock.py": "",
    "simulator/cluster.py": "from marshal_py.protocol import codec\nfrom . import auditor\n",
    "spark/range_reader.py": "from confluent_kafka import Consumer\n",
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
    # (a) the order of the packages, however the import is spelled
    ("order", "errors.py", "from marshal_py.protocol import records"),
    ("order", "protocol/world.py", "from marshal_py.history.explain import explain"),
    ("order", "protocol/world.py", "from ..transport import kafka"),
    ("order", "protocol/world.py", "from .. import client"),
    ("order", "transport/memory.py", "import marshal_py.client.marshal"),
    ("order", "client/loop.py", "from marshal_py.admin import pause"),
    ("order", "admin/plan.py", "def run():\n    from marshal_py.cli import main"),
    ("order", "admin/plan.py", "if TYPE_CHECKING:\n    from marshal_py.simulator.cluster import Cluster"),
    ("order", "simulator/run.py", "from importlib import import_module\nimport_module('marshal_py.spark.ranges')"),
    ("order", "spark/stream_source.py", "__import__('marshal_py.cli')"),
    # nothing inside imports a public module
    ("order", "cli/demo.py", "import marshal_py"),
    ("order", "cli/demo.py", "from marshal_py import connect"),
    ("order", "client/loop.py", "from marshal_py import embedded"),
    ("order", "client/loop.py", "from marshal_py.aio import connect"),
    # a judge shares no code with what it judges
    ("alone", "simulator/oracle.py", "from marshal_py.protocol import codec"),
    ("alone", "simulator/oracle_fold.py", "from marshal_py.errors import BadInput"),
    ("alone", "simulator/oracle.py", "from . import clock"),
    ("alone", "simulator/oracle.py", "from marshal_py.simulator import auditor_evidence"),
    ("alone", "simulator/auditor.py", "from marshal_py.simulator import run_seed"),
    ("alone", "simulator/auditor_model.py", "import marshal_py"),
    # a file in no known package
    ("place", "extras.py", ""),
    ("place", "server/http.py", ""),
    # (c) who uses the Kafka client
    ("kafka", "client/loop.py", "import confluent_kafka"),
    ("kafka", "spark/stream_source.py", "from confluent_kafka import Consumer"),
    ("kafka", "cli/produce.py", "def run():\n    from confluent_kafka.admin import AdminClient"),
    ("kafka", "__init__.py", "import confluent_kafka as kafka"),
    ("kafka", "simulator/oracle.py", "import confluent_kafka"),
    ("pytest", "testing/cluster.py", "import pytest"),
    ("order", "cli/demo/__init__.py", "from marshal_py.testing import make_message"),
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


CIRCLES = [
    {"client/acks.py": "from . import message", "client/message.py": "from marshal_py.client.acks import Acks"},
    {"client/acks.py": "from . import message", "client/message.py": "if TYPE_CHECKING:\n    from .acks import Acks"},
    {"client/acks.py": "from . import message", "client/message.py": "def ack():\n    from .acks import Acks"},
    {"client/acks.py": "from . import buffers", "client/buffers.py": "from . import message"}
    | {"client/message.py": "from .acks import Acks"},
]


@pytest.mark.parametrize("files", CIRCLES)
def test_files_that_import_each_other_are_found(tmp_path: Path, files: dict[str, str]) -> None:
    """(f) In one package too, also for a type alone, inside a function, and through a third file."""
    (found,) = violations(plant(tmp_path, files))
    assert (found.rule, found.path) == ("circle", "marshal_py/client/acks.py")
    assert found.message.startswith(" -> ".join(["acks", *(Path(name).stem for name in [*files][1:]), "acks"]))


def test_each_circle_is_reported_once_and_alone(tmp_path: Path) -> None:
    """A file that imports one of a circle is not in it."""
    files = {**CIRCLES[0], "client/loop.py": "from . import acks", "admin/a.py": "from . import b"}
    found = violations(plant(tmp_path, {**files, "admin/b.py": "from . import a\nfrom marshal_py.client import loop"}))
    assert [violation.message.split("; ")[1] for violation in found] == [
        "these import each other: a b",
        "these import each other: acks message",
    ]


@pytest.mark.parametrize("name", ["protocol/world.py", "protocol/assignment/greedy.py", "errors.py"])
@pytest.mark.parametrize("module", sorted(FORBIDDEN_IN_CORE))
@pytest.mark.parametrize("spelling", ["import {}", "from {} import x", "import {}.inner as y"])
def test_the_core_imports_nothing_forbidden(tmp_path: Path, name: str, module: str, spelling: str) -> None:
    """(b) Each forbidden module, in each spelling of an import. Kafka breaks two rules at once."""
    found = violations(plant(tmp_path, {name: spelling.format(module)}))
    expected = {"core", "kafka"} if module == "confluent_kafka" else {"core"}
    assert {violation.rule for violation in found} == expected


def test_history_that_imports_a_transport_breaks_two_rules(tmp_path: Path) -> None:
    """(c) It breaks the order, and a rule of its own says that history never reads Kafka."""
    found = violations(plant(tmp_path, {"history/lag.py": "from ..transport.kafka import read"}))
    assert {violation.rule for violation in found} == {"history", "order"}


def test_a_violation_says_where(tmp_path: Path) -> None:
    (found,) = violations(plant(tmp_path, {"protocol/lease.py": '"""Doc."""\n\nimport time\n'}))
    assert str(found).startswith("marshal_py/protocol/lease.py:3: [core] imports time")
