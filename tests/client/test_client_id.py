"""The default of `client_id`: unique for each Marshal, and named after librdkafka's `client.id` if there is one."""

from __future__ import annotations

import marshal_py
from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import EmbeddedTestCluster


def test_the_settings_client_id_names_the_member_and_stays_unique(embedded: EmbeddedTestCluster) -> None:
    """Replicas of a deployment share their settings, so the name alone would be one name for all of them."""
    settings = {"bootstrap.servers": embedded.target, "client.id": "billing-service"}
    with marshal_py.connect(settings) as one, marshal_py.connect(settings) as other:
        assert one.client_id.startswith("billing-service-")
        assert one.client_id != other.client_id
    with marshal_py.connect(settings, client_id="mine") as one:
        assert one.client_id == "mine"


def test_without_one_it_is_the_host() -> None:
    with MemoryCluster() as cluster:
        assert not cluster.connect().client_id.startswith("billing")
