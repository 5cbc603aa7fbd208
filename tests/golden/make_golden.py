"""Write golden files: small files of every format that fastrack writes today, which later versions have to open.

    PYTHONPATH=tests python tests/golden/make_golden.py tests/golden/0.3

It runs in the environment of the tests, once for each minor version. README.md says what is where. A folder that
exists is never written to: nothing that was released is made again.
"""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import chdir, closing, suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import golden_contents as contents
import numpy as np
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.keywrap import aes_key_wrap
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from golden_files import ARCHIVE, SUMS
from helpers.foundry import tdx
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots
from helpers.tour_rig import Rig

import fastrack
from fastrack import Key, attest
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier
from fastrack.kv import BlockContext, BlockFolder
from fastrack.providers import Passphrase, WrappedKey

KEYS = {name: Key.from_bytes(secret) for name, secret in contents.SECRETS.items()}
OWNER = KEYS["owner256"]
FAR = datetime(2999, 12, 31, 23, 59, 59, tzinfo=UTC)


def main(target):
    target = Path(target).absolute()
    if target.exists():
        sys.exit(f"{target} exists. Golden files are made once: name a new folder")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the processes that are started below
    part = Path(tempfile.mkdtemp(prefix=".golden-", dir=target.parent))
    try:
        with chdir(part):
            for make in MAKERS:
                Path(make.__name__).mkdir()
                with chdir(make.__name__):
                    make()
            list_files()
            pack()
        part.rename(target)
        target.chmod(0o755)
    except BaseException:
        shutil.rmtree(part)
        raise


def list_files():
    """Write the SHA-256 of each file, and print what there is."""
    paths = sorted(path for path in Path().rglob("*") if path.is_file())
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    Path(SUMS).write_text("".join(f"{digest}  {path}\n" for path, digest in digests.items()))
    lines = [f"{path.stat().st_size:8,} {path}\n" for path in paths]
    sys.stdout.writelines([*lines, f"{sum(path.stat().st_size for path in paths):8,} in {len(lines)} files\n"])


