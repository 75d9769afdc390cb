"""What other workers, or an operator, have left in the folder of the disk tier, and where in the tree it belongs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from worker.snapshot_index import Node, SnapshotIndex
from worker.tiers.folder import delete
from worker.tiers.part_file import (
    BadFile,
    Found,
    Identity,
    PartKind,
    file_name,
    read_header,
)

log = logging.getLogger(__name__)

Files = dict[tuple[str, bytes], dict[PartKind, tuple[Path, Found]]]  # by tenant and digest
Adopt = Callable[[Node, PartKind, Path, Found], Node | None]  # of the boundary that a file extends: its own


def found_files(paths: Iterable[Path], identity: Identity, refuse: Callable[[Path, BadFile], None]) -> Files:
    """Those of these files that belong here. The others are given to `refuse`."""
    files: Files = {}
    for path in paths:
        try:
            found = _belonging(path, identity)
        except BadFile as error:
            refuse(path, error)
        else:
            files.setdefault((found.label.tenant, found.label.boundary.digest), {})[found.label.kind] = path, found
    return files


def _belonging(path: Path, identity: Identity) -> Found:
    """What a file says it is. Raises `BadFile` where it says that it is not of this place."""
    found = read_header(path)
    label = found.label
    if path.name != file_name(label.tenant, label.boundary.digest, label.kind):
        raise BadFile("checksum", "it has the name of another file")
    if found.identity.fingerprint != identity.fingerprint:
        raise BadFile("fingerprint", "it belongs to another model")
    return found


def adopt_all(index: SnapshotIndex, files: Files, adopt: Adopt) -> None:
    """Enter files into the tree, from its roots on. What extends nothing is removed."""
    below: dict[tuple[str, bytes], list[bytes]] = {}
    for (tenant, digest), parts in files.items():
        for parent in {head.label.parent for _, head in parts.values()}:
            below.setdefault((tenant, parent), []).append(digest)
    ready = [node for root in index.roots for node in root.subtree()]
    ready += [Node(tenant, None, b"", None) for tenant in {tenant for tenant, _ in below}]
    while ready:
        above = ready.pop()
        for digest in below.pop((above.tenant, above.digest), []):
            for kind, (path, head) in list(files.get((above.tenant, digest), {}).items()):
                node = adopt(above, kind, path, head)
                if node is not None:
                    del files[above.tenant, digest][kind]
                    ready.append(node)
    for parts in files.values():
        for path, _ in parts.values():
            log.info("disk cache: %s extends nothing that is here", path.name)
            delete(path)
