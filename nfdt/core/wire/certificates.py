"""Certificate authorities that are kept in memory, and the certificates that they issue, as PEM."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 3650
CLOCK_SKEW = datetime.timedelta(days=1)  # machines of a cluster may disagree about the time


@dataclass(frozen=True)
class CertificateKeyPair:
    """A certificate and its private key.

    Attributes:
        cert: PEM certificate.
        key: PEM private key, not encrypted.
    """

    cert: bytes
    key: bytes = field(repr=False)


class CertificateAuthority:
    """Authority with a new key (NIST P-256), which stays in memory unless the caller stores it.

    Args:
        name: Common name of the authority.
        days: Number of days for which it and its certificates are valid.
    """

    def __init__(self, name: str, days: int = VALID_DAYS) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name, self._days = _named(name), days
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.cert = self._certificate.public_bytes(serialization.Encoding.PEM)
        """PEM certificate that peers trust."""

    def issue(self, hosts: Sequence[str], name: str = "") -> CertificateKeyPair:
        """Issue a certificate, for a server or a client.

        Args:
            hosts: Host names and addresses for which it is valid; empty for a client.
            name: Common name; the first host by default.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_named(name or (hosts[0] if hosts else "client")), key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
        builder = builder.add_extension(x509.ExtendedKeyUsage([*uses, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(one) for one in hosts]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return CertificateKeyPair(certificate.public_bytes(serialization.Encoding.PEM), _private_pem(key))

    @property
    def key(self) -> bytes:
        """PEM private key of the authority, for commands that store it."""
        return _private_pem(self._key)

    def _builder(self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        today = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, subject, public_key, x509.random_serial_number())
        builder = builder.not_valid_before(today - CLOCK_SKEW)
        builder = builder.not_valid_after(today + datetime.timedelta(days=self._days))
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(own, critical=False)
        return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)


def hosts_of(cert: bytes) -> tuple[str, ...]:
    """Return the host names and addresses for which a PEM certificate is valid; those of the first one of a chain."""
    certificate = x509.load_pem_x509_certificate(cert)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