def pack():
    """Put the files in one archive, which is always the same: in the order of their names, with no times and owners."""
    names = sorted(path.as_posix() for path in Path().rglob("*") if path.is_file() and path.name != SUMS)
    with tarfile.open(ARCHIVE, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in names:
            member, data = tarfile.TarInfo(name), Path(name).read_bytes()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    for name in {Path(name).parts[0] for name in names}:
        shutil.rmtree(name)


def keys():
    for name, key in KEYS.items():
        key.save(name)


def pairs():
    for name, algorithm in (("alice", "MLKEM768_X25519"), ("carol", "P-384")):
        identity = Identity.generate(algorithm, name=name)
        identity.save(name)
        identity.recipient.save(f"{name}.pub")
    for name, algorithm in (("owner", "Ed25519"), ("owner-65", "ML-DSA-65")):
        signer = Signer.generate(algorithm, name=name if algorithm == "Ed25519" else "")
        signer.save(f"{name}.signer")
        signer.verifier.save(f"{name}.signer.pub")


def grants():
    owner, owner_65 = Signer.load("../pairs/owner.signer"), Signer.load("../pairs/owner-65.signer")
    alice, carol = Recipient.load("../pairs/alice.pub"), Recipient.load("../pairs/carol.pub")
    Path("passphrase").write_text(contents.PASSPHRASE + "\n")
    first = Grants.issue(OWNER, [alice], signer=owner)
    first.save("alone.grants")
    first.add([carol], key=OWNER, signer=owner, passphrase=contents.PASSPHRASE).save("several.grants")
    Grants.issue(OWNER, [alice], signer=owner, lease=timedelta(hours=1)).save("leased.grants")
    placed = {"signer": owner, "require": "confidential", "gpus": [contents.CHIP]}
    Grants.issue(OWNER, [alice], **placed).save("placed.grants")
    Grants.issue(OWNER, [alice], **placed, lease=timedelta(hours=1)).save("leased-placed.grants")
    limits = {"files": [contents.FILE_ID], "lineage": contents.LINEAGE, "least_version": 3, "expires": FAR}
    Grants.issue(KEYS["owner128"], [alice, carol], signer=owner_65, **limits).save("limited.grants")


def wrapped():
    """Wrap a key as tokens and vaults do. The ciphertexts are made here, but for the TPM's, which opens nowhere."""
    rsa_key = rsa.generate_private_key(65537, 2048)
    pem = rsa_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    Path("wrapping-rsa.pem").write_bytes(pem)
    aes = os.urandom(32)
    Path("wrapping-aes.hex").write_text(aes.hex() + "\n")
    secret = contents.SECRETS["owner256"]

    def oaep(used):
        return rsa_key.public_key().encrypt(secret, OAEP(MGF1(used), used, None))

    def boxed(data=b""):
        nonce = os.urandom(12)
        return nonce + AESGCM(aes).encrypt(nonce, secret, data)

    context = json.dumps({"fastrack-key": OWNER.id}).encode()
    tpm = len(b"public").to_bytes(2, "big") + b"public" + len(b"private").to_bytes(2, "big") + b"private"
    ciphertexts = {
        "pkcs11-rsa-sha256": oaep(hashes.SHA256()),
        "pkcs11-rsa-sha1": oaep(hashes.SHA1()),
        "pkcs11-aes": aes_key_wrap(aes, secret),
        "tpm": tpm,
        "tpm-pcrs": tpm,
        "vault-transit": b"vault:v1:" + base64.b64encode(boxed()),
        "aws-kms": boxed(context),
        "gcp-kms": boxed(f"fastrack-key:{OWNER.id}".encode()),
        "azure-keyvault": oaep(hashes.SHA256()),
    }
    for name, (provider, algorithm, parameters) in contents.WRAPPED.items():
        found = WrappedKey(provider, algorithm, OWNER.id, OWNER.bits, ciphertexts[name], parameters)
        found.save(f"{name}.wrapped")


def phrase():
    Passphrase(contents.PASSPHRASE).wrap(OWNER).save("owner256.wrapped")


def tensors(described):
    return {name: contents.tensor(name, *found) for name, found in described.items()}


def sealed():
    small = KEYS["owner128"]
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        (source / "dtypes.safetensors").write_bytes(contents.plain_file(contents.DTYPES, contents.METADATA))
        for key in (OWNER, small):
            fastrack.seal_file(source / "dtypes.safetensors", f"dtypes-{key.bits}.safetensors", key)
        np.save(source / f"{contents.ARRAY[0]}.npy", contents.tensor(*contents.ARRAY))
        fastrack.seal_file(source / f"{contents.ARRAY[0]}.npy", "npy.safetensors", OWNER)
        np.savez(source / "arrays.npz", **tensors(contents.ARRAYS))
        fastrack.seal_file(source / "arrays.npz", "npz.safetensors", OWNER)
        (source / "whole.bin").write_bytes(contents.WHOLE_FILE)
        fastrack.seal_file(source / "whole.bin", "whole.bin.safetensors", small)
    for key, shapes in ((OWNER, contents.SHAPES), (small, contents.FEW_SHAPES)):
        found = tensors(shapes | contents.PLAIN)
        fastrack.save_file(
            found, f"shapes-{key.bits}.safetensors", key, plain=contents.PLAIN, metadata=contents.METADATA
        )
    with chdir(".."):
        command = [sys.executable, "-m", "fastrack", "seal", "-", "sealed/stream.safetensors", "--key", "keys/owner256"]
        subprocess.run(command, input=contents.STREAM, check=True, stdout=subprocess.DEVNULL)
    made = tensors(contents.MOVED)
    moved = {name: fastrack.seal(made[name], OWNER, name=name) for name in ("a", "b")}
    fastrack.save_file({**made, **moved}, "moved.safetensors", OWNER)
    single, *described = contents.SINGLE
    alone = fastrack.seal(contents.tensor(single, *described), OWNER, name=single)
    Path("single.safetensors").write_bytes(alone.to_bytes())
    fastrack.rekey_file("npz.safetensors", "rekeyed.safetensors", keys=OWNER, key=KEYS["next256"])
    fastrack.save_file(tensors(contents.ARRAYS), "guarded.safetensors", OWNER, metadata={"format": "pt"})
    quantised = {name: torch_tensor(name, *found) for name, found in contents.QUANTISED.items()}
    quantised |= {name: torch_tensor(name, *found[:2]) for name, *found in contents.SCALES.values()}
    scales = {name: found[0] for name, found in contents.SCALES.items()}
    fastrack.save_file(quantised, "quantised.safetensors", OWNER, scales=scales)


def torch_tensor(name, dtype, shape):
    """Return a tensor of a dtype that NumPy lacks, too."""
    kinds = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "F32": torch.float32, "BF16": torch.bfloat16}
    content = bytearray(contents.tensor_bytes(name, dtype, shape))
    return torch.frombuffer(content, dtype=torch.uint8).view(kinds[dtype]).reshape(shape)


