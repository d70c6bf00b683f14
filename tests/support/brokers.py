"""Kafka brokers in local JVMs, and what every cluster started here needs: settings, ports, readiness.

Nodes are combined (broker and controller in one process) and listen on 127.0.0.1. All files are in one temporary
folder, and the data are deleted at the end. Nodes are numbered from 1, as Kafka's own node ids.

On Linux, the kernel kills the brokers when the Python process that started them ends, however it ends. The kernel
watches the THREAD that started them, so clusters must be started from a thread that outlives them.

This file must not choose where a cluster comes from (kafka.py does), fetch anything (jars.py does), or sleep without
a condition to wait for.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.jars import LOG_TAIL_LINES, ClassArchive, KafkaUnavailable, cache_folder, find_java, kafka_jars

READY_TIMEOUT_S = 180.0  # Three cold JVMs on two busy cores need about 10 s; over 60 s were seen at a load of 35.
STOP_TIMEOUT_S = 30.0  # A clean stop takes 0.6 s, and some seconds more when the JVM writes its archive.
PROBE_TIMEOUT_S = 2.0  # One metadata answer. A frozen process accepts connections and never answers.
POLL_INTERVAL_S = 0.05  # Between two checks of a condition; well below any time that a test measures. And at least
CHECKS_APART = 3  # times the processor time of a check: one that runs a command would take it from what it waits for.
METADATA_BYTES_MAX = 1 << 20  # The answer lists a few brokers; a larger length means that it is not Kafka.
# Below the range from which Linux takes ports for outgoing connections (32768 and up): while a node is down, no client
# can sit on its port, so `restart` finds it free.
PORT_RANGE = range(15_000, 32_000)
PORT_TRIES_MAX = 1_000  # A random port is nearly always free.

# One thread for garbage collection and only the fast compiler: test brokers are started often and live briefly. The
# heap's upper bound is generous, because unused heap costs nothing.
JVM_OPTIONS = ("-Xms64m", "-Xmx512m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
LOG4J_PROPERTIES = """status=error
rootLogger.level=INFO
rootLogger.appenderRef.a.ref=F
appender.f.type=File
appender.f.name=F
appender.f.fileName=${sys:kafka.log.file}
appender.f.layout.type=PatternLayout
appender.f.layout.pattern=[%d] %p %m (%c)%n
"""

# Runs in the broker's process before java: asks the kernel for SIGKILL when the parent ends (1 is PR_SET_PDEATHSIG),
# checks that the parent has not ended meanwhile, and becomes java. A preexec_fn would do the same inside a fork of a
# process with many client threads, which Python rightly warns about.
DIE_WITH_PARENT = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])
"""


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Checks the condition until it holds. Raises a TimeoutError that names `what` if it does not hold in time."""
    deadline, used_s = time.monotonic() + timeout_s, time.process_time()
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(max(POLL_INTERVAL_S, CHECKS_APART * (time.process_time() - used_s)))
        used_s = time.process_time()


def brokers_seen_by(address: str) -> set[int]:
    """The ids of the live brokers that the node at host:port lists; empty if it does not answer.

    Sends one raw Metadata request (version 1, no topics). An open port is not enough: a broker opens it while the
    controller still fences it, and fenced brokers are not listed.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S) as connection:
            request = struct.pack(">hhih2si", 3, 1, 1, 2, b"mp", 0)
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as answer:
                (length,) = struct.unpack(">i", answer.read(4))
                body = answer.read(min(max(length, 0), METADATA_BYTES_MAX))
        return set(_broker_ids(body))
    except (OSError, struct.error):
        return set()


def _broker_ids(body: bytes) -> Iterator[int]:
    """Reads the broker array of a Metadata v1 answer: id, host, port, rack (nullable)."""
    (count,) = struct.unpack_from(">i", body, 4)  # after the correlation id
    at = 8
    for _ in range(count):
        broker, host_length = struct.unpack_from(">ih", body, at)
        at += 6 + host_length + 4
        (rack_length,) = struct.unpack_from(">h", body, at)
        at += 2 + max(rack_length, 0)
        yield broker


