"""Writes messages to Kafka in transactions: all of one, or none. A second writer of the same name fences the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from marshal_py.errors import AccessDenied, ClusterUnreachable, InvalidOption, TopicRefused
from marshal_py.transport import settings
from marshal_py.transport.connection_errors import principal_of
from marshal_py.transport.ports import Headers

TIMEOUT_S: Final = 60.0  # to begin, and for each commit
_FENCED: Final = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}


class TransactionalWriter:
    """Writes within `with writer.transaction()`. Once it is made, all transactions before it are over."""

    def __init__(self, transport: Any, name: str) -> None:
        """Raises AccessDenied, ClusterUnreachable; InvalidOption for a transport that is not Kafka's."""
        given = getattr(transport, "given", None)
        if given is None:
            raise InvalidOption("transport", type(transport).__name__, "one to Kafka, which has transactions")
        self._name, self._given = name, given
        ours = {"transactional.id": name, "message.max.bytes": 1_000_000_000}  # how large: that is for the topic to say
        self._producer = Producer({**settings.admin(given, transport.client_id), **ours})
        with self._errors():
            self._producer.init_transactions(TIMEOUT_S)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits what the block has written, or aborts it if that raises. Raises TopicRefused if another writer has
        the name now; AccessDenied, ClusterUnreachable."""
        with self._errors():
            self._producer.begin_transaction()
            try:
                yield
                self._producer.commit_transaction(TIMEOUT_S)
            except BaseException as error:
                if not (isinstance(error, KafkaException) and error.args[0].fatal()):
                    self._producer.abort_transaction(TIMEOUT_S)
                raise

    def write(self, topic: str, value: bytes | None, key: bytes | None, headers: Headers, partition: int) -> None:
        """Queues one message."""
        while True:
            try:
                self._producer.produce(topic, value, key, partition, headers=list(headers))
                return
            except BufferError:
                self._producer.poll(0.1)

    def close(self) -> None:
        """Drops what is not committed."""
        self._producer.purge()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as raised:
            error: KafkaError = raised.args[0]
            if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                who = principal_of(self._given)
                raise AccessDenied(who, "Write", "transactional-id", self._name) from raised
            if error.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
                servers = str(self._given["bootstrap.servers"])
                raise ClusterUnreachable(servers, f"transaction {self._name!r}", error.str()) from raised
            reason = "another writer has begun meanwhile" if error.code() in _FENCED else error.str()
            raise TopicRefused(self._name, reason) from raised