def folder():
    with tempfile.TemporaryDirectory() as name:
        for path, data in contents.folder().items():
            Path(name, path).parent.mkdir(exist_ok=True)
            Path(name, path).write_bytes(data)
        fastrack.seal_folder(name, "sealed", OWNER)
    for path in Path("sealed").iterdir():
        path.rename(path.name)
    Path("sealed").rmdir()


def training():
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 6, bias=False))
    shapes = contents.MODULE.items()
    module.load_state_dict({name: torch.from_numpy(contents.numbers(name, "F32", shape)) for name, shape in shapes})
    module.add_module("2", torch.nn.Linear(6, 6, bias=False))
    module[2].weight = module[1].weight
    fastrack.save_model(module, "model.safetensors", OWNER, metadata=contents.METADATA)
    fastrack.save_checkpoint("run.safetensors", contents.run_state(torch), OWNER)
    fastrack.save_checkpoint("later.safetensors", contents.later_state(torch), OWNER)
    fastrack.save_checkpoint("formed.safetensors", contents.formed_state(torch), OWNER)
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.spawn(save_shards, (f"file://{store}/store",), nprocs=2)


def save_shards(rank, store):
    """Save what one of two processes has."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    from fastrack.distributed import CheckpointWriter

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    state = dict(contents.VALUES)
    for name, shape in (contents.SHARDED | contents.REPLICATED).items():
        state[name] = torch.from_numpy(contents.numbers(name, "F32", shape))
    for name in contents.SHARDED:
        state[name] = distribute_tensor(state[name], mesh, [Shard(0)])
    dcp.save(state, storage_writer=CheckpointWriter("distributed", OWNER))
    dist.destroy_process_group()


def data():
    with fastrack.DatasetWriter("written", OWNER, records=["tokens"], shard_size=500) as writer:
        for row in range(contents.COUNT // 2):
            writer.write(contents.written(row))
    with fastrack.DatasetWriter("written", OWNER, records=["tokens"], shard_size=500) as writer:  # which continues
        samples = [contents.written(row) for row in range(contents.COUNT // 2, contents.COUNT)]
        writer.write_batch({name: [sample[name] for sample in samples] for name in samples[0]})
    shutil.copytree("written", "indexed")
    fastrack.index_dataset("indexed", OWNER)
    size = contents.STREAM_SIZE
    columns = {name: contents.numbers(name, "I32", (size,)) for name in ("tokens", "mask")}
    columns["rows"] = contents.numbers("rows", "F32", (size, 2))
    fastrack.save_file({**columns, "label": np.arange(size)}, "columns.safetensors", OWNER, plain=["label"])
    records = {"data": contents.numbers("data", "I64", (100,)), "offsets": np.array([0, 3, 3, 50, 100])}
    fastrack.save_file({**records, "label": np.arange(4)}, "records.safetensors", OWNER)
    with tempfile.TemporaryDirectory() as name:
        _import_all(Path(name))


def _import_all(source):
    import pyarrow as pa
    from pyarrow import feather, parquet

    for name, image in contents.IMAGES.items():
        Path(source, "images", name).parent.mkdir(parents=True, exist_ok=True)
        Path(source, "images", name).write_bytes(contents.PNG + image)
    Path(source, "a.txt").write_text("\n".join(contents.LINES), encoding="utf-8")
    objects = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in contents.OBJECTS)
    Path(source, "a.jsonl").write_text(objects, encoding="utf-8")
    with tarfile.open(source / "a.tar", "w") as archive:
        for key, members in contents.ARCHIVE.items():
            for ending, value in members.items():
                found = str(value).encode() if ending == "cls" else value
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(found)
                archive.addfile(info, io.BytesIO(found))
    types = {"small": pa.int32(), "tokens": pa.list_(pa.int32()), "day": pa.date32(), "raw": pa.binary()}
    table = pa.table({name: pa.array(values, types.get(name)) for name, values in contents.TABLE.items()})
    parquet.write_table(table, source / "a.parquet")
    feather.write_feather(table, source / "a.feather")
    with pa.OSFile(str(source / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("images", "a.txt", "a.jsonl", "a.tar", "a.parquet", "a.arrow", "a.feather"):
        fastrack.import_samples(source / name, Path(name).suffix[1:] or name, OWNER)
    fastrack.import_samples(table, "table", OWNER)
    fastrack.import_samples(contents.OBJECTS_IN_MEMORY, "dicts", OWNER)


def manifests():
    owner, owner_65 = Signer.load("../pairs/owner.signer"), Signer.load("../pairs/owner-65.signer")
    verifier = Verifier.load("../pairs/owner.signer.pub")
    Path("set").mkdir()
    for name in ("new", "at-1", "at-2"):
        fastrack.Anchor.create(f"{name}.anchor", owner=verifier)
    Path("set/config.json").write_bytes(contents.folder()["config.json"])
    fastrack.save_file(tensors(contents.MOVED), "set/1.safetensors", OWNER, plain=["own"])
    for anchor in ("at-1", "at-2"):
        found = tensors(contents.ARRAYS) | {"version": np.array(anchor == "at-2")}
        fastrack.save_file(found, "set/2.safetensors", OWNER)
        fastrack.publish("set", signer=owner)
        Path(f"{anchor}.manifest").write_bytes(Path("set/fastrack.manifest").read_bytes())
        fastrack.load_file("set/2.safetensors", anchor=f"{anchor}.anchor").close()
    Path("at-2.manifest").unlink()
    for name in ("set/fastrack.manifest.tlog-proof", "log-keys"):
        Path(name).write_text("of a transparency log, which version 0.1 could ask for\n")
    fastrack.save_checkpoint("run.safetensors", {"step": 3}, OWNER)
    fastrack.publish("run.safetensors", signer=owner_65, digests=True)


def attestation():
    owner = Signer.load("../pairs/owner.signer")
    Path("policy.toml").write_text(policy(1))
    Path("policy-all.toml").write_text(EVERY_KEY)
    Path("policy-later.toml").write_text(policy(1) + LATER_KEYS)
    Path("collateral.json").write_text(tdx.as_json(tdx.collateral()))
    for cpu in ("tdx", "snp"):
        challenge = attest.Challenge.generate(now=NOW)
        Path(f"challenge-{cpu}.json").write_bytes(challenge.to_bytes())
        # As make_offer does, which never gives the secret key away: it is needed to open the grants in a later process.
        identity = Identity.generate("MLKEM768_X25519")
        identity.save(f"machine-{cpu}")
        evidence = Machine(cpu, 1, is_small=True)(attest.OfferBinding(challenge, identity.recipient))
        offer = attest.Offer(challenge.id, identity.recipient, evidence).to_bytes()
        Path(f"offer-{cpu}.json").write_bytes(offer)
        verified = attest.verify_offer(offer, challenge, attest.Policy.from_toml(policy(1)), now=NOW, roots=roots())
        answer = attest.issue_grants(verified, list(KEYS.values()), signer=owner, now=NOW)
        Path(f"grants-{cpu}.json").write_bytes(answer)
    answer = attest.issue_grants(verified, OWNER, signer=owner, now=NOW, lease=timedelta(hours=1))
    Path("leased-snp.json").write_bytes(answer)
    found = {name: sorted(fingerprints) for name, fingerprints in asdict(roots()).items() if fingerprints}
    Path("roots.json").write_text(json.dumps(found, indent=1) + "\n")


EVERY_KEY = """\
version = 1