def await_ready(addresses: Mapping[int, str], wanted: Collection[int], check_alive: Callable[[int], None]) -> None:
    """Waits until each wanted node lists all wanted nodes. `check_alive` raises if a node has ended."""

    def ready() -> bool:
        for node in wanted:
            check_alive(node)
        return all(brokers_seen_by(addresses[node]) >= set(wanted) for node in wanted)

    wait_until(ready, READY_TIMEOUT_S, f"brokers {sorted(wanted)} serve and know each other")


def free_ports(count: int) -> list[int]:
    """Ports that are free now, and that the system gives to nobody who asks for any: not to a client of another test,
    and not to Spark, which would take whoever polls such a port for one of its workers.

    If another process takes one all the same before the server does, the server's start fails.
    """
    ports: set[int] = set()
    for _ in range(PORT_TRIES_MAX):
        if len(ports) == count:
            return list(ports)
        port = random.choice(PORT_RANGE)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    raise KafkaUnavailable(f"found no {count} free ports in {PORT_RANGE}")


def new_cluster_id() -> str:
    """A UUID as Kafka writes it. A leading dash would look like an option to the format tool."""
    text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return "A" + text[1:] if text.startswith("-") else text


def server_properties(node: int, voters: Collection[str]) -> dict[str, str]:
    """The settings that do not depend on where the node runs. `voters` are the controllers' addresses, in order."""
    replicas, in_sync = (3, 2) if len(voters) >= 3 else (1, 1)
    properties: dict[str, object] = {
        "process.roles": "broker,controller",
        "node.id": node,
        "controller.quorum.voters": ",".join(f"{i}@{voter}" for i, voter in enumerate(voters, 1)),
        "controller.listener.names": "CONTROLLER",
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "unclean.leader.election.enable": "false",
        # A misspelled topic is an error of the test, not a new topic.
        "auto.create.topics.enable": "false",
        # No wait for more members of a group, nor for a distant voter in an election.
        "group.initial.rebalance.delay.ms": 0,
        "controller.quorum.election.timeout.ms": 300,
        "controller.quorum.election.backoff.max.ms": 100,
        "broker.heartbeat.interval.ms": 500,
        # A small footprint.
        "num.network.threads": 2,
        "num.io.threads": 4,
        "background.threads": 2,
        "log.cleaner.threads": 1,
        "log.cleaner.dedupe.buffer.size": 4 * 1024 * 1024,
    }
    for internal in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        properties[f"{internal}.replication.factor"] = replicas
        properties[f"{internal}.num.partitions"] = 4  # Few partitions make the first use quick; the default is 50.
    properties["transaction.state.log.min.isr"] = in_sync
    properties["share.coordinator.state.topic.min.isr"] = in_sync
    if len(voters) >= 3:
        # A client that names its rack fetches from the replica there (KIP-392); others fetch from the leaders.
        properties["broker.rack"] = f"rack-{node}"
        properties["replica.selector.class"] = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
        # A dead or frozen broker is noticed after 2 s instead of 9 s, so that tests of fail-over are quick.
        properties["broker.session.timeout.ms"] = 2000
        # A broker whose controller freezes waits this long before it asks the next one. The default is 30 s, and
        # meanwhile it gives no id to a new idempotent producer and creates no topic (measured).
        properties["controller.socket.timeout.ms"] = 2000
    return {key: str(value) for key, value in properties.items()}


BATCH_HEAD_BYTES = 12  # of a record batch on disk: base offset and length, which the length does not count


