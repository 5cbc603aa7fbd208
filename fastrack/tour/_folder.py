"""The folder that goes from one visit to the next: a sealed model, its manifest, and the chain of the tour."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastrack._files.reader import SealedFile, file_in_memory
from fastrack._keys.signing import Verifier
from fastrack._sets.anchor import manifest_path
from fastrack._sets.entries import SUFFIX, SealedEntry
from fastrack._sets.manifest import HISTORY_LIMIT, Manifest, load_manifest
from fastrack._tensors.arrays import Bytes
from fastrack.errors import FormatError, RollbackError
from fastrack.tour._chain import Chain
from fastrack.tour._documents import MODEL, ModelVersion

CHAIN = "tour.chain"
FILES = (MODEL, f"{MODEL}{SUFFIX}", CHAIN)
"""The names in a folder of a tour: the model, its manifest and the chain."""
_newest: Chain | None = None
"""The chain that this process verified last, whose lines are not verified again at the next visit."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder whose manifest is that of the last receipt. Its model is compared with it when it is opened."""

    path: Path
    chain: Chain
    manifest: Manifest

    @classmethod
    def read(cls, path: Path, owner: Verifier) -> Folder:
        """Read a folder. Raise `RollbackError` for another version of the model than that of the last receipt."""
        global _newest  # noqa: PLW0603 - whichever thread writes it last
        chain = _newest = Chain.load(path / CHAIN, owner=owner, known=_newest)
        manifest = load_manifest(manifest_path(path / MODEL), owner=chain.signer)
        return cls(path, chain, require_newest(manifest, chain, str(path / MODEL)))

    def check(self, path: Path | None = None) -> None:
        """Compare all bytes of the model, or of a copy of it, with the manifest. It needs no key.

        An owner accepts a receipt for good when the next visit begins: the model of that receipt has to be there.
        """
        with SealedFile(self.path / MODEL if path is None else path, entry=_checked(self.manifest, self.chain)):
            pass


def verify_files(files: Mapping[str, Bytes], owner: Verifier) -> Chain:
    """Verify the contents of a folder, by the names of `FILES`, without any key, and return its chain.

    All of the model must be sealed. After the first visit all bytes of its messages are compared with their digests in
    the manifest.
    """
    if set(files) != set(FILES):
        raise FormatError(f"the folder of a tour: expected {', '.join(FILES)}, got other files. Bring it as it was")
    model, manifest_name, chain_name = FILES
    chain = Chain.from_bytes(bytes(files[chain_name]), owner=owner)
    manifest = Manifest.from_bytes(bytes(files[manifest_name]), owner=chain.signer, source=manifest_name)
    entry = _checked(require_newest(manifest, chain, model), chain)
    with file_in_memory(files[model], model) as file:
        entry.check(file)
    return chain


def _checked(manifest: Manifest, chain: Chain) -> SealedEntry:
    """Return the description of the model, which has the digests of all messages after the first visit."""
    entry = entry_of(manifest)
    if chain.visits and entry.digests.keys() != entry.sealed.keys():
        # Without them plain bytes could stand in the place of a message's.
        raise FormatError(
            "the manifest of a model: expected a SHA-256 of each message, got none. Begin the visit again"
        )
    return entry


def require_newest(manifest: Manifest, chain: Chain, source: str) -> Manifest:
    """Return the manifest of a folder, which must be the one that the last receipt of a chain names.

    All versions of its history that the chain knows must be the chain's; those before the tour only its owner's desk
    knows. Raise `RollbackError` otherwise.
    """
    found = ModelVersion(manifest.version, manifest.digest)
    if (manifest.lineage, found) != (chain.plan.lineage, chain.model):
        raise RollbackError(
            f"{source}: expected the model of the last receipt, {chain.model}, got {found}. Bring the model that the "
            "visit before made"
        )
    wanted = chain_history(chain)
    if manifest.history[: len(wanted)] != wanted:
        raise RollbackError(
            f"{source}: expected the history of its manifest to be that of the chain, got another. The visit before "
            "made it up; begin that visit again on another machine"
        )
    return manifest


def chain_history(chain: Chain) -> tuple[str, ...]:
    """Return the digests of the versions before the newest model of a chain, back to the first model of its tour."""
    models = [chain.plan.start, *(visit.after for visit in chain.visits)]
    return tuple(model.digest for model in models[-2::-1])[:HISTORY_LIMIT]


def entry_of(manifest: Manifest) -> SealedEntry:
    """Return the description of the model in its manifest. Raise `FormatError` unless all of it is sealed."""
    entry = manifest.files.get(MODEL)
    if not isinstance(entry, SealedEntry) or entry.plain or entry.kind != "checkpoint" or len(manifest.files) != 1:
        raise FormatError(
            f"the manifest of a model: expected {MODEL} with all of it sealed, got others. Seal all of it"
        )
    return entry


def write_file(path: Path, content: bytes) -> None:
    """Write a file of a new folder, which is whole or absent itself, to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
