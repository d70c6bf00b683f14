"""The JSON of commands: each has a schema, schemas only grow, and errors are JSON, too.

`python -m tests.cli.test_documents` writes schemas.json anew. What every test prints with --json is compared with its
schema besides (tests/support/documents.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import UNSET, Struct, UnsetType

from marshal_py.cli import output
from marshal_py.cli.app import COMMANDS, load
from marshal_py.cli.documents import Time, plain, schema_of, time_of, with_fields
from marshal_py.cli.schema import documents
from tests.support.command_line import invoke
from tests.support.documents import check, validator_of

KEPT = Path(__file__).with_name("schemas.json")
HOW = (
    "scripts read these fields: bring back what is gone, and add a field beside one that must change. If you must "
    "break them, CHANGELOG.md says so. `python -m tests.cli.test_documents` keeps the schemas as they are now"
)


def type_of(schema: dict[str, Any]) -> str:
    """A schema in words: integer, string | null, list[PartitionLag], "a" | "b"."""
    match schema:
        case {"$ref": ref}:
            return str(ref).rpartition("/")[2]
        case {"anyOf": several}:
            return " | ".join(sorted(map(type_of, several), key="null".__eq__))  # as new releases of msgspec do
        case {"enum": several}:
            return " | ".join(map(json.dumps, several))
        case {"type": "array", "items": dict(of)}:
            return f"list[{type_of(of)}]"
        case {"type": "object", "additionalProperties": dict(of)}:
            return f"dict[{type_of(of)}]"
    kind = schema.get("format", schema.get("type", "anything"))
    return " | ".join(kind) if isinstance(kind, list) else str(kind)


def schemas() -> dict[str, dict[str, str]]:
    """By command what it prints; and by document its fields. An optional field ends with a question mark."""
    printed = {name: schema_of(types) for name, types in documents().items()}
    found = {"": {name: type_of(schema) for name, schema in printed.items()}}
    for schema in printed.values():
        for name, of in schema.get("$defs", {}).items():
            fields = {
                key if key in of["required"] else f"{key}?": type_of(value) for key, value in of["properties"].items()
            }
            assert found.setdefault(name, fields) == fields, f"two documents are called {name}"
    return found


def losses(old: dict[str, dict[str, str]], new: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yields what a program that reads the old documents would miss in the new ones."""
    for name, fields in old.items():
        for key, kind in fields.items():
            now = new.get(name, {}).get(key)
            where = f"{name}.{key}" if name else f"marshal {key}"
            if now is None:
                yield f"{where} is gone"
            elif (before := {*kind.split(" | ")}) != (after := {*now.split(" | ")}) and not (
                _grows(name, kind) and before <= after
            ):
                yield f"{where} was {kind} and is {now}"


def _grows(name: str, kind: str) -> bool:
    return not name or kind.startswith('"')  # a command prints another document; another word comes up


def test_schemas_only_grow() -> None:
    kept, now = json.loads(KEPT.read_text(encoding="utf-8")), schemas()
    lost = list(losses(kept, now))
    assert not lost, f"{'; '.join(lost)}: {HOW}"
    assert kept == now, f"there is more now: {HOW}"


@pytest.mark.parametrize(
    ("new", "lost"),
    [
        ({"": {"ls": "A"}, "A": {"x": "integer", "y": '"a" | "b"', "z": "string"}}, []),
        ({"": {"ls": "A | B"}, "A": {"x": "integer", "y": '"a"'}}, []),
        ({"": {"ls": "A"}, "A": {"x": "integer | null", "y": '"a"'}}, ["A.x was integer and is integer | null"]),
        ({"": {"ls": "B"}, "A": {"y": '"b"'}}, ["marshal ls was A and is B", "A.x is gone", 'A.y was "a" and is "b"']),
    ],
)
def test_what_a_program_would_miss_is_found(new: dict[str, dict[str, str]], lost: list[str]) -> None:
    assert list(losses({"": {"ls": "A"}, "A": {"x": "integer", "y": '"a"'}}, new)) == lost


def test_each_command_with_json_says_what_it_prints() -> None:
    named = documents()
    for top in COMMANDS:
        found = load(top)
        for word, one in getattr(found, "commands", {"": found}).items():
            if any("--json" in parameter.opts for parameter in one.params):
                assert f"{top} {word}".strip() in named, f"marshal {top} {word}: name its documents by @prints"


class Row(NamedTuple):
    number: int
    from_: str


class Table(Struct):
    """Rows."""

    rows: list[Row]
    at: Time | None = None
    more: int | UnsetType = UNSET


@dataclass
class End:
    up_to: dict[int, int]


def test_a_document_is_as_its_schema_says() -> None:
    validator = validator_of([Table, End])
    check(plain(Table([Row(1, "a")], time_of(0))), validator)
    check(plain(End({0: 7})), validator)
    assert plain(Table([Row(1, "a")])) == {"rows": [{"number": 1, "from": "a"}], "at": None}
    assert json.loads(msgspec.json.encode(plain(End({0: 7})))) == {"up_to": {"0": 7}}
    for wrong in ({"rows": []}, {"rows": [], "at": "1970-01-01T00:00:00"}, {"rows": [], "at": None, "other": 1}):
        with pytest.raises(AssertionError):
            check(wrong, validator)


def test_a_document_takes_fields_of_another() -> None:
    (found,) = schema_of([with_fields("Named", Table, name=str, rows=int)])["$defs"].values()
    assert {name: type_of(of) for name, of in found["properties"].items()} == {
        "rows": "integer",
        "at": "date-time | null",
        "more": "integer",
        "name": "string",
    }
    assert (found["required"], found["description"]) == (["rows", "at", "name"], "Rows.")


def test_the_schema_of_a_command_is_printed() -> None:
    assert invoke(["schema"]).stdout.splitlines() == list(documents())
    assert json.loads(invoke(["schema", "groups", "ls"]).stdout) == schema_of(documents()["groups ls"])
    unknown = invoke(["schema", "group", "ls"])
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "did you mean 'groups ls'?" in unknown.stderr


@pytest.mark.parametrize(
    ("arguments", "name", "code"),
    [
        (["state", "--nothing", "--json"], "Usage", 2),
        (["state", "--json", "--since", "now"], "Usage", 2),
        (["doctor", "billing", "--json", "--dump", str(KEPT)], "Usage", 2),
        (["state", "--json", "--dump", str(KEPT)], "FileUnusable", 1),
    ],
)
def test_an_error_is_json_too(arguments: list[str], name: str, code: int) -> None:
    failed = invoke(arguments)
    assert (failed.exit_code, failed.stdout) == (code, "")
    told = json.loads(failed.stderr)
    check(told, validator_of(documents()["error"]))
    assert (told["error"], told["exit_code"], told["retriable"]) == (name, code, False)
    plainly = invoke([word for word in arguments if word != "--json"])
    assert told["text"] in " ".join(plainly.stderr.split())


def test_a_program_behind_two_dashes_has_its_own_json() -> None:
    assert "Usage:" in invoke(["run", "--nothing", "--", "python", "--json"]).stderr


if __name__ == "__main__":
    KEPT.write_text(json.dumps(schemas(), indent=1) + "\n", encoding="utf-8")
    output.say(f"{KEPT} is written")
