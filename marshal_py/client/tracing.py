"""Spans and metrics of OpenTelemetry for messages, by its conventions for messaging. Needs the extra `otel`.

opentelemetry-api is imported only when this is used: other programs do without it. Without an SDK nothing is kept.
A message's context comes from its headers (`traceparent`, `tracestate`), by the propagator that the program has set.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar, cast

from marshal_py.client.messages.message import Batch, Message, raw_key
from marshal_py.client.process.processing import Retry
from marshal_py.client.process.worker_processes import PlainMessage
from marshal_py.client.values.info import HANDLER_S
from marshal_py.errors import InvalidOption, UnsupportedPlatform

SCOPE: Final = "marshal_py"
KEY_CHARS_MAX: Final = 200  # of a key in a span
LINKS_MAX: Final = 128  # of one span: what an SDK keeps by default

H = TypeVar("H", bound=Callable[..., Any])
Settled = Literal["ack", "nak", "term"]
AnyMessage = Message[Any, Any] | PlainMessage[Any, Any]


def traced(handler: H, *, parent: bool = True) -> H:
    """Returns a handler for `process` or `consume` that calls `handler` in a span `process`.

    The span of a message is a child of the one that its headers name; with `parent=False`, or for a list of messages,
    it has links to them. What the handler raises is its error, but for `Retry`. `messaging.process.duration` and
    `messaging.client.consumed.messages` count it. Works for functions, coroutine functions, and in worker processes.

    Raises InvalidOption; UnsupportedPlatform if opentelemetry-api is not installed.
    """
    if not callable(handler):
        raise InvalidOption("handler", handler, "a function, or a coroutine function")
    _api()
    kind = _TracedCoroutine if inspect.iscoroutinefunction(handler) else _Traced
    return cast(H, kind(handler, parent))


class _Traced:
    """Calls a handler in spans. It can be pickled if its handler can."""

    def __init__(self, handler: Callable[[Any], Any], parent: bool) -> None:
        self._handler, self._parent = handler, parent

    def __repr__(self) -> str:
        return f"traced({self._handler!r})"

    def __call__(self, given: Any) -> Any:
        span = _Processing(given, self._parent)
        with span.running():
            result = self._handler(given)
            if inspect.isawaitable(result):
                span.goes_on = True
            else:
                span.returned(result)
        return _awaited(result, span) if span.goes_on else result


class _TracedCoroutine(_Traced):
    """The same for a coroutine function, which it is, too: so who calls plain functions can refuse it."""

    async def __call__(self, given: Any) -> Any:
        return await super().__call__(given)


async def _awaited(result: Awaitable[Any], span: _Processing) -> Any:
    span.goes_on = False
    with span.running():
        returned = await result
        span.returned(returned)
        return returned


class _Processing:
    """One span `process`, of a message or a list of them."""

    def __init__(self, given: Any, parent: bool) -> None:
        self._messages: Sequence[AnyMessage] = given if isinstance(given, list) else [given]
        first, trace = self._messages[0], _api().trace
        self._shared = _shared(first, "process", "process")
        attributes = self._shared | {"messaging.destination.partition.id": str(first.partition)}
        if isinstance(given, list):
            attributes["messaging.batch.message_count"] = len(given)
        else:
            attributes |= {"messaging.kafka.offset": first.offset, "messaging.kafka.message.key": _key(first)}
        alone = parent and not isinstance(given, list)
        self._span = trace.get_tracer(SCOPE).start_span(
            f"process {first.topic}",
            context=_context_of(first) if alone else None,
            kind=trace.SpanKind.CONSUMER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            links=() if alone else _links(self._messages),
        )
        self._began_s = time.perf_counter()
        self._error = ""
        self.goes_on = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes it the current span. Ends it, unless it goes on."""
        trace = _api().trace
        with trace.use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as error:
                self._failed(error)
                raise
            finally:
                if not self.goes_on:
                    self._end()

    def returned(self, result: object) -> None:
        """Notes the outcomes of a list."""
        if isinstance(result, Sequence):
            for error in result:
                if isinstance(error, BaseException):
                    self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Retry):
            self._span.add_event("retry", {"reason": str(error)})
            return
        self._error = self._error or _name(type(error))
        self._span.record_exception(error)
        self._span.set_status(_api().trace.StatusCode.ERROR, str(error))

    def _end(self) -> None:
        shared = self._shared
        if self._error:
            shared |= {"error.type": self._error}
            self._span.set_attribute("error.type", self._error)
        self._span.end()
        _count(len(self._messages), shared)
        duration = (
            _api()
            .metrics.get_meter(SCOPE)
            .create_histogram(
                "messaging.process.duration",
                "s",
                "How long handlers took.",
                explicit_bucket_boundaries_advisory=HANDLER_S,
            )
        )
        duration.record(time.perf_counter() - self._began_s, shared)


