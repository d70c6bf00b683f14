"""A certificate authority for tests: certificates of servers and clients as PEM files, also ones that have expired."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates, and writes them with their keys into `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(self._certificate(self._name, self._key, expired=False, signs=True)))

    def sign(self, name: str, *, expired: bool = False, password: str = "") -> Path:
        """Returns a file with a certificate for this common name and 127.0.0.1, and its key in PKCS#8."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(_named(name), key, expired=expired, signs=False)
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            encryption = serialization.BestAvailableEncryption(password.encode())
        encoded = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        file = self._folder / f"{name}{'-expired' if expired else ''}.pem"
        file.write_bytes(encoded + _pem(certificate))
        return file

    def broker_settings(self, listener: str, certificate: Path) -> dict[str, str]:
        """Returns a broker's settings for a listener that shows this certificate, and trusts this authority."""
        given = {"keystore.type": "PEM", "truststore.type": "PEM", "keystore.location": str(certificate)}
        given["truststore.location"] = str(self.file)
        return {f"listener.name.{listener.lower()}.ssl.{name}": value for name, value in given.items()}

    def client_settings(self, certificate: Path | None = None, password: str = "") -> Mapping[str, str]:
        """Returns librdkafka's settings for a client that trusts this authority, perhaps with a certificate."""
        given = {"ssl.ca.location": str(self.file)}
        if certificate is not None:
            given |= {"ssl.certificate.location": str(certificate), "ssl.key.location": str(certificate)}
        return given | ({"ssl.key.password": password} if password else {})

    def _certificate(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, expired: bool, signs: bool
    ) -> x509.Certificate:
        end = datetime.datetime.now(datetime.UTC) + (-DAY if expired else DAY)
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = x509.CertificateBuilder(self._name, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(end - 2 * DAY).not_valid_after(end)
        builder = builder.add_extension(x509.BasicConstraints(ca=signs, path_length=None), critical=True)
        return builder.add_extension(here, critical=False).sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
