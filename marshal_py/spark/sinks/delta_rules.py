"""What a Delta table asks of its rows: columns, types, NOT NULL, CHECK. Whoever adds files to it must see to that.

delta-rs enforces nothing for files that others wrote. So what this file cannot check is refused: a table with a feature
of which it does not know that plain Parquet files keep its rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.schema import Field

from marshal_py.errors import InvalidOption
from marshal_py.spark.sinks.parquet_files import DataFile, refuse

_CHECK: Final = "delta.constraints."
# Features of writers that ask nothing of files with new rows, or what is checked here.
_KNOWN: Final = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "domainMetadata",
        "generatedColumns",
        "identityColumns",
        "inCommitTimestamp",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
_WRITER_MAX: Final = 7  # the version from which a table names its features
_SQL: Final = {"integer": "INT", "long": "BIGINT", "short": "SMALLINT", "byte": "TINYINT"}


class Rules:
    """The rules of a table as it is now. Two of them are equal if the rules are."""

    names: list[str]

    def __init__(self, table: DeltaTable, name: str) -> None:
        """Reads the rules of the table `name`. Raises InvalidOption if this writer cannot keep them."""
        self._name = name
        self._fields: dict[str, dict[str, Any]] = {
            field["name"]: field for field in json.loads(table.schema().to_json())["fields"]
        }
        self.names = list(self._fields)
        configuration, protocol = table.metadata().configuration, table.protocol()
        self._checks: dict[str, str] = {
            key.removeprefix(_CHECK): text for key, text in configuration.items() if key.startswith(_CHECK) and text
        }
        unknown = set(protocol.writer_features or ()) - _KNOWN
        mapping = configuration.get("delta.columnMapping.mode") or "none"
        if unknown or protocol.min_writer_version > _WRITER_MAX or mapping != "none":
            found = ", ".join(sorted(unknown)) or f"column mapping {mapping}, version {protocol.min_writer_version}"
            raise InvalidOption("table", name, f"one without {found}: this writer cannot keep its rules")
        for column, field in self._fields.items():
            made = sorted(
                key
                for key in field.get("metadata") or {}
                if key in ("delta.generationExpression", "delta.invariants") or key.startswith("delta.identity.")
            )
            if made:
                rule = f"a column without {', '.join(made)}: this writer cannot keep that (a CHECK constraint it can)"
                raise InvalidOption("table", f"{name}, column {column}", rule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and (self._fields, self._checks) == (other._fields, other._checks)

    __hash__ = None  # type: ignore[assignment]  # nobody needs it

    def check_types(self, given: Schema) -> list[Field]:
        """Returns the columns that the table lacks. Raises InvalidOption for another type."""
        new = []
        for field in given.fields:
            found, known = json.loads(field.to_json()), self._fields.get(field.name)
            if known is None:
                new.append(Field(field.name, field.type, nullable=True))
            elif not _fits(known["type"], found["type"]):
                rule = f"the type that the table {self._name} has: {_shown(known['type'])} (cast the column)"
                raise InvalidOption(f"column {field.name}", _shown(found["type"]), rule)
        return new

    def lacking(self, columns: Iterable[str]) -> dict[str, str]:
        """Returns the table's columns that are not in `columns`, with their types in Spark's SQL."""
        there = set(columns)
        return {name: _sql(field["type"]) for name, field in self._fields.items() if name not in there}

    def conditions(self) -> dict[str, str]:
        """Returns, by their names, conditions in Spark's SQL that are true for every row that the table takes."""
        not_null = [name for name, field in self._fields.items() if not field["nullable"]]
        return {
            **{f"NOT NULL of {name}": f"`{name}` IS NOT NULL" for name in not_null},
            **{f"CHECK {name} ({text})": text for name, text in self._checks.items()},
        }

    def check_files(self, files: Sequence[DataFile]) -> None:
        """Checks that no row breaks a condition. Raises InvalidOption."""
        for name in self.conditions():
            found = [file.broken[name] for file in files if name in file.broken]
            if found:
                refuse(self._name, name, found)


def _fits(known: Any, found: Any) -> bool:
    """Returns whether type `found` may be in a column of type `known`, in Delta's JSON. NULLs are looked for at the top
    alone; deeper, a type that may hold them does not fit one that may not."""
    if not isinstance(known, dict) or not isinstance(found, dict):
        return bool(known == found)
    if known["type"] != found["type"]:
        return False
    match known["type"]:
        case "struct":
            theirs = {field["name"]: field for field in found["fields"]}
            return [field["name"] for field in known["fields"]] == list(theirs) and all(
                _fits(field["type"], theirs[field["name"]]["type"])
                and (field["nullable"] or not theirs[field["name"]]["nullable"])
                for field in known["fields"]
            )
        case "array":
            nulls = known["containsNull"] or not found["containsNull"]
            return nulls and _fits(known["elementType"], found["elementType"])
        case "map":
            nulls = known["valueContainsNull"] or not found["valueContainsNull"]
            keys = _fits(known["keyType"], found["keyType"])
            return nulls and keys and _fits(known["valueType"], found["valueType"])
    return bool(known == found)


def nullable(field: pa.Field) -> pa.Field:
    """Returns the column as one that may hold NULL, at every depth."""
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([nullable(one) for one in kind])
    elif pa.types.is_list(kind):
        kind = pa.list_(nullable(kind.value_field))
    elif pa.types.is_map(kind):
        kind = pa.map_(kind.key_field, nullable(kind.item_field))
    return pa.field(field.name, kind)


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else json.dumps(kind)


def _sql(kind: Any) -> str:
    """Returns a type of Delta's JSON as Spark's SQL writes it."""
    if isinstance(kind, str):
        return _SQL.get(kind, kind)
    match kind["type"]:
        case "struct":
            return f"STRUCT<{', '.join('`{}`: {}'.format(one['name'], _sql(one['type'])) for one in kind['fields'])}>"
        case "array":
            return f"ARRAY<{_sql(kind['elementType'])}>"
    return f"MAP<{_sql(kind['keyType'])}, {_sql(kind['valueType'])}>"
