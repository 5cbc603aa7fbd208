"""``fastrack keygen``: make a key file."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastrack._cli.console import clean, taken_back, tell
from fastrack._cli.errors import file_path, refuse_options, refuse_values
from fastrack._cli.files import KEPT, check_directory, check_new
from fastrack._cli.options import Algorithm, Bits, Json, Silent
from fastrack._keys.keys import Key

if TYPE_CHECKING:
    from fastrack.providers import KeyWrapper


def keygen(
    path: Annotated[
        Path, typer.Argument(parser=file_path, metavar="PATH", help="The key file to make. It must not exist.")
    ],
    *,
    bits: Annotated[Bits, typer.Option(help="Size of the AES key.")] = "256",
    identity: Annotated[
        bool, typer.Option("--identity", help="Make a key pair to be granted keys: PATH, and PATH.pub to give away.")
    ] = False,
    signer: Annotated[
        bool, typer.Option("--signer", help="Make a key pair to sign grants: PATH, and PATH.pub to give away.")
    ] = False,
    algorithm: Annotated[
        Algorithm | None,
        typer.Option(
            help="The kind of a key pair. If absent, MLKEM768_X25519 for --identity and Ed25519 for --signer."
        ),
    ] = None,
    wrap: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="Encrypt the key by the key of a token, TPM or vault: pkcs11:..., tpm:[PCRS], vault-transit:NAME, "
            "aws-kms:KEY, gcp-kms:KEY or azure-keyvault:URL. PATH ends in .wrapped, and is no secret.",
        ),
    ] = None,
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Encrypt the key under a passphrase, asked for twice. The same PATH.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="The name in PATH.pub. If absent, the name of PATH.")] = None,
    quiet: Silent = False,
    as_json: Json = False,
) -> None:
    """Make a key, in a file that only you may read; or a key pair."""
    check_directory(path)
    if passphrase:
        refuse_options({"--wrap": wrap}, "expected none beside --passphrase")
        wrap = "passphrase:"
    if identity or signer:
        if wrap is not None:
            raise typer.BadParameter("expected --wrap only for a key, got a key pair too; a pair cannot be wrapped")
        _make_pair(path, algorithm, name or path.stem, identity=identity, signer=signer, quiet=quiet, as_json=as_json)
        return
    wrapper = None if wrap is None else _open_wrapper(path, wrap)
    if wrapper is None and path.suffix == ".wrapped":
        raise typer.BadParameter("expected --wrap URI for a path that ends in .wrapped, got none")
    key = Key.generate(int(bits))
    size, key_id = key.bits, key.id
    try:
        if wrapper is None:
            key.save(path)
        else:
            with refuse_values("--passphrase"):
                wrapped = wrapper.wrap(key)
            wrapper.unwrap(wrapped).wipe()  # a key that does not unwrap is not saved
            wrapped.save(path)
    finally:
        key.wipe()
    shown, quoted = clean(str(path)), clean(shlex.quote(str(path)))
    if wrapper is None:
        made, advice = "that only you may read", "Keep a copy in a safe place: without it"
    else:
        made, advice = f"wrapped by {clean(wrapper.provider)}", "Keep a copy, and what unwraps it: without either"
    lines = [
        f"{shown}: a new {size}-bit key{' ' if wrapper is None else ', '}{made}",
        f"id: {key_id}",
        f"{advice}, what it seals cannot be opened.",
        f"Next: fastrack import TABLE.csv FOLDER --key {quoted}",
        f"  or: fastrack seal data.safetensors sealed.safetensors --key {quoted}",
    ]
    with taken_back([path], "key"):
        tell(lines, as_json=as_json, quiet=quiet, path=str(path), key_id=key_id, bits=size)


def _open_wrapper(path: Path, uri: str) -> "KeyWrapper":
    from fastrack.providers import open_wrapper

    if path.suffix != ".wrapped":
        raise typer.BadParameter(f"expected a path with the suffix .wrapped, such as {path.name}.wrapped, got another")
    check_new(path, "exists and was left as it was. Choose another name")
    with refuse_values("--wrap"):
        return open_wrapper(uri)


def _make_pair(
    path: Path, algorithm: Algorithm | None, name: str, *, identity: bool, signer: bool, quiet: bool, as_json: bool
) -> None:
    from fastrack.grants import Identity, Signer

    if identity and signer:
        raise typer.BadParameter("expected one of --identity and --signer, got both; make two key pairs")
    kind = Identity if identity else Signer
    public_path = path.with_name(f"{path.name}.pub")
    check_new(public_path, KEPT)
    try:
        pair = kind.generate(name=name) if algorithm is None else kind.generate(algorithm, name=name)
        public = pair.recipient if isinstance(pair, Identity) else pair.verifier
        line = str(public)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    pair.save(path)
    public.save(public_path)
    lines = [
        f"{clean(str(path))}: a new secret key of {public.algorithm} that only you may read",
        f"{clean(str(public_path))}: its public key, of {len(line)} characters, to give away",
        f"id: {public.id}",
    ]
    document = {"path": str(path), "public": str(public_path), "id": public.id, "algorithm": public.algorithm}
    with taken_back([path, public_path], "key pair"):
        tell(lines, as_json=as_json, quiet=quiet, **document)
