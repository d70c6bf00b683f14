"""Which callbacks of one consumer's options a tick of its member leads to, in which order.

They run on the thread of `Callbacks`. A consumer is active while it owns a partition.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from marshal_py.client.values.info import ClaimInfo
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.member.member_state import Ready


class UserCallbacks:
    """Submits the callbacks of one consumer, and knows whether its user was told that it is active."""

    def __init__(
        self,
        options: ConsumerOptions,
        submit: Callable[[Callable[[], object]], None],
        claim_info: Callable[[Claim], ClaimInfo],
    ) -> None:
        self._options, self._submit, self._claim_info = options, submit, claim_info
        self._active = False

    def notify(self, ready: Ready, active: bool) -> None:
        """Submits what a tick led to. `active`: whether the consumer owns a partition after it."""
        options, submit = self._options, self._submit
        if options.on_lost is not None:
            for claim, reason in ready.lost:
                if claim.told:
                    submit(partial(options.on_lost, self._claim_info(claim), reason))
        if active != self._active:
            self._active = active
            changed = options.on_activated if active else options.on_deactivated
            if changed is not None:
                submit(changed)
        if options.on_claim is not None:
            for claim in ready.claimed:
                submit(partial(options.on_claim, self._claim_info(claim)))
        if options.on_revoking is not None:
            for claim in ready.revoking:
                submit(partial(options.on_revoking, self._claim_info(claim)))
