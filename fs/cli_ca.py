"""`ckptfs ca` and `ckptfs nodes`: who may take part in a cluster, where its nodes are on several machines."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ckptfs.cache.store import write_durably
from ckptfs.fs.cli_errors import WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, path_of, print_json
from ckptfs.fs.config import NODE_ID_RULE, is_node_id

ca = typer.Typer(no_args_is_help=True, help="The cluster's certificate authority, in a directory that only its operator reads.")
nodes = typer.Typer(no_args_is_help=True, help="The cluster's nodes.")

AuthorityDirectory = Annotated[Path, typer.Argument(parser=path_of, metavar="DIR", help="The authority's directory.")]
Authority = Annotated[Path, typer.Option("--ca", parser=path_of, metavar="DIR", help="The authority's directory.")]
Node = Annotated[str, typer.Argument(metavar="NODE", help="The node's id, as in its configuration.")]


def require_node_id(node: str) -> None:
    """Raises `WrongUse` for an id that no node can have: its node.toml would be refused."""
    if not is_node_id(node):
        raise WrongUse(f"{node!r} is no node's id: {NODE_ID_RULE}")


@ca.command("init")
def init(
    directory: AuthorityDirectory,
    name: Annotated[str, typer.Option("--name", help="What the authority is called in its certificate.")] = "cluster",
    as_json: JsonFlag = False,
) -> None:
    """Make a new authority. Its ca.key makes nodes: keep it where no node can read it."""
    from ckptfs.replication.certificates import CertificateAuthority

    CertificateAuthority.create(directory, name)
    if as_json:
        print_json({"directory": str(directory)})
        return
    console().print(
        f"the authority is in {directory}: keep ca.key to yourself\n"
        f"next, for each node: ckptfs nodes add NODE --host HOST --ca {shlex.quote(str(directory))} --out DIR",
        soft_wrap=True,
    )


@ca.command("revoke")
def revoke(node: Node, authority: Authority, as_json: JsonFlag = False) -> None:
    """Revoke every certificate of a node. It holds where the new crl.pem has been copied to, without a restart."""
    from ckptfs.replication.certificates import CertificateAuthority

    count = CertificateAuthority(authority).revoke(node)
    if as_json:
        print_json({"node": node, "revoked": count, "crl": str(authority / "crl.pem")})
        return
    said = f"{count} certificates of {node} revoked" if count else f"every certificate of {node} was revoked before"
    console().print(f"{said}; now copy {authority / 'crl.pem'} to every node, to where its tls.crl names it", soft_wrap=True)


@nodes.command("add")
def add(
    node: Node,
    authority: Authority,
    out: Annotated[Path, typer.Option("--out", parser=path_of, metavar="DIR", help="Where the node's files are written.")],
    host: Annotated[list[str], typer.Option("--host", help="The name or address peers reach the node by; may be repeated.")],
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long the certificate is valid.")] = 365,
    as_json: JsonFlag = False,
) -> None:
    """Issue a node's certificate and the token it joins with: the files its [tls] section names, ready to be copied to it."""
    from ckptfs.cache.admission import hash_of, new_token
    from ckptfs.replication.certificates import CertificateAuthority, write_node

    require_node_id(node)
    write_node(CertificateAuthority(authority), node, host, out, days)
    token = new_token()
    write_durably(out / "join.token", f"{token}\n", 0o600)
    token_hash = hash_of(token).hex()
    if as_json:
        print_json({"node": node, "directory": str(out), "files": sorted(os.listdir(out)), "token_hash": token_hash})
        return
    section = {"ca": "ca.pem", "certificate": "node.pem", "key": "node.key", "crl": "crl.pem", "token": "join.token"}
    lines = "\n".join(f'{key} = "/etc/ckptfs/tls/{name}"' for key, name in section.items())
    console().print(
        f"{node}'s files are in {out}; copy them to the node, for instance to /etc/ckptfs/tls, and put into its node.toml:\n\n"
        f'[tls]\n{lines}\n\nand under [node] the address that the certificate names: listen = "{host[0]}:7070"\n\n'
        f"then, on a node of the cluster, if it has one yet: ckptfs nodes admit {shlex.quote(node)} {token_hash}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
