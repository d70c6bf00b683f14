"""Which file may import what, and how large things may be. CONTRIBUTING.md explains the packages and their rooms.

`violations(root)` parses every file of both packages below `root` and returns the rules that they break; nothing is
imported or run. Imports inside functions and under TYPE_CHECKING count: a name that a type needs is a dependency too.

A room is a folder inside a package, or one file. Rooms have an order, as packages do. A folder has doors, which its
`__init__` lists as DOORS: the files that may be imported from outside the room.

The second half plants one fault per rule in a small tree and expects that exactly this rule is reported: a checker that
cannot fail proves nothing.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from marshal_py.protocol.fold.policies import KNOWN

PACKAGE = "marshal_py"
PROOF = "marshal_sim"  # what proves the product: beside it, and no part of it
REPOSITORY = Path(__file__).resolve().parent.parent

# A file may import from its own package and from those further left.
# `testing` is the last one, so that nothing that runs in production can depend on it.
PACKAGES = (
    *("errors", "protocol", "history", "transport", "log", "topics", "last_will", "client", "admin", "spark", "cli"),
    "testing",
)

# A file may import from its own room and from those further left. A file directly in a package comes after its rooms.
ROOMS = {
    "protocol": ("wire", "fold", "policy", "claims", "time", "member", "duties"),
    "client": (
        *("values", "connection", "event_loop", "messages", "delivery", "ranges", "driver", "membership", "receiving"),
        *("consuming", "process"),
    ),
    "admin": ("views", "plans"),
    "spark": ("stream", "sinks"),
    PROOF: ("oracle", "judge", "cluster", "mutants", "tools", "exhaustive", "commands"),
}

# The product names the proof in this place alone, and imports none of it: the list of commands, two of which run it.
RUNS_THE_PROOF = f"{PACKAGE}/cli/app.py"

# The proof may import these packages, and its room `commands` what commands are made of.
PROVEN = ("errors", "protocol", "history", "transport", "log", "topics", "client", "admin", "spark")

# The public modules collect what users import, so they may import anything; nothing inside the package imports them.
PUBLIC_MODULES = ("__init__", "aio", "embedded", "info", "metrics", "otel", "sql")

# The core (protocol/) uses no clock, thread, socket, randomness, operating system or Kafka. `importlib` is on the list
# because it could import any of them by a string. errors.py obeys the same list, because the core imports it.
FORBIDDEN_IN_CORE = frozenset(
    {"time", "datetime", "threading", "asyncio", "concurrent", "socket", "select", "os", "subprocess", "logging"}
    | {"random", "secrets", "uuid", "confluent_kafka", "importlib"}
)

# Names that say nothing about their content, so that everything ends up there.
EMPTY_NAMES = frozenset({"utils", "helpers", "common", "base", "manager"})

# What each policy is stands in one value, and who should own what in the room of policies. The names of policies stand
# nowhere else, so that another policy touches these alone; prose may name them. Those in USUAL are words for other
# things, too: they count where they are compared with a policy, or given as one.
POLICY_PLACES = (f"{PACKAGE}/protocol/fold/policies.py", f"{PACKAGE}/protocol/policy.py")
POLICY_NAMES = frozenset({"balanced", "greedy", "prioritized", "members", "blocks", "topic", "pinned", "overflow"})
USUAL = frozenset({"members", "blocks", "topic", "pinned", "overflow"})

# Longer functions hide more than one idea. Counted from `def` to the end.
FUNCTION_LINES_MAX = 70

# Lines per room, or of the files directly in a package. A room may shrink unasked. Whoever needs more raises the number
# in the same commit, where a reviewer sees it; nobody shortens a file to please it. Numbers end in 00 or 50, so that
# small changes leave them alone.
BUDGETS = REPOSITORY / "tests" / "budgets.toml"
BUDGET_STEP = 50

# Private by their spelling, public by their documentation: what every NamedTuple has.
OF_NAMED_TUPLES = frozenset({"_asdict", "_replace", "_make", "_fields", "_field_defaults"})

# What breaks a rule today: path -> names. These lists may only shrink: an entry that is not needed any more fails, too.
#
# (private) Attributes of other files' objects. The asyncio front is a second front of one Consumer: it needs a core
# object that both share. handles, consuming and signals belong to that front. testing/ moves the clock of a Marshal and
# looks into its drivers: the virtual world of the simulator is to serve it.
PRIVATE_STILL = {
    "marshal_py/admin/async_marshal.py": {"_advisories", "_context"},
    "marshal_py/client/async_consumer.py": {
        *("_acked", "_begin_consume", "_begin_drain", "_confirmations", "_consuming", "_context", "_flush"),
        *("_inside", "_iterating", "_log_end", "_pass", "_queue", "_read_to", "_receiving", "_user"),
    },
    "marshal_py/client/consuming.py": {"_confirmations", "_delivers"},
    "marshal_py/client/signals.py": {"_ending"},
    "marshal_py/testing/cluster.py": {"_confirmations", "_consumer", "_context", "_driver", "_joining", "_loop"},
    "marshal_py/testing/messages.py": {"_delivered", "_raw"},
}
# (spread) Classes in two files. The parts of a member know its state and not the member, which knows its parts.
SPREAD_STILL = {"marshal_py/protocol/member/member_state.py": {"MemberState"}}
# (long) Functions with more lines than one idea has: none.
LONG_STILL: dict[str, set[str]] = {}
STILL = {"private": PRIVATE_STILL, "spread": SPREAD_STILL, "long": LONG_STILL}

PROOF_NAME = re.compile(rf"{PROOF}(\.\w+)+")

PYTEST_PLUGIN = f"{PACKAGE}/testing/plugin.py"

ModuleName = tuple[str, ...]
Graph = dict[ModuleName, set[ModuleName]]  # what each module imports


class Violation(NamedTuple):
    rule: str
    path: str
    line: int
    message: str
    name: str = ""  # of what breaks the rule, in the lists of today

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
        return top_of(self.name)

    @property
    def room(self) -> str:
        return room_of(self.name)


class Code(NamedTuple):
    """One file, parsed once for all rules. `nodes`: all of its tree, from the top."""

    module: Module
    tree: ast.Module
    nodes: list[ast.AST]


def code_of(module: Module) -> Code:
    tree = ast.parse(module.text, filename=module.path)
    return Code(module, tree, [*ast.walk(tree)])


class Import(NamedTuple):
    target: ModuleName
    line: int
    is_lazy: bool = True  # it happens when a function is called, or never, as under TYPE_CHECKING


def top_of(name: ModuleName) -> str:
    """The package that a module belongs to: one below marshal_py, or marshal_sim. A public module's own name."""
    if name[0] == PROOF:
        return PROOF
    return name[1] if len(name) > 1 else "__init__"


