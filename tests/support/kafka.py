"""A real Apache Kafka for tests and benchmarks, one node or three: `with start_cluster() as cluster: ...`

It comes from the first source that applies:
 1. ``MARSHAL_TEST_BOOTSTRAP``: that cluster is used as it is. It is not ours, so its nodes cannot be controlled.
 2. Docker, when an engine answers: containers of ``apache/kafka`` by testcontainers. Written from the image's
    documentation and NOT run where this was made (no engine answers there). ``MARSHAL_TEST_KAFKA_VIA=jvm`` skips it.
 3. Brokers in local JVMs (brokers.py), from jars that are fetched once (jars.py).

Nodes are numbered from 1, as Kafka's own node ids; on a cluster that this file started, address i-1 of ``bootstrap``
is node i. Start clusters from a thread that outlives them (brokers.py says why). Every failure is a KafkaUnavailable
with the tail of the log; nothing is skipped.

This file must not use pytest (clusters.py has the fixtures), the package under test, or names of registries.

    python -m tests.support.kafka --nodes 1        prints one JSON line and runs until stdin ends or SIGTERM
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tests.support.brokers import (
    JvmNodes,
    await_ready,
    brokers_seen_by,
    free_ports,
    new_cluster_id,
    server_properties,
    wait_until,
)
from tests.support.jars import KAFKA_VERSION, LOG_TAIL_LINES, KafkaUnavailable

__all__ = ["Cluster", "KafkaUnavailable", "TopicFactory", "brokers_seen_by", "start_cluster", "wait_until"]

NODES_ALLOWED = (1, 3)  # Neither of two nodes is a majority, and more than three prove nothing new.
EXTERNAL_TIMEOUT_S = 15.0  # A cluster that is there answers in milliseconds; this allows for TLS and a far network.
ENGINE_TIMEOUT_S = 5  # A Docker engine that does not answer a ping in this time is not there.
ENGINE_CALL_TIMEOUT_S = 600  # docker-py's own default of 60 s is short for the first pull of an image.
DOCKER_IMAGE = f"apache/kafka:{KAFKA_VERSION}"
CLIENT_PORT, INTERNAL_PORT, CONTROLLER_PORT = 9092, 19092, 9093  # Inside a container; any three would do.


class TopicFactory(Protocol):
    """Makes a topic with a fresh name, waits until it can be used, and returns the name."""

    def __call__(
        self, partitions: int = 1, *, cluster: Cluster | None = None, config: Mapping[str, str] | None = None
    ) -> str: ...


class NodeControl(Protocol):
    """The operations on the nodes of a cluster that this file started. Nodes are numbered from 1."""

    def kill(self, node: int) -> None: ...
    def stop(self, node: int) -> None: ...
    def cont(self, node: int) -> None: ...
    def restart(self, node: int) -> None: ...


@dataclass(frozen=True)
class Cluster:
    """A running cluster, whose nodes can be killed, stopped and restarted if this file started it."""

    bootstrap: str
    nodes: int
    description: str
    _control: NodeControl | None = field(default=None, repr=False)

    @property
    def can_control_nodes(self) -> bool:
        return self._control is not None

    def kill(self, node: int) -> None:
        """SIGKILL: a crash. The node's data stay on its disk."""
        self._control_of(node).kill(node)

    def stop(self, node: int) -> None:
        """SIGSTOP: the node freezes and its connections stay open, as in a very long pause."""
        self._control_of(node).stop(node)

    def cont(self, node: int) -> None:
        """SIGCONT: the node continues. Returns at once; the cluster takes it back a moment later."""
        self._control_of(node).cont(node)

    def restart(self, node: int) -> None:
        """Starts the node on its old data and port, after killing it if it runs. Returns when it serves again."""
        self._control_of(node).restart(node)

    def _control_of(self, node: int) -> NodeControl:
        if self._control is None:
            raise KafkaUnavailable(f"the nodes of {self.description} are not ours: unset MARSHAL_TEST_BOOTSTRAP")
        if not 1 <= node <= self.nodes:
            raise ValueError(f"node {node} of a cluster whose nodes are 1 to {self.nodes}")
        return self._control