# --- for programs with a loop of their own


def record_received(batch: Batch[Any, Any], began_ns: int) -> None:
    """Records a span `receive` for what a `fetch` has returned, which began at `began_ns` (`time.time_ns()`), with
    links to its messages. Of an empty batch nothing is recorded. Raises UnsupportedPlatform."""
    trace = _api().trace
    for part in batch.parts:
        messages = list(part)
        shared = _shared(messages[0], "poll", "receive")
        span = trace.get_tracer(SCOPE).start_span(
            f"poll {messages[0].topic}",
            kind=trace.SpanKind.CLIENT,
            attributes={
                **shared,
                "messaging.destination.partition.id": str(messages[0].partition),
                "messaging.batch.message_count": len(messages),
            },
            links=_links(messages),
            start_time=began_ns,
        )
        span.end()
        _count(len(messages), shared)


@contextmanager
def settling(one: Message[Any, Any] | Batch[Any, Any], answer: Settled) -> Iterator[None]:
    """A span `settle` around an answer that waits, or that tells something: `with settling(message, "ack"):
    message.double_ack()`. Raises InvalidOption, UnsupportedPlatform."""
    if answer not in ("ack", "nak", "term"):
        raise InvalidOption("answer", answer, "one of 'ack', 'nak', 'term'")
    trace, messages = _api().trace, [one] if isinstance(one, Message) else list(one)
    if not messages:
        yield
        return
    attributes = _shared(messages[0], answer, "settle")
    if len(messages) > 1:
        attributes["messaging.batch.message_count"] = len(messages)
    with trace.get_tracer(SCOPE).start_as_current_span(
        f"{answer} {messages[0].topic}", kind=trace.SpanKind.CLIENT, attributes=attributes, links=_links(messages)
    ) as span:
        try:
            yield
        except BaseException as error:
            span.set_attribute("error.type", _name(type(error)))
            raise


# --- parts


def _api() -> Any:
    try:
        import opentelemetry
        import opentelemetry.metrics
        import opentelemetry.propagate
        import opentelemetry.trace
    except ImportError as error:
        raise UnsupportedPlatform(
            "tracing", "a Python without opentelemetry-api", "pip install 'marshal_py[otel]'"
        ) from error
    return opentelemetry


def _shared(message: AnyMessage, name: str, kind: str) -> dict[str, Any]:
    """Returns the attributes that spans and metrics share."""
    return {
        "messaging.system": "kafka",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": message.topic,
        "messaging.consumer.group.name": message.group,
    }


def _count(messages: int, attributes: Mapping[str, Any]) -> None:
    counter = (
        _api()
        .metrics.get_meter(SCOPE)
        .create_counter("messaging.client.consumed.messages", "{message}", "Messages that were handed to the program.")
    )
    counter.add(messages, attributes)


def _context_of(message: AnyMessage) -> Any:
    carrier = {name.lower(): value.decode(errors="replace") for name, value in message.headers if value is not None}
    return _api().propagate.extract(carrier)


def _links(messages: Sequence[AnyMessage]) -> list[Any]:
    trace = _api().trace
    contexts = [trace.get_current_span(_context_of(one)).get_span_context() for one in messages[:LINKS_MAX]]
    return [trace.Link(context) for context in contexts if context.is_valid]


def _key(message: AnyMessage) -> str | None:
    try:
        key: object = message.key
    except Exception:  # of a deserializer; the handler may do without the key
        key = raw_key(message) if isinstance(message, Message) else None
    text = key.decode(errors="replace") if isinstance(key, bytes) else None if key is None else str(key)
    return None if text is None else text[:KEY_CHARS_MAX]


def _name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
