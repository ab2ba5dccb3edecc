"""Make the certificates of a group: a CA, and what it signs for nodes and clients. Pure.

Needs the library `cryptography` (the extra `tls`); nodes and clients that only use certificates do
not. Keys are of the elliptic curve P-256, in PKCS #8 without a password.
"""

import datetime
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hastore.errors import UsageError
from hastore.security.tls_engine import NodeName

CLOCK_SLACK = datetime.timedelta(hours=1)  # valid so long before it is made: clocks differ
MAX_COMMON_NAME = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def make_ca(name: str, days: float, now: datetime.datetime) -> Pair:
    """Return a new CA, which signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    public = key.public_key()
    built = (
        _builder(subject, subject, public, now - CLOCK_SLACK, now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Pair(_pem(built), _key_pem(key))


class Authority:
    """A CA whose key is at hand. Raises UsageError, naming `path`, for files that are no CA."""

    def __init__(self, pair: Pair, path: str) -> None:
        try:
            # While a CA is replaced, its file has the old one and the new one.
            cas = x509.load_pem_x509_certificates(pair.certificate)
            key = serialization.load_pem_private_key(pair.key, password=None)
        except (ValueError, TypeError) as error:  # TypeError: the key has a password
            raise UsageError(
                f"{path}: ca.pem and ca.key are not a CA in PEM without a password; make one with "
                "`hastore keys ca`"
            ) from error
        own = [one for one in cas if one.public_key() == key.public_key()]
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not own:
            raise UsageError(
                f"{path}: ca.key is not the key of ca.pem; use the two files that `hastore keys "
                "ca` made together"
            )
        self._key = key
        self._certificate = max(own, key=lambda one: one.not_valid_after_utc)

    @property
    def not_after(self) -> datetime.datetime:
        """Until when the CA is valid; what it signs is valid no longer."""
        return self._certificate.not_valid_after_utc

    def node(
        self, name: NodeName, hosts: Iterable[str], days: float, now: datetime.datetime
    ) -> Pair:
        """Return a node's certificate, for both ends of its links and for its servers."""
        alternatives: list[x509.GeneralName] = [_host(host) for host in dict.fromkeys(hosts)]
        alternatives.append(x509.UniformResourceIdentifier(name.uri))
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        # The space keeps a node's name from being that of an identity.
        return self._sign(f"hastore node {name.node}", alternatives, uses, now, days)

    def client(self, name: str, days: float, now: datetime.datetime) -> Pair:
        """Return a client's certificate; it cannot be used as a server's or a node's."""
        return self._sign(name, [], [ExtendedKeyUsageOID.CLIENT_AUTH], now, days)

    def _sign(
        self,
        common_name: str,
        alternatives: list[x509.GeneralName],
        uses: list[x509.ObjectIdentifier],
        now: datetime.datetime,
        days: float,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._certificate
        end = min(now + datetime.timedelta(days=days), self.not_after)
        if end <= now:
            raise UsageError(
                f"the CA is valid only until {self.not_after:%Y-%m-%d %H:%M} UTC; make a new one"
            )
        start = max(now - CLOCK_SLACK, issuer.not_valid_before_utc)
        builder = (
            _builder(_name(common_name), issuer.subject, key.public_key(), start, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if alternatives:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=False
            )
        return Pair(_pem(builder.sign(self._key, hashes.SHA256())), _key_pem(key))


def not_after(certificate: bytes) -> datetime.datetime:
    """Return until when a certificate in PEM is valid."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def names_of(certificate: bytes) -> list[str]:
    """Return the names and addresses of hosts in a certificate in PEM. Raises ValueError."""
    loaded = x509.load_pem_x509_certificate(certificate)
    try:
        found = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = map(str, found.get_values_for_type(x509.IPAddress))
    return [*found.get_values_for_type(x509.DNSName), *addresses]


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:MAX_COMMON_NAME])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
