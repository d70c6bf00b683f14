"""Signatures that functions share. Most of all: the keyword arguments of `Marshal.consumer`.

There is one per field of ConsumerOptions, which has their defaults and bounds.

Type checkers and editors know them by `ConsumerKeywords`, `inspect` and `help` by `explicit`. A test compares the two
with ConsumerOptions.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypedDict, TypeVar

from marshal_py.client.values.group_config import GroupConfig
from marshal_py.client.values.options import (
    ConsumerOptions,
    Delivery,
    OnActivity,
    OnClaim,
    OnLost,
    OnRevoking,
    OnTopicRecreated,
    check_names,
)
from marshal_py.errors import InvalidOption

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_FIELDS: Final = {field.name: field for field in dataclasses.fields(ConsumerOptions)}


class ConsumerKeywords(TypedDict, total=False):
    """The options of a consumer, except the deserializers, whose types decide those of its messages."""

    delivery: Delivery
    policy: str | None
    member: str | None
    group_config: GroupConfig | None
    heartbeat_interval_s: float
    max_claims: int | None
    capacity: int
    priority_group: str | None
    priority: int
    min_pending: int | None
    min_ack_pending: int | None
    fast_reclaim: bool
    start: str | int
    on_topic_recreated: OnTopicRecreated
    handler_timeout_s: float
    hand_over_timeout_s: float | None
    release_behind_s: float | None
    max_acks_pending: int | None
    max_deliver: int | None
    dead_letter_topic: str | None
    prefetch_bytes: int
    on_claim: OnClaim | None
    on_revoking: OnRevoking | None
    on_lost: OnLost | None
    on_activated: OnActivity | None
    on_deactivated: OnActivity | None
    settings: Mapping[str, Any]


def explicit(call: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function with `**keywords`: its signature names each field of ConsumerOptions with its default."""
    own = inspect.signature(call)
    kept = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=field.type)
        for name, field in _FIELDS.items()
        if name not in own.parameters
    ]
    call.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]  # inspect reads it
    return call


def parameters_of(
    verb: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[Concatenate[S, ...], R]], Callable[Concatenate[S, P], R]]:
    """Decorates a method with `*arguments, **named` that passes them to `verb`: its parameters are those of `verb`."""

    def decorate(method: Callable[Concatenate[S, ...], R]) -> Callable[Concatenate[S, P], R]:
        returns = inspect.signature(method).return_annotation
        method.__signature__ = inspect.signature(verb).replace(return_annotation=returns)  # type: ignore[attr-defined]  # inspect reads it
        return method

    return decorate


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def chosen(verb: str, options: ConsumerOptions | None, keywords: Mapping[str, Any]) -> ConsumerOptions:
    """Returns the options of a consumer: `options`, or the defaults, replaced by `keywords` where these are given.

    `verb`: the calling method's name, for errors. Raises InvalidOption.
    """
    if options is not None and not isinstance(options, ConsumerOptions):
        raise InvalidOption("options", options, "a ConsumerOptions")
    check_names(verb, keywords)
    return ConsumerOptions(**keywords) if options is None else dataclasses.replace(options, **keywords)