[cpu.tdx]
mrtd = ["{a48}"]
mrseam = ["{b48}"]
mrconfigid = ["{a48}"]
mrowner = ["{a48}"]
mrownerconfig = ["{a48}"]
mrservicetd = ["{a48}"]
rtmr0 = ["{a48}"]
rtmr1 = ["{a48}", "{b48}"]
rtmr2 = "any"
rtmr3 = ["{a48}"]
tcb_status = ["UpToDate", "SWHardeningNeeded"]
refused_advisories = ["INTEL-SA-00837"]
min_evaluation_number = 17
platforms = ["{a16}"]
max_collateral_age_days = 30
allow_debug = false
allow_migration = true

[cpu.snp]
measurement = "any"
id_key_digest = ["{a48}"]
author_key_digest = ["{a48}"]
host_data = ["{a32}"]
family_id = ["{a16}"]
image_id = ["{a16}"]
products = ["Milan", "Genoa"]
min_tcb = {{ bootloader = 3, tee = 0, snp = 8, microcode = 115, fmc = 1 }}
chip_ids = ["{a64}"]
max_vmpl = 1
revocation = "required"
max_revocation_age_days = 7
allow_debug = false
allow_migration = false
allow_smt = false
require_alias_check = true

[gpu]
count = 8
architectures = ["hopper", "blackwell"]
chips = ["GH100"]
chip_ids = ["0123456789ABCDEF"]
min_driver = "550.90.07"
min_vbios = {{ hopper = "96.00.9F.00.01" }}
modes = ["SPT", "PPCIE"]
require_manifests = false
revocation = "none"
max_revocation_age_days = 2
""".format(**{f"{digit}{size}": f"{digit}5" * size for digit in "ab" for size in (16, 32, 48, 64)})


# Since 0.3, of the section [gpu].
LATER_KEYS = """\
require = "proved"

