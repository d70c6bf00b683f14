"""Where metrics are served, for the servers of a client and of a cluster's groups. Imports nothing of the client."""

from __future__ import annotations

from typing import Final

from marshal_py.errors import InvalidOption

LOOPBACK: Final = "127.0.0.1"  # a library opens no port to the network unless it is asked to


def metrics_url(address: str, port: int) -> str:
    """Returns where Prometheus asks; an address of IPv6 is in brackets."""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics"


def port_error(address: str, port: int, error: Exception) -> InvalidOption:
    """Returns the error for a port that cannot be used."""
    return InvalidOption(
        "metrics port",
        f"{address}:{port}",
        f"it cannot be used ({error}): name another port, 0 for a free one, or another address of this machine",
    )
