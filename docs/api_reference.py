"""Generates the API reference as HTML from the docstrings of the public modules: `make api`.

A module is public if it is directly in marshal_py and has `__all__`; so is `errors`, all of whose errors are public.
The pages come from pdoc, which renders docstrings as Markdown and links names in backticks. Nothing generated is kept
in the repository, so it cannot be out of date.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc
import pdoc.render

import marshal_py
from marshal_py import MarshalError, errors

# pdoc looks names in annotations up in the module of the class. It does not find those of a generated `__new__` (of a
# NamedTuple), of a signature that was made of another one (keywords.py), and of imports for type checkers alone. It
# prints them as they are written, which is what people should read anyway; tests/test_exports.py resolves the types.
UNRESOLVED = "Error parsing type annotation"


def public_modules() -> list[ModuleType]:
    """Returns the public modules."""
    names = [f"marshal_py.{module.name}" for module in pkgutil.iter_modules(marshal_py.__path__)]
    modules = map(importlib.import_module, ["marshal_py", *names])
    return [module for module in modules if module is errors or hasattr(module, "__all__")]


def public_names(module: ModuleType) -> list[str]:
    """Returns the public names of a public module: of `errors` the errors."""
    if module is errors:
        return [name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, MarshalError)]
    return list(module.__all__)


def build(folder: Path) -> list[Path]:
    """Writes one page per public module, and an index. Returns the pages.

    For pdoc, names that marshal_py.spark imports on first use become attributes of the module, for good.
    """
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text=f"marshal_py {marshal_py.__version__}")
    for module in public_modules():
        for name in public_names(module):
            setattr(module, name, getattr(module, name))
    modules = [module.__name__ for module in public_modules()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNRESOLVED, UserWarning)
        pdoc.pdoc(*modules, "!marshal_py.testing.plugin", output_directory=folder)
    return [folder / f"{name.replace('.', '/')}.html" for name in modules]


if __name__ == "__main__":
    for page in build(Path(sys.argv[1])):
        print(page)
