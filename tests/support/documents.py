"""Compares what commands print with --json with the JSON Schema that `marshal schema` prints of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from jsonschema import Draft202012Validator, FormatChecker

from marshal_py.cli.app import AS_JSON, COMMANDS, load
from marshal_py.cli.documents import Failure, schema_of

LINES: Final = 20  # of the first and of the last ones that are compared, where a command prints thousands
ANSWERING: Final = frozenset({"check", "simulate", "verify"})  # their exit code is an answer beside the document

_formats: Final = FormatChecker(formats=())


@_formats.checks("date-time")
def _has_a_zone(text: object) -> bool:
    try:
        return isinstance(text, str) and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def check_printed(arguments: Sequence[str], stdout: str, stderr: str, exit_code: int) -> None:
    """Fails if a command that was called with --json has printed anything else than its documents."""
    given = list(arguments)
    options = " ".join(given[: given.index("--") if "--" in given else None])
    if not AS_JSON.search(options) or given[0] not in COMMANDS:
        return
    lines = stdout.splitlines()
    for line in lines if len(lines) <= 2 * LINES else [*lines[:LINES], *lines[-LINES:]]:
        check(json.loads(line), _validator(given[0], given[1] if len(given) > 1 else ""))
    if exit_code and not (stdout and given[0] in ANSWERING):
        check(json.loads(stderr.splitlines()[-1]), _of_failures())


def check(document: Any, validator: Draft202012Validator) -> None:
    """Fails if the document is not as its schema says."""
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
    assert not errors, "\n".join([*errors, json.dumps(document)[:2_000]])


def strict(schema: Any) -> Any:
    """Returns the schema without room for fields that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**{key: strict(value) for key, value in schema.items()}, **more}


def validator_of(documents: Sequence[Any]) -> Draft202012Validator:
    return Draft202012Validator(strict(schema_of(documents)), format_checker=_formats)


@functools.cache
def _validator(command: str, word: str) -> Draft202012Validator:
    found = load(command)
    return validator_of(getattr(found, "commands", {word: found})[word].callback.prints)


@functools.cache
def _of_failures() -> Draft202012Validator:
    return validator_of([Failure])