def room_of(name: ModuleName) -> str:
    """The room that a module belongs to; "" if it is directly in its package, or the package has no rooms."""
    at = 1 if name[0] == PROOF else 2
    return name[at] if len(name) > at and name[at] in ROOMS.get(top_of(name), ()) else ""


def is_room(module: Module) -> bool:
    """Whether a module is a whole room: the `__init__` of a folder, or its one file."""
    return (
        module.room != "" and module.name[-1] == module.room and len(module.name) == (2 if module.top == PROOF else 3)
    )


def place_of(name: ModuleName) -> str:
    """ "client/driver" for a file of a room, "client" for one directly in a package."""
    return "/".join(filter(None, (top_of(name), room_of(name))))


def modules_of(root: Path) -> list[Module]:
    found = []
    for file in sorted([*(root / PACKAGE).rglob("*.py"), *(root / PROOF).rglob("*.py")]):
        relative = file.relative_to(root)
        is_package = file.name == "__init__.py"
        name = relative.parent.parts if is_package else relative.with_suffix("").parts
        found.append(Module(relative.as_posix(), name, is_package, file.read_text(encoding="utf-8")))
    return found


def imports_of(code: Code, known: frozenset[ModuleName]) -> Iterator[Import]:
    """Every import of a file, resolved: `from .a import b` is the module `a.b` if there is one, otherwise `a`."""
    module, eager = code.module, set(code.tree.body)
    for node in code.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(tuple(alias.name.split(".")), node.lineno, node not in eager)
        elif isinstance(node, ast.ImportFrom):
            source = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                package = module.name if module.is_package else module.name[:-1]
                source = package[: len(package) - (node.level - 1)] + source
            for alias in node.names:
                inner = (*source, alias.name)
                yield Import(inner if inner in known else source, node.lineno, node not in eager)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PROOF_NAME.fullmatch(node.value):
            yield Import(tuple(node.value.split(".")), node.lineno)  # whatever imports it by this name
        elif isinstance(node, ast.Call):
            # import_module("a.b") and __import__("a.b"): an import that happens to be spelled as a call.
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            argument = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield Import(tuple(str(argument.value).split(".")), node.lineno)


def doors_of(codes: list[Code]) -> dict[str, frozenset[str]]:
    """The doors of each room: what its `__init__` lists as DOORS."""
    found = {}
    for module, tree, _ in codes:
        if not (module.is_package and module.room):
            continue
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "DOORS":
                assert node.value is not None
                found[place_of(module.name)] = frozenset(ast.literal_eval(node.value))
    return found


def may_touch_kafka(module: Module) -> bool:
    return module.top == "transport" or module.path == f"{PACKAGE}/spark/stream/range_reader.py"