def start_cluster(nodes: int = 1, props: Mapping[str, str] | None = None) -> AbstractContextManager[Cluster]:
    """A cluster for the length of a `with` block. `props` are broker settings, which override those of this file.

    A cluster that runs already cannot be given `props`: that is an error.
    """
    if nodes not in NODES_ALLOWED:
        raise ValueError(f"a cluster of {nodes} nodes; allowed are {NODES_ALLOWED}")
    if bootstrap := os.environ.get("MARSHAL_TEST_BOOTSTRAP"):
        return _external_cluster(bootstrap, nodes, props or {})
    if os.environ.get("MARSHAL_TEST_KAFKA_VIA") != "jvm" and _docker_answers():
        return _docker_cluster(nodes, props or {})
    return _jvm_cluster(nodes, props or {})


@contextlib.contextmanager
def _external_cluster(bootstrap: str, nodes: int, props: Mapping[str, str]) -> Iterator[Cluster]:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    name = "the cluster of MARSHAL_TEST_BOOTSTRAP"
    if props:
        raise KafkaUnavailable(f"{name} cannot be given broker settings: {dict(props)}")
    try:
        found = len(AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=EXTERNAL_TIMEOUT_S).brokers)
    except KafkaException as e:
        raise KafkaUnavailable(f"{name} ({bootstrap}) does not answer: {e}") from e
    if found < nodes:
        raise KafkaUnavailable(f"{name} has {found} brokers and this needs {nodes}")
    yield Cluster(bootstrap, found, "external (MARSHAL_TEST_BOOTSTRAP)")


