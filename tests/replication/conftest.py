"""Certificates for the tests of this room, from an authority of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs.replication.certificates import CertificateAuthority, write_node
from ckptfs.replication.tls_transport import TlsFiles

Certify = Callable[..., TlsFiles]


def written(directory: Path, authority: CertificateAuthority, node: str, hosts: list[str], days: float = 7) -> TlsFiles:
    """A node's files, as an operator would copy them to it."""
    write_node(authority, node, hosts, directory, days)
    files = TlsFiles(directory / "ca.pem", directory / "node.pem", directory / "node.key", directory / "crl.pem")
    return files


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path_factory.mktemp("authority") / "ca", "test")


@pytest.fixture
def certify(authority: CertificateAuthority, tmp_path: Path) -> Certify:
    """`certify("node-1")`: files of a node that the tests' authority signed; `by`: another one."""

    def make(node: str, hosts: list[str] | None = None, *, days: float = 7, by: CertificateAuthority | None = None) -> TlsFiles:
        return written(tmp_path / "tls" / node, by or authority, node, hosts or ["127.0.0.1", "localhost"], days)

    return make