def broken_by(module: Module, target: ModuleName, is_lazy: bool) -> Iterator[tuple[str, str]]:
    """The rules about packages that one import breaks, each with a message."""
    dotted = ".".join(target)
    if target[0] not in (PACKAGE, PROOF):
        if module.top in ("protocol", "errors") and target[0] in FORBIDDEN_IN_CORE:
            yield "core", f"imports {dotted}; the core gets it as an argument or does without"
        if target[0] == "confluent_kafka" and not may_touch_kafka(module):
            yield "kafka", f"imports {dotted}; only transport/ and spark/stream/range_reader.py use the Kafka client"
        if target[0] in ("pytest", "_pytest") and module.path != PYTEST_PLUGIN:
            yield "pytest", f"imports {dotted}; users who do not test with pytest do not have it"
        return

    if module.room in ("oracle", "judge"):
        if target[0] != PROOF or room_of(target) not in ("oracle", module.room):
            yield "alone", f"imports {dotted}; a judge shares no code with what it judges"
        return
    if target[0] == PROOF:
        if module.top != PROOF and module.path != RUNS_THE_PROOF:
            yield "proof", f"imports {dotted}; only the list of commands names it"
        elif module.top != PROOF and not is_lazy:
            yield "proof", f"imports {dotted} at its top; every command of the product would load the proof"
        return

    if module.top in PUBLIC_MODULES or module.top not in (*PACKAGES, PROOF):
        return  # a public module may import anything; an unknown place is reported once, by the rule "place"
    top = top_of(target)
    if top == "transport" and module.top == "history":
        yield "history", f"imports {dotted}; history reads verdicts and never Kafka"
    if top not in PACKAGES:
        yield "order", f"imports {dotted}; that is a public module, which nothing inside the package imports"
    elif module.top == PROOF:
        if top not in PROVEN and (module.room, top) != ("commands", "cli"):
            yield "order", f"imports {dotted}; the proof does not prove {top}"
    elif PACKAGES.index(top) > PACKAGES.index(module.top):
        yield "order", f"imports {dotted}; {top} comes after {module.top}"


def broken_by_rooms(module: Module, target: ModuleName, doors: dict[str, frozenset[str]]) -> Iterator[tuple[str, str]]:
    """The rules about rooms that one import of a file that exists breaks, each with a message."""
    dotted, top, room = ".".join(target), top_of(target), room_of(target)
    if top == module.top and (room or module.room) and room != module.room:
        order = (*ROOMS[top], "")
        if order.index(room) > order.index(module.room):
            yield "room", f"imports {dotted}; {room or 'a file directly in ' + top} comes after {module.room}"
    if room and place_of(target) != place_of(module.name):
        inner = target[(2 if target[0] == PROOF else 3) :]
        if inner and inner[0] not in doors.get(place_of(target), frozenset()):
            yield "door", f"imports {dotted}; {inner[0]} is not among the DOORS of {place_of(target)}"


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


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in OF_NAMED_TUPLES


def own_names(code: Code) -> set[str]:
    """The private names that a file defines: functions, classes, variables, attributes of `self`."""
    found = set()
    for node in code.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def is_own(value: ast.expr) -> bool:
    """Whether an expression is the object or class that the code belongs to: self, cls, super()."""
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def private_violations(codes: list[Code]) -> Iterator[Violation]:
    """A file uses the private name of an object of another file. `mutants` may: replacing such parts is its purpose."""
    own = {code.module.path: own_names(code) for code in codes}
    ours = set().union(*own.values())
    for code in codes:
        path = code.module.path
        if place_of(code.module.name) == f"{PROOF}/mutants":
            continue
        for node in code.nodes:
            used = []
            if isinstance(node, ast.Attribute) and not is_own(node.value):
                used = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                used = [alias.name for alias in node.names]
            for name in used:
                if is_private(name) and name in ours - own[path]:
                    assert isinstance(node, ast.Attribute | ast.ImportFrom)
                    yield Violation(
                        "private", path, node.lineno, f"uses {name}, which is private to another file", name
                    )


def spread_violations(codes: list[Code]) -> Iterator[Violation]:
    """A class that nobody makes, and whose only subclass is in its room, is a part of that subclass."""
    places = {code.module.name: code.module for code in codes}
    subclasses: dict[ModuleName, list[ModuleName]] = defaultdict(list)
    used: Counter[ModuleName] = Counter()
    lines = {}
    for code in codes:
        module, names = code.module, {}
        for node in code.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    names[alias.asname or alias.name] = (*node.module.split("."), alias.name)
        for node in code.tree.body:
            if isinstance(node, ast.ClassDef):
                names[node.name] = (*module.name, node.name)
                lines[names[node.name]] = node.lineno
        for node in code.nodes:
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    plain = base.value if isinstance(base, ast.Subscript) else base
                    if isinstance(plain, ast.Name) and plain.id in names:
                        subclasses[names[plain.id]].append((*module.name, node.name))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                used[names[node.func.id]] += 1
    for name, found in subclasses.items():
        if len(found) == 1 and name in lines and not used[name]:
            module, other = places[name[:-1]], places[found[0][:-1]]
            if place_of(module.name) == place_of(other.name) and module is not other:
                text = f"{name[-1]} is only there for {found[0][-1]} of {other.path}: they are one class"
                yield Violation("spread", module.path, lines[name], text, name[-1])