[gpu.measurements."GH100 610.10.01 96.00.9F.00.01"]
until = "2999-12-31"
digests = {{ 7 = "{a48}" }}
""".format(a48="a5" * 48)


def broker():
    """Keep the memory of a broker that granted keys, refused an offer, and has an open challenge.

    Another one granted a lease, renewed it, and has a machine in quarantine; its owner signed the head of the log.
    """
    from fastrack.attest._broker.heads import sign_head
    from fastrack.attest._broker.ledger import Ledger, read_log
    from fastrack.attest._broker.service import Broker, Settings

    signer = Signer.load("../pairs/owner.signer")
    settings = Settings(attest.Policy.from_toml(policy(1)), roots=roots(), clock=lambda: NOW)
    with closing(Ledger("broker.db")) as ledger:
        served = Broker(settings, fastrack.KeyRing(OWNER), signer, ledger)
        for gpus in (1, 0):
            challenge = served.make_challenge()
            offer = attest.make_offer(challenge, Machine("tdx", gpus, is_small=True)).to_bytes()
            with suppress(fastrack.AttestationError):  # of the machine without a GPU
                served.answer(offer, "192.0.2.1")
        served.make_challenge()
    leased = Settings(settings.policy, roots=roots(), clock=lambda: NOW, lease=timedelta(hours=1), policy_id="5a" * 16)
    with closing(Ledger("leased.db")) as ledger:
        served = Broker(leased, fastrack.KeyRing(OWNER), signer, ledger)
        for _ in range(2):
            offer = attest.make_offer(served.make_challenge(), Machine("tdx", 1, is_small=True))
            served.answer(offer.to_bytes(), "192.0.2.1")
        for event, name, told in contents.MARKS:
            ledger.mark(event, name, now=NOW, details=told)
        Path("leased.head").write_bytes(sign_head(read_log("leased.db"), signer))
    assert sorted(map(str, Path().iterdir())) == ["broker.db", "leased.db", "leased.head"], "SQLite left more"


def kv():
    folder = BlockFolder("blocks", OWNER)
    for tokens, size in contents.BLOCKS.items():
        folder.put(block_context(tokens), contents.content(f"block {tokens}", size))


def block_context(tokens):
    return BlockContext("golden@1", "uint8 [16]", "0 of 1", bytes.fromhex(tokens), "tenant é")


def tours():
    """Keep the folder of a tour of two visits that is over, the folder in between, and databases of desks."""
    with tempfile.TemporaryDirectory() as name:
        rig = Rig(Path(name), ("ada", "ben"), owner=Signer.load("../pairs/owner.signer"), key=OWNER)
        chain, manifest = rig.finish(rig.whole())
        for version in (1, 2):
            shutil.copytree(Path(name, f"v{version}"), f"v{version}")
        for desk in ("owner", "ada"):
            shutil.copyfile(Path(name, f"{desk}.db"), f"{desk}.db")
    chain.save("v2/tour.chain")
    Path("v2/model.safetensors.manifest").write_bytes(manifest)


MAKERS = (
    *(keys, pairs, grants, wrapped, phrase, sealed, folder, training, data, manifests, attestation, broker, kv),
    tours,
)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    main(sys.argv[1])