class JvmNodes:
    """The brokers of one local cluster. `folder` belongs to it alone; the caller removes it after `close`."""

    def __init__(
        self,
        nodes: int,
        props: Mapping[str, str],
        folder: Path,
        listeners: Mapping[str, tuple[str, str]] | None = None,
        proxies: Mapping[int, int] | None = None,
        between: Mapping[int, int] | None = None,
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """`listeners`: what one node listens to besides, as name -> (security protocol, address). `proxies`: ports of a
        second listener of each node, PROXIED, as advertised -> real, in the order of the nodes. `between`: the same of
        the listener over which the nodes copy from each other, REPLICATION. `environment`: variables of a node."""
        self._java = find_java()
        cache = cache_folder()
        jars = kafka_jars(self._java, cache)
        self._class_path = os.pathsep.join(map(str, jars))
        self._archives = {name: ClassArchive(cache, name, self._java, jars) for name in ("format", "server")}
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._frozen: set[int] = set()
        self._trains_archive = False
        ports = [f"127.0.0.1:{port}" for port in free_ports(2 * nodes)]
        self.addresses = dict(enumerate(ports[:nodes], 1))
        self._environment = environment
        self._write_settings(ports[nodes:], props, listeners or {}, {"PROXIED": proxies, "REPLICATION": between})

    def start(self) -> None:
        self._format()
        for node in self.addresses:
            self._spawn(node)
        self._await(self.addresses)

    def kill(self, node: int) -> None:
        self._processes[node].kill()
        self._processes[node].wait(STOP_TIMEOUT_S)
        self._frozen.discard(node)

    def stop(self, node: int) -> None:
        self._processes[node].send_signal(signal.SIGSTOP)
        self._frozen.add(node)

    def cont(self, node: int) -> None:
        self._processes[node].send_signal(signal.SIGCONT)
        self._frozen.discard(node)

    def restart(self, node: int) -> None:
        self.kill(node)
        self._spawn(node)
        self._await([i for i, p in self._processes.items() if p.poll() is None and i not in self._frozen] or [node])

    def lose_tail(self, node: int, topic: str, partition: int, keep: int) -> None:
        """A power loss: kills the node and restarts it without the records from offset `keep` on (whole batches)."""
        self.kill(node)
        folder = self._home(node) / "data" / f"{topic}-{partition}"
        (segment,) = folder.glob("*.log")
        data, at, base = segment.read_bytes(), 0, -1
        while at < len(data) and base < keep:
            base, length = struct.unpack_from(">qi", data, at)  # of each batch: its first offset, its bytes from here
            start, at = at, at + BATCH_HEAD_BYTES + length
        assert base >= keep, f"{topic}-{partition} has no batch from {keep} on"
        os.truncate(segment, start)
        for derived in (*folder.glob("*index"), *folder.glob("*.snapshot")):  # the broker rebuilds them
            derived.unlink()
        self.restart(node)

    def close(self) -> None:
        """Ends all brokers. Their data are deleted anyway, so a clean stop is only needed to write the archive."""
        trainee = self._processes.get(1) if self._trains_archive else None
        if trainee is not None and trainee.poll() is None and not self._frozen:
            trainee.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainee.wait(STOP_TIMEOUT_S)
                self._archives["server"].keep()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(STOP_TIMEOUT_S)
        for archive in self._archives.values():
            archive.discard()

    def _home(self, node: int) -> Path:
        return self._folder / f"node{node}"

    def _write_settings(
        self,
        voters: list[str],
        props: Mapping[str, str],
        listeners: Mapping[str, tuple[str, str]],
        proxied: Mapping[str, Mapping[int, int] | None],
    ) -> None:
        """Writes a server.properties into a folder per node. The caller's `props` come last and override the rest."""
        more = "".join(f",{name}://{address}" for name, (_, address) in listeners.items())
        kinds = "".join(f",{name}:{protocol}" for name, (protocol, _) in listeners.items())
        self._folder.mkdir(exist_ok=True)
        (self._folder / "log4j2.properties").write_text(LOG4J_PROPERTIES, encoding="utf-8")
        for node, address in self.addresses.items():
            self._home(node).mkdir()
            ports = {name: list(found.items())[node - 1] for name, found in proxied.items() if found}
            advertised, real = (
                "".join(f",{name}://127.0.0.1:{pair[at]}" for name, pair in ports.items()) for at in (0, 1)
            )
            properties = server_properties(node, voters) | {
                "listeners": f"PLAINTEXT://{address},CONTROLLER://{voters[node - 1]}{more}{real}",
                "advertised.listeners": f"PLAINTEXT://{address}{more}{advertised}",
                "listener.security.protocol.map": (
                    f"PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT,REPLICATION:PLAINTEXT{kinds}"
                ),
                "inter.broker.listener.name": "REPLICATION" if "REPLICATION" in ports else "PLAINTEXT",
                "log.dirs": str(self._home(node) / "data"),
                **props,
            }
            text = "".join(f"{key}={value}\n" for key, value in properties.items())
            (self._home(node) / "server.properties").write_text(text, encoding="utf-8")

    def _format(self) -> None:
        """Writes the cluster id into each node's log folder. The first run may train the format tool's archive."""
        cluster_id, archive = new_cluster_id(), self._archives["format"]
        tools: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for node in self.addresses:
                options = archive.use() or (archive.train() if node == 1 else [])
                arguments = ["format", "-t", cluster_id, "-c", str(self._home(node) / "server.properties")]
                tools[node] = self._run_java(node, options, "kafka.tools.StorageTool", arguments)
            for node, tool in tools.items():
                if code := tool.wait(READY_TIMEOUT_S):
                    raise KafkaUnavailable(f"formatting the disk of node {node} failed (exit {code})", self._tail(node))
        except subprocess.TimeoutExpired as e:
            raise KafkaUnavailable(f"formatting took longer than {e.timeout:g} s", self._tail(*self.addresses)) from e
        finally:
            for tool in tools.values():
                tool.kill()
                tool.wait(STOP_TIMEOUT_S)
        archive.keep()

    def _spawn(self, node: int) -> None:
        archive = self._archives["server"]
        options = archive.use()
        if not options and len(self.addresses) == 1:
            # Three nodes stop slowly (the last ones wait for a lost quorum), so only a single node trains.
            options, self._trains_archive = archive.train(), True
        arguments = [str(self._home(node) / "server.properties")]
        self._processes[node] = self._run_java(node, options, "kafka.Kafka", arguments)

    def _run_java(self, node: int, options: list[str], main: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = [self._java.executable, *JVM_OPTIONS, "-Djava.awt.headless=true", "-Dlog4j2.disable.jmx=true"]
        command += [f"-Dlog4j2.configurationFile={self._folder / 'log4j2.properties'}"]
        command += [f"-Dkafka.log.file={self._home(node) / 'server.log'}"]
        command += [*options, "-cp", self._class_path, main, *arguments]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command]
        with (self._home(node) / "stdout.log").open("ab") as out:
            # Its own session, so that Ctrl-C in a terminal reaches only the tests, which then stop the brokers.
            return subprocess.Popen(
                command,
                env={**os.environ, **self._environment(node)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _await(self, nodes: Iterable[int]) -> None:
        wanted = list(nodes)
        try:
            await_ready(self.addresses, wanted, self._check_alive)
        except TimeoutError as e:
            raise KafkaUnavailable(f"the local brokers are not ready: {e}", self._tail(*wanted)) from e

    def _check_alive(self, node: int) -> None:
        code = self._processes[node].poll()
        if code is not None:
            raise KafkaUnavailable(f"node {node} ended with exit code {code}", self._tail(node))

    def _tail(self, *nodes: int) -> str:
        """Why these nodes failed: the first errors of each log, its end, and the JVM's own output."""
        lines: list[str] = []
        share = LOG_TAIL_LINES // len(nodes) // 4
        for file in [self._home(node) / name for node in nodes for name in ("server.log", "stdout.log")]:
            log = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
            if log:
                errors = [line for line in log[:-share] if "] ERROR " in line or "] FATAL " in line]
                lines += [f"== {file.parent.name}/{file.name}", *errors[: share - 1], *log[-share:]]
        return "\n".join(lines)
