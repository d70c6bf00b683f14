"""A Kafka with TLS, SASL and an authorizer: one node with a listener for each way to say who a client is.

    with start_guarded({"alice": "password"}) as cluster: connect(cluster.settings("alice"))

Clients of the plain listener are anonymous and may do everything: the tests' own clients, and the broker itself. All
others may do nothing until an ACL allows it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from marshal_py.admin.examination import Right
from tests.support.brokers import JvmNodes, free_ports
from tests.support.certificates import Authority

PASSWORD, CERTIFICATE, TOKEN, EXPIRED = "SCRAM", "MTLS", "OAUTH", "EXPIRED"
PROTOCOLS = {PASSWORD: "SASL_SSL", CERTIFICATE: "SSL", TOKEN: "SASL_SSL", EXPIRED: "SASL_SSL"}
SCRAM_ITERATIONS = 4096  # the fewest that Kafka takes
ANSWER_S = 60.0
MODULES = "org.apache.kafka.common.security"


@dataclass(frozen=True)
class GuardedCluster:
    """`bootstrap` is the plain listener; `listeners` has the addresses of the others by name."""

    bootstrap: str
    listeners: Mapping[str, str]
    users: Mapping[str, str] = field(repr=False)
    authority: Authority

    def settings(self, user: str, listener: str = PASSWORD) -> dict[str, Any]:
        """librdkafka's settings for a client that shows this user's password by SCRAM. EXPIRED: to a server whose
        certificate has expired."""
        given = {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": user, "sasl.password": self.users[user]}
        return {**self._settings(listener), **self.authority.client_settings(), **given}

    def with_certificate(self, certificate: Path, password: str = "") -> dict[str, Any]:
        """The same for a client that shows this certificate; its principal is `User:CN=NAME`."""
        return {**self._settings(CERTIFICATE), **self.authority.client_settings(certificate, password)}

    def with_token(self, oauth_cb: Callable[[str], tuple[str, float]]) -> dict[str, Any]:
        """The same for a client that shows the tokens of this callback."""
        trust = self.authority.client_settings()
        return {**self._settings(TOKEN), **trust, "sasl.mechanism": "OAUTHBEARER", "oauth_cb": oauth_cb}

    def _settings(self, listener: str) -> dict[str, Any]:
        return {"bootstrap.servers": self.listeners[listener], "security.protocol": PROTOCOLS[listener]}

    def set_password(self, user: str, password: str | None) -> None:
        """Changes a user's password from now on; None deletes the user. Connections that there are stay."""
        mechanism = ScramMechanism.SCRAM_SHA_512
        change: Any = UserScramCredentialDeletion(user, mechanism)
        if password is not None:
            info = ScramCredentialInfo(mechanism, SCRAM_ITERATIONS)
            change = UserScramCredentialUpsertion(user, info, password.encode())
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        for future in admin.alter_user_scram_credentials([change]).values():
            future.result(ANSWER_S)


def change_rights(cluster: GuardedCluster, principal: str, rights: Iterable[Right], *, revoke: bool = False) -> None:
    """Grants or revokes these rights. Brokers apply that a moment later."""
    bindings = [
        (
            getattr(ResourceType, right.kind.upper()),
            right.name,
            ResourcePatternType.LITERAL,
            principal,
            "*",
            getattr(AclOperation, re.sub(r"(?<!^)(?=[A-Z])", "_", operation).upper()),
            AclPermissionType.ALLOW,
        )
        for right in rights
        for operation in right.operations
    ]
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    answers: Any = (
        admin.delete_acls([AclBindingFilter(*one) for one in bindings])
        if revoke
        else admin.create_acls([AclBinding(*one) for one in bindings])
    )
    for future in answers.values():
        future.result(ANSWER_S)


def token_of(user: str, lasts_s: float, **claims: str) -> tuple[str, float]:
    """Returns a token without a signature for this user, and when it ends: what an `oauth_cb` returns."""
    now_s = time.time()
    said = {**claims, "sub": user, "iat": now_s, "exp": now_s + lasts_s}
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()) for part in ({"alg": "none"}, said)]
    return ".".join([*(part.decode().rstrip("=") for part in parts), ""]), now_s + lasts_s


@contextlib.contextmanager
def start_guarded(users: Mapping[str, str]) -> Iterator[GuardedCluster]:
    """One node with an authorizer and these users (name -> password), always in a local JVM.

    As by Kafka's default, it creates topics that clients ask for by name, if the clients allow it.
    """
    folder = Path(tempfile.mkdtemp(prefix="marshal_kafka_"))
    try:
        authority = Authority(folder)
        ports = (f"127.0.0.1:{port}" for port in free_ports(len(PROTOCOLS)))
        listeners = dict(zip(PROTOCOLS, ports, strict=True))
        more = {name: (PROTOCOLS[name], address) for name, address in listeners.items()}
        with contextlib.closing(JvmNodes(1, _properties(authority), folder / "nodes", more)) as brokers:
            brokers.start()
            cluster = GuardedCluster(brokers.addresses[1], listeners, dict(users), authority)
            for name, password in users.items():
                cluster.set_password(name, password)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _properties(authority: Authority) -> dict[str, str]:
    found = {
        "auto.create.topics.enable": "true",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
        f"listener.name.{CERTIFICATE.lower()}.ssl.client.auth": "required",
    }
    for name in PROTOCOLS:
        found |= authority.broker_settings(name, authority.sign(f"server-{name.lower()}", expired=name == EXPIRED))
    for name in (PASSWORD, EXPIRED):
        found |= _mechanism(name, "SCRAM-SHA-512", f"{MODULES}.scram.ScramLoginModule required;")
    login = f'{MODULES}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
    return found | _mechanism(TOKEN, "OAUTHBEARER", login)


def _mechanism(listener: str, mechanism: str, login: str) -> dict[str, str]:
    """A client that lasts longer than its credentials must show new ones in time."""
    at = f"listener.name.{listener.lower()}"
    return {
        f"{at}.sasl.enabled.mechanisms": mechanism,
        f"{at}.{mechanism.lower()}.sasl.jaas.config": login,
        f"{at}.{mechanism.lower()}.connections.max.reauth.ms": "5000",
    }
