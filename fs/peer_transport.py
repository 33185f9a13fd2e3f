"""How this node's agent and its peers talk, as the configuration says: plainly on loopback, or with certificates."""

from pathlib import Path

from ckptfs.fs.config import NodeConfig
from ckptfs.replication.tls_transport import TlsFiles, TlsTransport
from ckptfs.replication.transport import PlainTransport, Transport


def transport_of(config: NodeConfig) -> Transport:
    """Raises `CertificateTrouble` for files that can't be used."""
    tls = config.tls
    if not tls.certificate:
        return PlainTransport()
    return TlsTransport(TlsFiles(Path(tls.ca), Path(tls.certificate), Path(tls.key), Path(tls.crl) if tls.crl else None))
