"""Cuts what a consumer asks for to the limits that its group's settings set, and reports the event `request_limited`.

The settings are `max_request_batch`, `max_request_expires_s` and `max_request_max_bytes` of a GroupConfig (`max_batch`,
`max_expires_ms` and `max_bytes` in the log). JetStream's server ends a request that exceeds such a limit, and warns
(ADR-37, "Status handling"). Here the request is carried out up to the limit, so that a loop around it does not spin.
"""

from __future__ import annotations

from typing import Final, TypeVar

from marshal_py.client.connection.context import Context
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.values.requests import FETCH_EXPIRES_S, FETCH_MESSAGES, MESSAGES_ANY, ConsumeRequest, Request
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.wire.records import GroupConfig

Number = TypeVar("Number", int, float)

# Events that are remembered. Most programs ask for a few values; one that asks for many may get an event again.
REPORTED_MAX: Final = 1_000
# Of `fetch` and `consume`: an event says so, because the program may have named no value.
DEFAULTS: Final[dict[str, float]] = {"max_request_batch": FETCH_MESSAGES, "max_request_expires_s": FETCH_EXPIRES_S}


class GroupLimits:
    """Knows the limits of one consumer's group, as its settings are at each call."""

    def __init__(self, context: Context, driver: ConsumerDriver) -> None:
        self._context, self._driver = context, driver
        self._reported: dict[str, None] = {}  # the texts of the newest events, which are not repeated; oldest first

    def _config(self) -> GroupConfig | None:
        group = self._driver.member.group
        return None if group is None else group.config

    def cut(self, request: Request) -> Request:
        """Returns the request of a `fetch` within the limits."""
        config = self._config()
        if config is None:
            return request
        most, most_bytes, least, expires_s, heartbeat_s = request
        most = self.any_number() if most is None else self._least("max_request_batch", most, config.max_batch)
        if most_bytes is not None:
            most_bytes = self._least("max_request_max_bytes", most_bytes, config.max_bytes)
        expires_s = self._least("max_request_expires_s", expires_s, config.max_expires_ms / 1000)
        return Request(most, most_bytes, min(least, most), expires_s, heartbeat_s)

    def cut_consume(self, request: ConsumeRequest) -> ConsumeRequest:
        """Returns the request of a `consume` with an expiry within the limits. `most` limits each single request."""
        config = self._config()
        if config is None:
            return request
        expires_s = self._least("max_request_expires_s", request.expires_s, config.max_expires_ms / 1000)
        return request._replace(expires_s=expires_s)

    def most(self, asked: int, whole: int, in_bytes: bool) -> int:
        """Returns how many messages, or bytes with `in_bytes`, one request of a `consume` may ask for of `asked`.

        `whole`: the limit of the consume. It is what the event names, for `asked` is another number each time.
        """
        config = self._config()
        if config is None:
            return asked
        if in_bytes:
            return min(asked, self._least("max_request_max_bytes", whole, config.max_bytes))
        return min(asked, self._least("max_request_batch", whole, config.max_batch))

    def any_number(self) -> int:
        """Returns how many messages a request may bring that limits only their bytes."""
        config = self._config()
        limit = 0 if config is None else config.max_batch
        return self._least("max_request_batch", MESSAGES_ANY, limit, "any number of messages")

    def _least(self, setting: str, asked: Number, limit: Number, shown: str = "") -> Number:
        """Returns the lower one of what was asked for, in words `shown`, and the limit; 0 is no limit."""
        if not limit or asked <= limit:
            return asked
        default = ", the default" if asked == DEFAULTS.get(setting) else ""
        text = f"asked for {shown or _shown(asked)}{default}, which exceeds the group's {setting} of {_shown(limit)}"
        if text not in self._reported:
            if len(self._reported) >= REPORTED_MAX:
                del self._reported[next(iter(self._reported))]
            self._reported[text] = None
            self._publish(text)
        return limit

    def _publish(self, text: str) -> None:
        member = self._driver.member
        with self._context.outbox, self._context.lock:
            self._driver.publish(
                Advisory(
                    "request_limited",
                    member.name,
                    member.options.client_id,
                    text=text,
                    session=member.session,
                    log=self._driver.log,
                )
            )


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
