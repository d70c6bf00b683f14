"""Other releases of confluent-kafka than the installed one, each in a folder that goes first on PYTHONPATH.

pip installs one release, without dependencies (it needs none at run time), into a cache folder
(``MARSHAL_CLIENTS_CACHE``, else ``~/.cache/marshal_py/confluent-kafka``) that all processes share. Nothing is written
inside the repository or the environment. The folder never contains incomplete releases, and one process fetches while
the others wait.

The releases are the lowest that pyproject.toml allows and that has a wheel for this Python, and on demand
(``make versions``) the newest of every minor version up to the installed one. POSIX only (flock).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import confluent_kafka

from tests.support.jars import locked

ROOT = Path(__file__).resolve().parents[2]
FETCH_TIMEOUT_S = 300.0  # 4 MB; five minutes is a very bad line


class ClientUnavailable(RuntimeError):
    """pip could not install this release. Tests do not catch it: a missing release is a failure, never a skip."""


def floor() -> tuple[int, int]:
    """The lowest minor version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = next(line for line in project["dependencies"] if line.startswith("confluent-kafka"))
    found = re.fullmatch(r"confluent-kafka>=(\d+)\.(\d+)", wanted)
    assert found is not None, wanted
    return int(found[1]), int(found[2])


def releases() -> list[str]:
    """The lowest release, and the newest of every minor version up to the installed one, as version specifiers."""
    (major, first), last = floor(), [int(part) for part in confluent_kafka.__version__.split(".")[:2]]
    assert last[0] == major, "a new major version: list here the minor versions before it"
    return [f"=={major}.{first}", *(f"~={major}.{minor}.0" for minor in range(first, last[1] + 1))]


def oldest() -> Path:
    """The folder of the lowest release that has a wheel for this Python."""
    failed: list[ClientUnavailable] = []
    for release in releases():
        try:
            return folder(release)
        except ClientUnavailable as error:
            failed.append(error)
    raise failed[0]


def version(folder: Path) -> str:
    """The release in a folder."""
    (info,) = folder.glob("confluent_kafka-*.dist-info")
    return info.name.removeprefix("confluent_kafka-").removesuffix(".dist-info")


def folder(release: str) -> Path:
    """The folder of this release, fetched if it is missing."""
    default = Path.home() / ".cache" / "marshal_py" / "confluent-kafka"
    cache = Path(os.environ.get("MARSHAL_CLIENTS_CACHE") or default).expanduser().absolute()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"{release.lstrip('=~')}{'-newest' if release[0] == '~' else ''}-{sys.implementation.cache_tag}"
    if not target.is_dir():
        with locked(cache / "fetch.lock"):
            if not target.is_dir():  # another process may have fetched while this one waited
                _fetch(release, cache, target)
    return target


def _fetch(release: str, cache: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as temporary:
        pip = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--target",
                f"{temporary}/whole",
                f"confluent-kafka{release}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=FETCH_TIMEOUT_S,
        )
        if pip.returncode != 0:
            raise ClientUnavailable(f"pip could not fetch confluent-kafka{release}:\n{pip.stdout}")
        Path(temporary, "whole").rename(target)
