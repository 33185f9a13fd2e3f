"""Who may take part in a cluster: a certificate authority in a directory, and the certificates of nodes that it signs.

::

    DIR/ca.pem      the authority's certificate: every node gets a copy
    DIR/ca.key      its private key, mode 0600: whoever has it can make nodes; keep it off the nodes
    DIR/crl.pem     what was revoked; every node gets a copy, again after each change
    DIR/issued/     a copy of every certificate, by node and serial number

A node's certificate names its hosts (DNS names and addresses, which whoever connects compares with the address it used) and the
node itself, as the URI `ckptfs:node:<id>` (RFC 5280, 4.2.1.6), which both sides compare with what the peer calls itself.
Keys are ECDSA over P-256; profiles as RFC 5280 has them.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ckptfs.replication.errors import CertificateTrouble
from ckptfs.replication.tls_transport import node_uri

AUTHORITY_DAYS = 3650
NODE_DAYS = 365
REVOCATIONS_DAYS = 3650
"""A node can't tell an old list from a new one anyway; one that ends by itself would stop a cluster."""
CLOCK_SKEW = datetime.timedelta(hours=1)


class NodeCertificate(NamedTuple):
    """PEM, both."""

    certificate: bytes
    key: bytes


class CertificateAuthority:
    """One directory. `create` makes it, `CertificateAuthority(directory)` opens it. Raises `CertificateTrouble`."""

    @classmethod
    def create(cls, directory: Path, name: str) -> "CertificateAuthority":
        """A new authority in a directory that has none."""
        if (directory / "ca.key").exists() or (directory / "ca.pem").exists():
            raise CertificateTrouble(f"{directory} holds an authority already; nothing was changed: name another directory")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "issued").mkdir(mode=0o700, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ckptfs {name}")])
        now = _now()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        _write(directory / "ca.key", _key_pem(key), 0o600)
        _write(directory / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        authority = cls(directory)
        authority._write_revoked([])
        return authority

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
            self._certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        except FileNotFoundError as error:
            raise CertificateTrouble(
                f"{error.filename} is missing: {directory} holds no authority (ckptfs ca init makes one)"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise CertificateTrouble(f"the authority in {directory} can't be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateTrouble(f"{directory}/ca.key is not a key that ckptfs made")
        self._key = key

    def issue(self, node: str, hosts: Sequence[str], days: float = NODE_DAYS) -> NodeCertificate:
        """A certificate for the node, valid for connections to these host names and addresses."""
        if not hosts:
            raise CertificateTrouble("a node's certificate names at least one host: the one peers reach it by")
        key = ec.generate_private_key(ec.SECP256R1())
        now = _now()
        alternatives = [*map(_general_name, hosts), x509.UniformResourceIdentifier(node_uri(node))]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
            )
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        _write(self.directory / "issued" / f"{quote(node, safe='')}-{certificate.serial_number:x}.pem", pem, 0o644)
        return NodeCertificate(pem, _key_pem(key))

    def revoke(self, node: str) -> int:
        """Put every certificate of the node on the list of revoked ones; returns how many were not there yet."""
        issued = sorted((self.directory / "issued").glob(f"{quote(node, safe='')}-*.pem"))
        found = [x509.load_pem_x509_certificate(path.read_bytes()) for path in issued]
        of_node = [certificate for certificate in found if _common_name(certificate) == node]
        if not of_node:
            raise CertificateTrouble(f"no certificate was issued to {node!r} by the authority in {self.directory}")
        revoked = self._revoked()
        known = {entry.serial_number for entry in revoked}
        new = [certificate for certificate in of_node if certificate.serial_number not in known]
        now = _now()
        entries = [
            x509.RevokedCertificateBuilder().serial_number(certificate.serial_number).revocation_date(now).build()
            for certificate in new
        ]
        self._write_revoked([*revoked, *entries])
        return len(new)

    def _revoked(self) -> list[x509.RevokedCertificate]:
        try:
            return list(x509.load_pem_x509_crl((self.directory / "crl.pem").read_bytes()))
        except (OSError, ValueError) as error:
            raise CertificateTrouble(f"{self.directory}/crl.pem can't be read: {error}") from None

    def _write_revoked(self, revoked: Sequence[x509.RevokedCertificate]) -> None:
        now = _now()
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now - CLOCK_SKEW)
            .next_update(now + datetime.timedelta(days=REVOCATIONS_DAYS))
        )
        for entry in revoked:
            builder = builder.add_revoked_certificate(entry)
        pem = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        _write(self.directory / "crl.pem", pem, 0o644)


def write_node(
    authority: CertificateAuthority, node: str, hosts: Sequence[str], directory: Path, days: float = NODE_DAYS
) -> None:
    """Issue a certificate and write what the node needs: ca.pem, crl.pem, node.pem and node.key."""
    issued = authority.issue(node, hosts, days)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(directory / "node.key", issued.key, 0o600)
    _write(directory / "node.pem", issued.certificate, 0o644)
    for name in ("ca.pem", "crl.pem"):
        _write(directory / name, (authority.directory / name).read_bytes(), 0o644)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise CertificateTrouble(f"{host!r} is neither a host name nor an address") from None


def _common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _write(path: Path, content: bytes, mode: int) -> None:
    """In one step: no reader sees half of it, and a key is never readable by others."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
