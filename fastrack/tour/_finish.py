"""The end of a tour: `finish` has the owner sign that it is complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fastrack._keys.signing import Verifier
from fastrack._sets.anchor import manifest_path
from fastrack._sets.manifest import Manifest
from fastrack._util.new_folder import new_folder
from fastrack._util.public import public
from fastrack.errors import RollbackError
from fastrack.tour._chain import Chain
from fastrack.tour._documents import MODEL
from fastrack.tour._folder import CHAIN, Folder, write_file
from fastrack.tour._messages import Desk, pack, unpack


@public
def finish(folder: str | os.PathLike[str], out: str | os.PathLike[str], *, owner: Verifier, owner_desk: Desk) -> Chain:
    """Have the owner complete a tour after its last visit, and write the final model folder.

    In it the owner has signed the manifest too, so that `fastrack.Anchor` accepts the model; the chain ends with the
    owner's completion. The key of `model_key` opens the model. This needs no key and no proof.

    Parameters
    ----------
    folder : path
        The model folder that the last visit wrote. It stays.
    out : path
        The new folder. It must not exist.
    owner : Verifier
        The public key of the owner of the model.
    owner_desk : Desk
        Where the owner answers.

    Returns
    -------
    Chain
        The complete chain, as it is in `out`.

    Raises
    ------
    RollbackError
        If a visit is missing, the tour is finished already, or the model is not the one of the last receipt.
    SignatureError, AuthenticationError, FormatError
        If the folder or an answer does not verify.
    OSError
        If the desk cannot be reached, or a file not be read or written.

    Examples
    --------
    >>> from fastrack import tour
    >>> from fastrack.grants import Signer
    >>> desk = tour.RemoteDesk("http://127.0.0.1:9")
    >>> tour.finish("visit-2", "end", owner=Signer.generate().verifier, owner_desk=desk)
    Traceback (most recent call last):
        ...
    FileNotFoundError: ...
    """
    given = Folder.read(Path(folder), owner)
    if given.chain.completion is not None:
        raise RollbackError(
            f"finishing a tour: expected the folder of the last visit, got {given.path}, which is finished. Use it"
        )
    with new_folder(Path(out)) as target:
        shutil.copyfile(given.path / MODEL, target / MODEL)
        with (target / MODEL).open("rb") as file:
            os.fsync(file.fileno())
        given.check(target / MODEL)  # before the owner ends the tour, which it does for good
        message = pack("finish", chain=given.chain.to_bytes(), manifest=given.manifest.envelope)
        answer = unpack("finished", owner_desk.ask("finish", message))
        chain = given.chain.extend(answer["completion"])
        chain.require_complete()
        manifest = Manifest.from_bytes(answer["manifest"], owner=owner, source="the final manifest")
        if manifest.digest != given.manifest.digest:
            raise RollbackError(
                f"finishing a tour: expected the owner's signature of manifest {given.manifest.digest:.16}…, got one "
                f"of {manifest.digest:.16}…. Ask again"
            )
        write_file(manifest_path(target / MODEL), manifest.envelope)
        write_file(target / CHAIN, chain.to_bytes())
    return chain