def long_violations(codes: list[Code]) -> Iterator[Violation]:
    for code in codes:
        for node in code.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    text = f"{node.name} has {lines} lines; at most {FUNCTION_LINES_MAX}"
                    yield Violation("long", code.module.path, node.lineno, text, node.name)


def is_policy(node: ast.expr) -> bool:
    """Whether an expression is called a policy."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.endswith("policy")


def policy_violations(codes: list[Code]) -> Iterator[Violation]:
    """A file of the product spells the name of a policy outside the places where policies are defined."""
    for code in codes:
        module = code.module
        if module.top == PROOF or module.path.startswith(POLICY_PLACES):
            continue
        given: set[ast.AST] = set()  # below a comparison with a policy, or a parameter that is one
        for node in code.nodes:
            if isinstance(node, ast.Compare) and any(map(is_policy, [node.left, *node.comparators])):
                given.update(inner for side in node.comparators for inner in ast.walk(side))
            elif isinstance(node, ast.keyword) and node.arg == "policy":
                given.update(ast.walk(node.value))
        for node in code.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in POLICY_NAMES:
                if node.value not in USUAL or node in given:
                    text = f"spells the policy {node.value}: ask its value (protocol/fold/policies.py)"
                    yield Violation("policy", module.path, node.lineno, text, node.value)


def budget_violations(modules: list[Module], budgets: Mapping[str, int]) -> Iterator[Violation]:
    lines: Counter[str] = Counter()
    for module in modules:
        lines[place_of(module.name)] += len(module.text.splitlines())
    for place, count in sorted(lines.items()):
        budget = budgets.get(place)
        if budget is None:
            yield Violation("budget", place, count, f"{place} has {count} lines and no line in budgets.toml")
        elif count > budget:
            yield Violation("budget", place, count, f"{place} has {count} lines; its budget is {budget}")
        elif budget % BUDGET_STEP:
            yield Violation("budget", place, count, f"{budget} is no multiple of {BUDGET_STEP}")
    for place in sorted(budgets.keys() - lines.keys()):
        yield Violation("budget", place, 0, f"budgets.toml names {place}, which does not exist")


def violations(root: Path, budgets: Mapping[str, int] | None = None) -> list[Violation]:
    codes = [code_of(module) for module in modules_of(root)]
    modules = [code.module for code in codes]
    known = frozenset(module.name for module in modules)
    doors = doors_of(codes)
    graph: Graph = {name: set() for name in known}
    found = []
    for code in codes:
        module = code.module
        if module.top not in (*PACKAGES, *PUBLIC_MODULES, PROOF):
            found.append(
                Violation("place", module.path, 1, f"{module.top} is neither a known package nor a public module")
            )
        elif module.is_package and module.top in ROOMS and not module.room and module.name[-1] != module.top:
            found.append(Violation("place", module.path, 1, f"{module.name[-1]} is no room of {module.top}"))
        elif module.room and not is_room(module) and place_of(module.name) not in doors:
            found.append(Violation("door", module.path, 1, f"the __init__ of {place_of(module.name)} lists no DOORS"))
        for part in module.name[1:]:
            if part.strip("_") in EMPTY_NAMES:
                found.append(Violation("name", module.path, 1, f"{part} does not say what is in it"))
        for target, line, is_lazy in imports_of(code, known):
            if target in known and top_of(target) == module.top:  # across packages, the order forbids circles
                graph[module.name].add(target)
            broken = [*broken_by(module, target, is_lazy)]
            if target in known:
                broken += broken_by_rooms(module, target, doors)
            found.extend(Violation(rule, module.path, line, message) for rule, message in broken)
    found.extend(circle_violations(modules, graph))
    found += [*private_violations(codes), *spread_violations(codes), *long_violations(codes), *policy_violations(codes)]
    if budgets is not None:
        found.extend(budget_violations(modules, budgets))
    return sorted(set(found))


def without_those_of_today(
    found: list[Violation], still: Mapping[str, Mapping[str, set[str]]] = STILL
) -> list[Violation]:
    """Takes out what the lists of today allow, and adds a violation for each entry of them that allows nothing."""
    entries = {(rule, path, name) for rule, paths in still.items() for path, names in paths.items() for name in names}
    met = {(one.rule, one.path, one.name) for one in found} & entries
    left = [one for one in found if (one.rule, one.path, one.name) not in entries]
    return left + [
        Violation(rule, path, 1, f"{name} is allowed to break this rule, and does not", name)
        for rule, path, name in sorted(entries - met)
    ]


def test_the_packages_obey_the_rules() -> None:
    found = without_those_of_today(violations(REPOSITORY, tomllib.loads(BUDGETS.read_text(encoding="utf-8"))["lines"]))
    assert not found, "\n".join(map(str, found))


def test_the_checker_reads_the_packages() -> None:
    """A wrong path would make the test above pass on nothing."""
    paths = {module.path for module in modules_of(REPOSITORY)}
    assert f"{PACKAGE}/__init__.py" in paths
    assert f"{PACKAGE}/errors.py" in paths
    for package, rooms in ROOMS.items():
        folder = package if package == PROOF else f"{PACKAGE}/{package}"
        for room in rooms:
            assert any(path.startswith((f"{folder}/{room}/", f"{folder}/{room}.py")) for path in paths), (package, room)


# A tree that obeys every rule and uses everything that the rules allow.
CLEAN = {
    "marshal_py/__init__.py": "from marshal_py import aio, embedded\nfrom marshal_py.client.marshal import connect\n",
    "marshal_py/aio.py": "from marshal_py.client import marshal\n",
    "marshal_py/embedded.py": "from marshal_py.transport.embedded import Broker\n",
    "marshal_py/errors.py": "import enum\n",
    "marshal_py/protocol/__init__.py": "",
    "marshal_py/protocol/wire/__init__.py": "DOORS: tuple[str, ...] = ('codec', 'records')\n",
    "marshal_py/protocol/wire/codec.py": "import msgspec\nfrom ... import errors\nfrom . import records, varint\n",
    "marshal_py/protocol/wire/records.py": "from marshal_py.errors import BadInput\n",
    "marshal_py/protocol/wire/varint.py": "",
    "marshal_py/protocol/fold/__init__.py": "DOORS: tuple[str, ...] = ()\n",
    "marshal_py/protocol/fold/world.py": "from marshal_py.protocol.wire import codec\n",
    "marshal_py/history/explain.py": "from ..protocol.wire.codec import decode\n",
    "marshal_py/transport/embedded.py": "import os, threading\nfrom confluent_kafka import Producer\n",
    "marshal_py/transport/kafka.py": "import confluent_kafka.admin\nfrom marshal_py.protocol.wire import records\n",
    "marshal_py/client/__init__.py": "",
    "marshal_py/client/connection.py": "",
    "marshal_py/client/values/__init__.py": "DOORS: tuple[str, ...] = ()\n",
    "marshal_py/client/driver/__init__.py": "DOORS: tuple[str, ...] = ('loop',)\n",
    "marshal_py/client/driver/loop.py": "import marshal_py.protocol.wire.codec\n",
    "marshal_py/client/marshal.py": "import time\nimport marshal_py.transport.kafka\nfrom .driver import loop\n",
    "marshal_py/client/planner.py": "from . import connection\n",
    "marshal_py/admin/__init__.py": "",
    "marshal_py/admin/marshal.py": "from marshal_py.client import marshal\n",
    "marshal_py/spark/stream/__init__.py": "DOORS: tuple[str, ...] = ()\n",
    "marshal_py/spark/stream/range_reader.py": "from confluent_kafka import Consumer\n",
    "marshal_py/cli/__init__.py": "from marshal_py.admin import marshal\n",
    "marshal_py/cli/app.py": "def load():\n    return 'marshal_sim.commands.verify'\n",
    "marshal_sim/__init__.py": "",
    "marshal_sim/oracle/__init__.py": "DOORS: tuple[str, ...] = ('oracle',)\n",
    "marshal_sim/oracle/oracle.py": "import struct\nfrom marshal_sim.oracle.wire import decode\n",
    "marshal_sim/oracle/wire.py": "import zlib\n",
    "marshal_sim/judge/__init__.py": "DOORS: tuple[str, ...] = ('auditor',)\n",
    "marshal_sim/judge/auditor.py": "from marshal_sim.judge import evidence\nfrom marshal_sim.oracle import oracle\n",
    "marshal_sim/judge/evidence.py": "",
    "marshal_sim/cluster/__init__.py": "DOORS: tuple[str, ...] = ('run',)\n",
    "marshal_sim/cluster/clock.py": "",
    "marshal_sim/tools/__init__.py": "DOORS: tuple[str, ...] = ()\n",
    "marshal_sim/cluster/run.py": "from marshal_py.protocol.wire import codec\nfrom ..judge import auditor\n",
    "marshal_sim/commands/__init__.py": "DOORS: tuple[str, ...] = ('verify',)\n",
    "marshal_sim/commands/verify.py": "from marshal_py.cli import output\nfrom marshal_sim.cluster import run\n",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in {**CLEAN, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def test_a_clean_tree_has_no_violation(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, {})) == []


PLANTED = [
    # (a) the order of the packages, however the import is spelled
    ("order", "marshal_py/errors.py", "from marshal_py.protocol.wire import records"),
    ("order", "marshal_py/protocol/wire/varint.py", "from marshal_py.history.explain import explain"),
    ("order", "marshal_py/protocol/wire/varint.py", "from ...transport import kafka"),
    ("order", "marshal_py/protocol/wire/varint.py", "from ... import client"),
    ("order", "marshal_py/transport/memory.py", "import marshal_py.client.marshal"),
    ("order", "marshal_py/client/driver/loop.py", "from marshal_py.admin import marshal"),
    ("order", "marshal_py/admin/plan.py", "def run():\n    from marshal_py.cli import main"),
    ("order", "marshal_py/admin/plan.py", "if TYPE_CHECKING:\n    from marshal_py.cli.state import state"),
    (
        "order",
        "marshal_py/admin/plan.py",
        "from importlib import import_module\nimport_module('marshal_py.spark.reports')",
    ),
    ("order", "marshal_py/spark/stream/backfills.py", "__import__('marshal_py.cli')"),
    ("order", "marshal_sim/cluster/clock.py", "from marshal_py.cli import main"),
    ("order", "marshal_sim/cluster/clock.py", "from marshal_py.testing import make_message"),
    # nothing inside imports a public module
    ("order", "marshal_py/cli/demo.py", "import marshal_py"),
    ("order", "marshal_py/cli/demo.py", "from marshal_py import connect"),
    ("order", "marshal_py/client/driver/loop.py", "from marshal_py import embedded"),
    ("order", "marshal_py/client/driver/loop.py", "from marshal_py.aio import connect"),
    ("order", "marshal_py/cli/demo/__init__.py", "from marshal_py.testing import make_message"),
    # the order of the rooms, and their doors
    ("room", "marshal_py/protocol/wire/varint.py", "from marshal_py.protocol.fold import FOLD_VERSION"),
    ("room", "marshal_py/client/values/info.py", "from marshal_py.client.driver.loop import Loop"),
    ("room", "marshal_py/client/values/info.py", "from marshal_py.client.connection import Context"),
    ("room", "marshal_py/client/values/info.py", "def run():\n    from marshal_py.client.marshal import connect"),
    ("room", "marshal_sim/cluster/clock.py", "from marshal_sim.tools import TOOLS"),
    ("door", "marshal_py/protocol/fold/world.py", "from marshal_py.protocol.wire.varint import read"),
    ("door", "marshal_py/client/marshal.py", "from marshal_py.protocol.wire import varint"),
    ("door", "marshal_sim/cluster/run.py", "import marshal_sim.judge.evidence"),
    # the product does not import the proof
    ("proof", "marshal_py/cli/state.py", "from marshal_sim.cluster import run"),
    ("proof", "marshal_py/__init__.py", "import marshal_sim"),
    ("proof", "marshal_py/client/driver/loop.py", "def run():\n    import marshal_sim.cluster.run"),
    ("proof", "marshal_py/cli/app.py", "from marshal_sim.commands.verify import verify"),
    ("proof", "marshal_py/cli/state.py", "PROOF = 'marshal_sim.cluster.run'"),
    # a judge shares no code with what it judges
    ("alone", "marshal_sim/oracle/wire.py", "from marshal_py.protocol.wire import codec"),
    ("alone", "marshal_sim/oracle/fold.py", "from marshal_py.errors import BadInput"),
    ("alone", "marshal_sim/judge/evidence.py", "from marshal_sim.mutants import MUTANTS"),
    ("alone", "marshal_sim/judge/model.py", "import marshal_py"),
    # a file in no known package or room
    ("place", "marshal_py/extras.py", ""),
    ("place", "marshal_py/server/http.py", ""),
    ("place", "marshal_py/client/lobby/__init__.py", ""),
    # (c) who uses the Kafka client
    ("kafka", "marshal_py/client/driver/loop.py", "import confluent_kafka"),
    ("kafka", "marshal_py/spark/stream/backfills.py", "from confluent_kafka import Consumer"),
    ("kafka", "marshal_py/cli/consume.py", "def run():\n    from confluent_kafka.admin import AdminClient"),
    ("kafka", "marshal_py/__init__.py", "import confluent_kafka as kafka"),
    ("kafka", "marshal_sim/oracle/wire.py", "import confluent_kafka"),
    ("pytest", "marshal_py/testing/cluster.py", "import pytest"),
    # (d) names that say nothing
    *[("name", f"marshal_py/client/{name}.py", "") for name in sorted(EMPTY_NAMES)],
    ("name", "marshal_py/client/_helpers.py", ""),
    ("name", "marshal_py/transport/common/__init__.py", ""),
]


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, rule: str, name: str, text: str) -> None:
    found = violations(plant(tmp_path, {name: text}))
    assert {(violation.rule, violation.path) for violation in found} == {(rule, name)}


IN = "marshal_py/client"
CIRCLES = [
    {f"{IN}/acks.py": "from . import message", f"{IN}/message.py": "from marshal_py.client.acks import Acks"},
    {f"{IN}/acks.py": "from . import message", f"{IN}/message.py": "if TYPE_CHECKING:\n    from .acks import Acks"},
    {f"{IN}/acks.py": "from . import message", f"{IN}/message.py": "def ack():\n    from .acks import Acks"},
    {f"{IN}/acks.py": "from . import buffers", f"{IN}/buffers.py": "from . import message"}
    | {f"{IN}/message.py": "from .acks import Acks"},
]


@pytest.mark.parametrize("files", CIRCLES)
def test_files_that_import_each_other_are_found(tmp_path: Path, files: dict[str, str]) -> None:
    """(f) In one package too, also for a type alone, inside a function, and through a third file."""
    (found,) = violations(plant(tmp_path, files))
    assert (found.rule, found.path) == ("circle", f"{IN}/acks.py")
    assert found.message.startswith(" -> ".join(["acks", *(Path(name).stem for name in [*files][1:]), "acks"]))


def test_each_circle_is_reported_once_and_alone(tmp_path: Path) -> None:
    """A file that imports one of a circle is not in it."""
    files = {**CIRCLES[0], f"{IN}/reader.py": "from . import acks", "marshal_py/admin/a.py": "from . import b"}
    other = {"marshal_py/admin/b.py": "from . import a\nfrom marshal_py.client import reader"}
    found = violations(plant(tmp_path, {**files, **other}))
    assert [violation.message.split("; ")[1] for violation in found] == [
        "these import each other: a b",
        "these import each other: acks message",
    ]


def test_a_room_without_doors_is_found(tmp_path: Path) -> None:
    (found,) = violations(
        plant(tmp_path, {"marshal_py/client/process/__init__.py": "", "marshal_py/client/process/a.py": ""})
    )
    assert (found.rule, found.path) == ("door", "marshal_py/client/process/a.py")


PRIVATE = [
    {"marshal_py/client/a.py": "class A:\n    def __init__(self):\n        self._x = 1"}
    | {"marshal_py/client/b.py": "def f(a):\n    return a._x"},
    {"marshal_py/client/a.py": "class A:\n    _x: int"} | {"marshal_py/client/b.py": "def f(a):\n    a.b._x = 1"},
    {"marshal_py/client/a.py": "def _x(): pass"} | {"marshal_py/client/b.py": "from marshal_py.client.a import _x"},
    {"marshal_py/client/a.py": "_x = 1"} | {"marshal_py/client/b.py": "from marshal_py.client import a\na._x"},
]


@pytest.mark.parametrize("files", PRIVATE)
def test_a_private_name_of_another_file_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    """(g) An attribute, also one that is only annotated; a function; a variable."""
    (found,) = violations(plant(tmp_path, files))
    assert (found.rule, found.path, found.name) == ("private", "marshal_py/client/b.py", "_x")


def test_private_names_of_its_own_and_of_other_libraries_are_a_files_business(tmp_path: Path) -> None:
    files = {
        "marshal_py/client/a.py": "class A:\n    def __init__(self, other):\n        self._x = other._x",
        "marshal_py/client/b.py": "class B(A):\n    def f(self):\n        return self._x + super()._x",
        "marshal_py/client/c.py": "def f(pair):\n    return pair._replace(x=pair._fields), os._exit",
        "marshal_sim/mutants/__init__.py": "DOORS: tuple[str, ...] = ()",
        "marshal_sim/mutants/d.py": "def plant(a):\n    a._x = 2",
    }
    assert violations(plant(tmp_path, files)) == []


BASE = "class Rows:\n    pass"


def test_a_class_that_is_spread_over_two_files_is_found(tmp_path: Path) -> None:
    """(h) Nobody makes a Rows, and there is one kind of it."""
    whole = "from marshal_py.client.rows import Rows\nclass Table(Rows):\n    pass"
    files = {"marshal_py/client/rows.py": BASE, "marshal_py/client/table.py": whole}
    (found,) = violations(plant(tmp_path, files))
    assert (found.rule, found.path, found.name) == ("spread", "marshal_py/client/rows.py", "Rows")


@pytest.mark.parametrize(
    "other",
    [
        {"marshal_py/client/rows.py": BASE + "\nempty = Rows()"},  # of use without the subclass
        {"marshal_py/client/list.py": "from marshal_py.client.rows import Rows\nclass List(Rows):\n    pass"},
    ],
)
def test_a_class_with_a_life_of_its_own_may_have_a_subclass(tmp_path: Path, other: dict[str, str]) -> None:
    whole = "from marshal_py.client.rows import Rows\nclass Table(Rows):\n    pass"
    assert (
        violations(plant(tmp_path, {"marshal_py/client/rows.py": BASE, "marshal_py/client/table.py": whole} | other))
        == []
    )


@pytest.mark.parametrize(
    "code",
    [
        'MOVING = {"balanced", "x"}',
        'def f(group):\n    return group.config.policy == "pinned"',
        'def f(policy):\n    return policy in ("members", "x")',
        'def f(make):\n    return make(policy="topic")',
    ],
)
def test_the_name_of_a_policy_outside_its_value_is_found(tmp_path: Path, code: str) -> None:
    """(j) A name that is no other word anywhere; one that is, where it is compared with a policy or given as one."""
    (found,) = violations(plant(tmp_path, {"marshal_py/client/a.py": code}))
    assert (found.rule, found.path) == ("policy", "marshal_py/client/a.py")
    own = {f"{PACKAGE}/protocol/fold/policies.py": code, f"{PACKAGE}/protocol/policy.py": code}
    prose = {"marshal_py/client/a.py": 'COLUMNS = ("topic", "members")\nHELP = "balanced or greedy"'}
    assert violations(plant(tmp_path / "other", own | prose)) == []


def test_the_names_of_policies_are_those_that_there_are() -> None:
    assert KNOWN.keys() == POLICY_NAMES


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_long_function_is_found(tmp_path: Path, kind: str) -> None:
    """(i) One line more than there may be; a decorator does not count."""
    name, body = "marshal_py/client/a.py", "    x = 1\n" * (FUNCTION_LINES_MAX - 1)
    assert violations(plant(tmp_path, {name: f"@command\n{kind} f():\n{body}"})) == []
    (found,) = violations(plant(tmp_path, {name: f"{kind} f():\n{body}    x = 2"}))
    assert (found.rule, found.path, found.name) == ("long", name, "f")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"client/driver": 0}, "client/driver has 2 lines; its budget is 0"),
        ({"client/driver": None}, "client/driver has 2 lines and no line in budgets.toml"),
        ({"client/driver": 51}, "51 is no multiple of 50"),
        ({"client/lobby": 50}, "budgets.toml names client/lobby, which does not exist"),
    ],
)
def test_a_room_beyond_its_budget_is_found(tmp_path: Path, change: dict[str, int | None], message: str) -> None:
    """(e) A room that has grown, a room without a budget, a number that invites trimming, a budget without a room."""
    root = plant(tmp_path, {})
    budgets = {place_of(module.name): BUDGET_STEP for module in modules_of(root)}
    assert violations(root, budgets) == []
    changed = {place: lines for place, lines in {**budgets, **change}.items() if lines is not None}
    assert [(found.rule, found.message) for found in violations(root, changed)] == [("budget", message)]


def test_the_lists_of_today_allow_what_they_name_and_no_more(tmp_path: Path) -> None:
    """A name that is not in its list is reported, and so is an entry that is not needed any more."""
    found = violations(plant(tmp_path, PRIVATE[0]))
    path = "marshal_py/client/b.py"
    assert without_those_of_today(found, {"private": {path: {"_x"}}}) == []
    assert without_those_of_today(found, {"private": {path: set()}}) == found
    assert without_those_of_today(found, {"long": {path: {"_x"}}})[:-1] == found
    (left,) = without_those_of_today([], {"private": {path: {"_x"}}})
    assert left.message == "_x is allowed to break this rule, and does not"


@pytest.mark.parametrize("name", ["protocol/wire/varint.py", "protocol/fold/greedy.py", "errors.py"])
@pytest.mark.parametrize("module", sorted(FORBIDDEN_IN_CORE))
@pytest.mark.parametrize("spelling", ["import {}", "from {} import x", "import {}.inner as y"])
def test_the_core_imports_nothing_forbidden(tmp_path: Path, name: str, module: str, spelling: str) -> None:
    """(b) Each forbidden module, in each spelling of an import. Kafka breaks two rules at once."""
    found = violations(plant(tmp_path, {f"{PACKAGE}/{name}": spelling.format(module)}))
    expected = {"core", "kafka"} if module == "confluent_kafka" else {"core"}
    assert {violation.rule for violation in found} == expected


def test_history_that_imports_a_transport_breaks_two_rules(tmp_path: Path) -> None:
    """(c) It breaks the order, and a rule of its own says that history never reads Kafka."""
    found = violations(plant(tmp_path, {"marshal_py/history/lag.py": "from ..transport.kafka import read"}))
    assert {violation.rule for violation in found} == {"history", "order"}


def test_a_violation_says_where(tmp_path: Path) -> None:
    (found,) = violations(plant(tmp_path, {"marshal_py/protocol/wire/lease.py": '"""Doc."""\n\nimport time\n'}))
    assert str(found).startswith("marshal_py/protocol/wire/lease.py:3: [core] imports time")
