"""Keys made of parts of a subject: messages with the same parts get the same key, hence the same partition. Pure.

A subject is a text of tokens between dots (keys.py). It is the seed's choice of "partitioning wildcards" (partitioned
consumer groups, "Partitioned consumer group configuration"). In Kafka the producer makes it, because the key that it
gives to a message decides the partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marshal_py.errors import InvalidOption
from marshal_py.topics.keys import ONE, SEPARATOR, is_pattern, token_matcher


@dataclass(frozen=True, slots=True)
class SubjectKey:
    """Makes the keys of messages from their subjects; `subject_key` makes one of these. It can be pickled.

    `pattern`, `tokens`: as they were given to `subject_key`. `places`: which tokens of a subject make the key, from 0.
    """

    pattern: str | None
    tokens: tuple[int, ...]
    places: tuple[int, ...]

    def __call__(self, subject: str | bytes | bytearray) -> bytes:
        """Returns the key of a message with this subject: the chosen tokens with dots between them, in UTF-8.

        Raises InvalidOption if the subject does not match the pattern, or has an empty token.
        """
        if not isinstance(subject, str | bytes | bytearray):
            raise InvalidOption("subject", subject, "a text, or bytes")
        # Bytes that are no UTF-8 come back as they are from `encode`.
        text = subject if isinstance(subject, str) else bytes(subject).decode(errors="surrogateescape")
        tokens = text.split(SEPARATOR)
        if "" in tokens or not self._matches(tokens):
            wanted = f"at least {max(self.tokens)} tokens" if self.pattern is None else f"{self.pattern!r}"
            raise InvalidOption("subject", subject, f"it must match {wanted}, and no token may be empty")
        return SEPARATOR.join([tokens[place] for place in self.places]).encode(errors="surrogateescape")

    def _matches(self, tokens: Sequence[str]) -> bool:
        return len(tokens) > max(self.places) if self.pattern is None else token_matcher(self.pattern)(tokens)


def subject_key(pattern: str | None = None, *, tokens: Sequence[int]) -> SubjectKey:
    """Returns a function that makes the key of a message from its subject, for the producer of any library.

    `pattern`: the form of all subjects, tokens between dots: `*` stands for one token, `>` at the end for one or more.
    `tokens`: which of its `*` make the key, counted from 1, in the order that the key has them. So with
    `key = subject_key("orders.*.*", tokens=(2, 1))`, `key("orders.eu.42")` is `b"42.eu"`. Without a pattern all tokens
    are counted. All producers of a topic must choose the same tokens in the same order.

    Raises InvalidOption, as the function does for a subject that does not match. Source: the seed's
    partitioning wildcards.
    """
    if pattern is None:
        wildcards = None
    elif not isinstance(pattern, str) or not is_pattern(pattern):
        raise InvalidOption("pattern", pattern, "tokens between dots; only the last may be `>`, and none is empty")
    else:
        wildcards = [place for place, token in enumerate(pattern.split(SEPARATOR)) if token == ONE]
        if not wildcards:
            raise InvalidOption("pattern", pattern, "it needs at least one `*`, of which the key is made")
    most = None if wildcards is None else len(wildcards)
    chosen = tuple(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes) else ()
    fits = all(type(one) is int and one >= 1 and (most is None or one <= most) for one in chosen)
    if not chosen or not fits or len(set(chosen)) < len(chosen):
        of = "from 1 on" if most is None else f"from 1 to {most}, for the `*` of {pattern!r}"
        raise InvalidOption("tokens", tokens, f"at least one number {of}, each once")
    places = tuple(one - 1 if wildcards is None else wildcards[one - 1] for one in chosen)
    return SubjectKey(pattern, chosen, places)
