"""The options that say how commands read the keys and values that they print: deserializers and a Schema Registry."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from marshal_py.cli.options import CommonOptions
from marshal_py.cli.output import CommandFailed
from marshal_py.transport.serialization import Deserializer, registry_deserializer

REGISTRY: Final = "registry"  # instead of MODULE:FUNCTION
_METAVAR: Final = f"MODULE:FUNCTION|{REGISTRY}"
KeyDeserializer = Annotated[
    str | None,
    typer.Option(
        "--key-deserializer", metavar=_METAVAR, help="What reads the bytes of keys, as key_deserializer does in Python."
    ),
]
ValueDeserializer = Annotated[
    str | None,
    typer.Option(
        "--value-deserializer", metavar=_METAVAR, help="What reads values; with --schema-registry that is the registry."
    ),
]
SchemaRegistry = Annotated[
    str | None,
    typer.Option(
        "--schema-registry",
        metavar="URL",
        envvar="MARSHAL_SCHEMA_REGISTRY",
        help="Read values by the Avro and JSON schemas of this registry.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(CommonOptions):
    """The options of a command that prints messages."""

    key_deserializer: KeyDeserializer = None
    value_deserializer: ValueDeserializer = None
    schema_registry: SchemaRegistry = None

    def deserializers(self) -> dict[str, Any]:
        """Returns the arguments `key_deserializer` and `value_deserializer`, as consumers and topics take them. For a
        name that cannot be imported or called, and for a registry that is not named, the command ends with exit code
        2."""
        of_values = self.value_deserializer or (REGISTRY if self.schema_registry is not None else None)
        found: dict[str, Any] = {}
        for name, text in (("key_deserializer", self.key_deserializer), ("value_deserializer", of_values)):
            option = f"--{name.replace('_', '-')}"
            if text != REGISTRY:
                found[name] = None if text is None else _loaded(option, text)
            elif self.schema_registry is None:
                raise typer.BadParameter(f"{option} {REGISTRY}: name the registry by --schema-registry URL")
            else:
                found[name] = _registry(self.schema_registry)
        return found


def _loaded(option: str, text: str) -> Deserializer:
    """Returns the function that `text` names. Modules in the working folder are found too, as `python -m` does it."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise typer.BadParameter(f"{option} {text!r}: expected MODULE:FUNCTION or {REGISTRY}")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module does when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise typer.BadParameter(f"{option} {text!r}: {reason}; PYTHONPATH says where else modules are") from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise typer.BadParameter(f"{option} {text!r}: a {type(found).__name__} cannot be called")
    return found  # type: ignore[no-any-return]


def _registry(url: str) -> Deserializer:
    try:
        return registry_deserializer(url)
    except ImportError as error:
        raise CommandFailed(
            f"--schema-registry needs more packages ({error}): pip install 'marshal_py[schema-registry]'"
        ) from error
    except ValueError as error:
        raise typer.BadParameter(f"--schema-registry {url!r}: {error}") from error