@contextlib.contextmanager
def _jvm_cluster(nodes: int, props: Mapping[str, str]) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="marshal_kafka_"))
    try:
        with contextlib.closing(JvmNodes(nodes, props, folder)) as brokers:
            brokers.start()
            yield Cluster(",".join(brokers.addresses.values()), nodes, f"apache {KAFKA_VERSION} (local jvm)", brokers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _docker_answers() -> bool:
    """Whether a Docker engine answers. Any failure means no: no library, no socket, no right to it, a time-out."""
    with warnings.catch_warnings():
        # The library leaves sockets open when no engine answers. They are collected here, with warnings ignored;
        # otherwise their warnings would fail whichever test runs when the collector does.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            # By name, because the library ships no types.
            client = importlib.import_module("docker").from_env(timeout=ENGINE_TIMEOUT_S)
            with contextlib.closing(client):
                answers = bool(client.ping())
        except Exception:
            answers = False
        gc.collect()
    return answers


@contextlib.contextmanager
def _docker_cluster(nodes: int, props: Mapping[str, str]) -> Iterator[Cluster]:
    """One container per node in a network of their own. testcontainers' reaper removes them if this process dies."""
    network_class: Any = importlib.import_module("testcontainers.core.network").Network
    container_class: Any = importlib.import_module("testcontainers.core.container").DockerContainer
    engine = {"timeout": ENGINE_CALL_TIMEOUT_S}
    try:
        with contextlib.ExitStack() as stack:
            network = stack.enter_context(network_class(docker_client_kw=engine))
            brokers = _DockerNodes(nodes)
            cluster_id = new_cluster_id()
            for node in brokers.ports:
                container = container_class(DOCKER_IMAGE, docker_client_kw=engine)
                container.with_network(network).with_network_aliases(_alias(node))
                # A fixed port, not a mapped one: the broker has to know it before it starts, to advertise it.
                container.with_bind_ports(CLIENT_PORT, brokers.ports[node])
                host = container.get_docker_client().host()
                # A client might look for a broker advertised as localhost on ::1, where nothing is bound.
                brokers.addresses[node] = f"{'127.0.0.1' if host == 'localhost' else host}:{brokers.ports[node]}"
                container.with_envs(CLUSTER_ID=cluster_id, **_docker_environment(node, brokers.addresses, nodes, props))
                brokers.containers[node] = stack.enter_context(container).get_wrapped_container()
            brokers.await_all(brokers.addresses)
            bootstrap = ",".join(brokers.addresses.values())
            yield Cluster(bootstrap, nodes, f"apache {KAFKA_VERSION} (docker)", brokers)
    except importlib.import_module("docker").errors.DockerException as e:
        hint = "MARSHAL_TEST_KAFKA_VIA=jvm uses local JVMs instead"
        raise KafkaUnavailable(f"Docker answers, but {DOCKER_IMAGE} does not run there: {e}. {hint}") from e


def _alias(node: int) -> str:
    """The node's host name in the containers' network."""
    return f"kafka-{node}"


def _docker_environment(
    node: int, addresses: Mapping[int, str], nodes: int, props: Mapping[str, str]
) -> dict[str, str]:
    """The node's settings as the image takes them: KAFKA_ and the name, with `_` for `.`, `__` for `_`, `___` for `-`.

    Two listeners, as in the image's own example of combined nodes: brokers reach each other by alias, clients by the
    host's port.
    """
    properties = server_properties(node, [f"{_alias(i)}:{CONTROLLER_PORT}" for i in range(1, nodes + 1)]) | {
        "listeners": f"PLAINTEXT://:{INTERNAL_PORT},CONTROLLER://:{CONTROLLER_PORT},CLIENT://:{CLIENT_PORT}",
        "advertised.listeners": f"PLAINTEXT://{_alias(node)}:{INTERNAL_PORT},CLIENT://{addresses[node]}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,CLIENT:PLAINTEXT",
        "log.dirs": "/tmp/kraft-combined-logs",
        **props,
    }
    escaped = {key.replace("_", "__").replace("-", "___").replace(".", "_"): v for key, v in properties.items()}
    return {f"KAFKA_{key.upper()}": value for key, value in escaped.items()}


class _DockerNodes:
    """Controls the containers. A container keeps its disk and its port from one start to the next."""

    def __init__(self, nodes: int) -> None:
        self.ports = dict(enumerate(free_ports(nodes), 1))
        self.addresses: dict[int, str] = {}
        self.containers: dict[int, Any] = {}

    def kill(self, node: int) -> None:
        self.cont(node)  # Engines differ in whether they kill a paused container.
        if self._status(node) == "running":
            self.containers[node].kill()

    def stop(self, node: int) -> None:
        # Freezes the container's control group: like SIGSTOP for each of its processes.
        self.containers[node].pause()

    def cont(self, node: int) -> None:
        if self._status(node) == "paused":
            self.containers[node].unpause()

    def restart(self, node: int) -> None:
        self.kill(node)
        self.containers[node].wait(timeout=ENGINE_CALL_TIMEOUT_S)
        self.containers[node].start()
        self.await_all({i: a for i, a in self.addresses.items() if self._status(i) == "running"})

    def await_all(self, addresses: Mapping[int, str]) -> None:
        try:
            await_ready(addresses, list(addresses), self._check_alive)
        except TimeoutError as e:
            raise KafkaUnavailable(f"the containers are not ready: {e}", "".join(map(self._log, addresses))) from e

    def _status(self, node: int) -> str:
        self.containers[node].reload()
        return str(self.containers[node].status)

    def _check_alive(self, node: int) -> None:
        if (status := self._status(node)) in ("exited", "dead"):
            raise KafkaUnavailable(f"the container of node {node} is {status}", self._log(node))

    def _log(self, node: int) -> str:
        tail: bytes = self.containers[node].logs(tail=LOG_TAIL_LINES // len(self.containers))
        return f"== {_alias(node)}\n{tail.decode(errors='replace')}\n"


def _ended(_signal: int, _frame: object) -> NoReturn:
    """SIGTERM as an exception, so that the `with` block stops the brokers."""
    sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.kafka", description="Run a real Kafka for a while.")
    parser.add_argument("--nodes", type=int, default=1, choices=NODES_ALLOWED)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a broker setting")
    arguments = parser.parse_args()
    for setting in arguments.set:
        if "=" not in setting:
            parser.error(f"--set takes NAME=VALUE, not {setting!r}")
    signal.signal(signal.SIGTERM, _ended)
    try:
        with start_cluster(arguments.nodes, dict(s.split("=", 1) for s in arguments.set)) as cluster:
            print(json.dumps({"bootstrap": cluster.bootstrap, "description": cluster.description}), flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                sys.stdin.read()
    except KafkaUnavailable as e:
        sys.exit(f"no Kafka: {e}")


if __name__ == "__main__":
    main()
