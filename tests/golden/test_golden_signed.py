"""Documents of earlier versions open: manifests and anchors, attestation, and a broker's database."""

import base64
import json
import shutil
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing
from datetime import UTC, datetime, timedelta

import golden_contents as contents
import pytest
from golden_files import NOW, cli, environment, load_keys, load_policy, load_roots, opens, owner_key
from helpers.by_hand import exchange, logs, sets

import fastrack
from fastrack import attest
from fastrack.errors import RollbackError
from fastrack.grants import Grants, Identity, Signer, Verifier

# Manifests and anchors.


@opens("manifests/set/fastrack.manifest", "manifests/at-1.manifest", "manifests/run.safetensors.manifest")
def test_manifests_open(golden):
    found = {}
    for name, signer, version in (
        ("set/fastrack.manifest", "owner", 2),
        ("at-1.manifest", "owner", 1),
        ("run.safetensors.manifest", "owner-65", 1),
    ):
        path, public = golden(f"manifests/{name}"), golden(f"pairs/{signer}.signer.pub")
        manifest = fastrack.load_manifest(path, owner=Verifier.load(public))
        payload, digest = sets.open_manifest(path.read_bytes(), public.read_text().split()[0])
        assert (manifest.version, manifest.digest, manifest.lineage) == (version, digest, payload["lineage"])
        assert set(manifest.files) == set(payload["files"])
        entry = f"fastrack/manifest@1\n{payload['lineage']}\n{version}\n{digest}\n"
        assert manifest.log_entry == entry.encode()
        found[name] = payload
    assert found["set/fastrack.manifest"]["lineage"] == found["at-1.manifest"]["lineage"]
    assert found["run.safetensors.manifest"]["files"]["run.safetensors"]["digests"]
    golden("manifests/set")
    fastrack.load_manifest(
        golden("manifests/set/fastrack.manifest"), owner=Verifier.load(golden("pairs/owner.signer.pub"))
    ).verify(golden("manifests/set"))


@opens("manifests/*.anchor", "manifests/set/*")
@pytest.mark.slow
def test_every_anchor_accepts_the_set(golden):
    owner, folder = Verifier.load(golden("pairs/owner.signer.pub")), golden("manifests/set")
    manifest = fastrack.load_manifest(folder / "fastrack.manifest", owner=owner)
    for name, version in (("new", 0), ("at-1", 1), ("at-2", 2)):
        path = golden(f"manifests/{name}.anchor")
        listed = {name: (folder / name).read_bytes() for name in ("fastrack.manifest", *manifest.files)}
        by_hand = sets.read_manifest(listed, path.read_text().removesuffix("\n"))
        anchor = fastrack.Anchor(path)
        assert (anchor.owner, anchor.version) == (owner, version)
        assert anchor.lineage == (manifest.lineage if version else None)
        assert (anchor.digest == manifest.digest) is (version == 2)
        with fastrack.load_file(folder / "1.safetensors", anchor=path) as file:
            assert file.plain["own"].tobytes() == contents.tensor_bytes("own", *contents.MOVED["own"])
        moved_on = fastrack.Anchor(path)
        assert (moved_on.version, moved_on.digest, moved_on.lineage) == (2, manifest.digest, manifest.lineage)
        assert moved_on.read(folder / "config.json") == contents.folder()["config.json"]
        moved_on.verify(folder)
        assert path.read_text() == by_hand["anchor"] + "\n"
    shown = cli("anchor", path)
    assert (shown["version"], shown["digest"], shown["owner"]) == (2, manifest.digest, owner.id)


@opens("manifests/at-2.anchor", "manifests/at-1.manifest")
def test_an_older_version_is_refused(golden):
    folder = golden("manifests/set")
    shutil.copyfile(golden("manifests/at-1.manifest"), folder / "fastrack.manifest")
    with pytest.raises(RollbackError):
        fastrack.load_file(folder / "1.safetensors", anchor=golden("manifests/at-2.anchor"))
    fastrack.load_file(folder / "1.safetensors", anchor=golden("manifests/at-1.anchor")).close()
    with pytest.raises(RollbackError):  # which version 2 has in its place
        fastrack.load_file(folder / "2.safetensors", anchor=golden("manifests/at-1.anchor"))


@opens("manifests/set/fastrack.manifest.tlog-proof", "manifests/log-keys")
def test_a_proof_of_a_transparency_log_is_no_file_of_the_set(golden):
    golden("manifests/log-keys")  # which nothing reads any more
    anchor = fastrack.Anchor(golden("manifests/new.anchor"))
    assert list(anchor.verify(golden("manifests/set")).files) == ["1.safetensors", "2.safetensors", "config.json"]
    golden("manifests/set/fastrack.manifest.tlog-proof").write_text("another")
    fastrack.Anchor(anchor.path).verify(golden("manifests/set"))


@opens("manifests/run.safetensors", "manifests/run.safetensors.manifest")
def test_a_published_checkpoint_opens(golden, tmp_path):
    owner = Verifier.load(golden("pairs/owner-65.signer.pub"))
    fastrack.Anchor.create(tmp_path / "run.anchor", owner=owner)
    golden("manifests/run.safetensors.manifest")
    path, anchor = golden("manifests/run.safetensors"), tmp_path / "run.anchor"
    assert fastrack.load_checkpoint(path, keys=owner_key(golden), anchor=anchor) == {"step": 3}


@opens("manifests/set/*")
def test_a_set_is_published_again(golden):
    folder, signer = golden("manifests/set"), Signer.load(golden("pairs/owner.signer"))
    before = fastrack.load_manifest(folder / "fastrack.manifest", owner=signer.verifier)
    later = fastrack.publish(folder, signer=signer)
    assert (later.version, later.lineage) == (3, before.lineage)
    fastrack.Anchor(golden("manifests/at-1.anchor")).verify(folder)


# Attestation.


@opens("attestation/policy.toml", "attestation/policy-all.toml")
def test_policies_open(golden):
    says_little = "rtmr1" not in golden("attestation/policy.toml").read_text()  # as those of 0.1
    policy, added = load_policy(golden)
    lines = {"[cpu.tdx] rtmr1", "[cpu.tdx] rtmr2", "[cpu.snp] min_tcb"}
    assert added == (lines if says_little else set())
    assert policy.tdx.measurements["mrtd"] == {b"\x22" * 48}
    assert policy.snp.measurements == {"measurement": {b"\x22" * 48}}
    assert (policy.gpu.count, policy.gpu.min_driver, policy.gpu.require_manifests) == (1, "550", True)
    policy = attest.Policy.from_toml(golden("attestation/policy-all.toml"))
    a, b = b"\xa5", b"\xb5"
    fields = ("mrtd", "mrconfigid", "mrowner", "mrownerconfig", "mrservicetd", "rtmr0", "rtmr3")
    registers = {field: {a * 48} for field in fields}
    assert policy.tdx == attest.TdxPolicy(
        measurements=registers | {"mrseam": {b * 48}, "rtmr1": {a * 48, b * 48}, "rtmr2": None},
        tcb_status=frozenset({attest.TcbStatus("UpToDate"), attest.TcbStatus("SWHardeningNeeded")}),
        refused_advisories=frozenset({"INTEL-SA-00837"}),
        min_evaluation_number=17,
        platforms=frozenset({a * 16}),
        max_collateral_age=timedelta(days=30),
        allow_debug=False,
        allow_migration=True,
    )
    assert policy.snp == attest.SnpPolicy(
        measurements={
            "measurement": None,
            "id_key_digest": {a * 48},
            "author_key_digest": {a * 48},
            "host_data": {a * 32},
            "family_id": {a * 16},
            "image_id": {a * 16},
        },
        products=frozenset({attest.SnpProduct("Milan"), attest.SnpProduct("Genoa")}),
        min_tcb={"bootloader": 3, "tee": 0, "snp": 8, "microcode": 115, "fmc": 1},
        chip_ids=frozenset({a * 64}),
        max_vmpl=1,
        revocation=attest.Revocation("required"),
        max_revocation_age=timedelta(days=7),
        allow_debug=False,
        allow_migration=False,
        allow_smt=False,
        require_alias_check=True,
    )
    assert policy.gpu == attest.GpuPolicy(
        count=8,
        architectures=frozenset({attest.GpuArchitecture("hopper"), attest.GpuArchitecture("blackwell")}),
        chips=frozenset({"GH100"}),
        chip_ids=frozenset({"0123456789ABCDEF"}),
        min_driver="550.90.07",
        min_vbios={"hopper": "96.00.9F.00.01"},
        modes=frozenset({attest.GpuMode("SPT"), attest.GpuMode("PPCIE")}),
        require_manifests=False,
        revocation=attest.Revocation("none"),
        max_revocation_age=timedelta(days=2),
    )


@opens("attestation/challenge-*", "attestation/offer-*", "attestation/roots.json", "attestation/collateral.json")
@pytest.mark.slow
def test_an_offer_is_verified(golden):
    policy, _ = load_policy(golden)
    for cpu in ("tdx", "snp"):
        data = golden(f"attestation/challenge-{cpu}.json").read_bytes()
        challenge = attest.Challenge.from_bytes(data)
        document = json.loads(data)
        assert challenge.to_bytes() == data
        assert (challenge.id, base64.b64encode(challenge.nonce).decode()) == (document["id"], document["nonce"])
        assert challenge.expires == NOW + timedelta(minutes=5)
        data = golden(f"attestation/offer-{cpu}.json").read_bytes()
        offer = attest.Offer.from_bytes(data)
        assert offer.to_bytes() == data
        found = attest.verify_offer(offer, challenge, policy, now=NOW, roots=load_roots(golden)).describe()
        assert (found["challenge"], found["recipient"]) == (challenge.id, offer.recipient.id)
        assert found["cpu"]["mrtd" if cpu == "tdx" else "measurement"] == "22" * 48
        assert len(found["devices"]) == 1
        shown = cli("attest", "show", golden(f"attestation/offer-{cpu}.json"))
        assert challenge.id in json.dumps(shown)
    collateral = json.loads(golden("attestation/collateral.json").read_bytes())
    parsed = attest.TdxCollateral.from_json(golden("attestation/collateral.json").read_bytes())
    assert parsed.tcb_info == collateral["tcb_info"].encode()
    assert parsed.root_ca_crl.hex() == collateral["root_ca_crl"]


@opens("attestation/challenge-*", "attestation/offer-*")
def test_evidence_is_bound_to_an_offer_as_the_page_of_formats_says(golden):
    for cpu, part in (("tdx", "quote"), ("snp", "report")):
        offer, challenge = (golden(f"attestation/{name}-{cpu}.json").read_bytes() for name in ("offer", "challenge"))
        found, document = exchange.read_offer(offer, challenge, f"{NOW:%Y-%m-%dT%H:%M:%SZ}"), json.loads(offer)
        assert bytes.fromhex(found["report_data"]) in base64.b64decode(document["cpu"][part])
        for nonce, device in zip(found["nonces"], document["devices"], strict=True):
            assert bytes.fromhex(nonce) in base64.b64decode(device["report"])


@opens("attestation/grants-*", "attestation/machine-*")
@pytest.mark.slow
def test_grants_that_answer_an_offer_open(golden):
    owner = Verifier.load(golden("pairs/owner.signer.pub"))
    line = golden("pairs/owner.signer.pub").read_text().rstrip()
    keys = load_keys(golden)
    for cpu in ("tdx", "snp"):
        document = json.loads(golden(f"attestation/grants-{cpu}.json").read_bytes())
        challenge = json.loads(golden(f"attestation/challenge-{cpu}.json").read_bytes())
        assert (document["kind"], document["version"]) == ("fastrack/grants", 1)
        assert document["challenge"] == challenge["id"]
        identity = Identity.load(golden(f"attestation/machine-{cpu}"))
        for envelope, key in zip(map(base64.b64decode, document["grants"]), keys.values(), strict=True):
            grants = Grants.from_bytes(envelope, owner=owner)
            assert grants.expires is not None
            assert grants.unlock(identity, now=NOW).first == key
        machine, at = golden(f"attestation/machine-{cpu}").read_bytes(), f"{NOW:%Y-%m-%dT%H:%M:%SZ}"
        answer = golden(f"attestation/grants-{cpu}.json").read_bytes()
        found = exchange.read_answer(answer, challenge["id"], [line], machine, at)
        assert found["keys"] == [contents.SECRETS[name].hex() for name in keys]
        shown = cli("attest", "show", golden(f"attestation/grants-{cpu}.json"))
        assert challenge["id"] in json.dumps(shown)


# The broker.


@opens("broker/broker.db")
@pytest.mark.slow
def test_a_brokers_log_opens(golden):
    path = golden("broker/broker.db")
    entries, last = logs.read_log(path)
    head = last["hash"]
    shown = cli("broker", "log", "--database", path, "--last", 0, "--head", head)
    assert (shown["ok"], shown["count"], shown["head"]) == (True, 5, head)
    assert [(entry["event"], entry["details"]) for entry in shown["entries"]] == entries
    assert [event for event, _ in entries] == ["started", "offered", "granted", "offered", "refused"]
    assert entries[2][1]["keys"] == [owner_key(golden).id]
    assert {entry["time"] for entry in shown["entries"]} == {"2026-06-01T12:00:00Z"}


@opens("broker/broker.db")
@pytest.mark.slow
def test_a_broker_goes_on_with_its_database(golden):
    pytest.importorskip("uvicorn")
    path = golden("broker/broker.db")
    entries, _ = logs.read_log(path)
    load_policy(golden)
    options = {
        "--policy": golden("attestation/policy.toml"),
        "--signer": golden("pairs/owner.signer"),
        "--key": golden("keys/owner256"),
        "--database": path,
        "--port": 0,
    }
    command = [sys.executable, "-m", "fastrack", "broker", "serve", "--insecure-loopback"]
    command += [str(part) for option in options.items() for part in option]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            port = json.loads(process.stderr.readline())["port"]
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/challenges", method="POST", data=b"")
            with urllib.request.urlopen(request, timeout=30) as answer:
                challenge = attest.Challenge.from_bytes(answer.read())
        finally:
            process.terminate()
            process.communicate(timeout=30)
    assert challenge.expires > datetime.now(UTC)
    later, head = logs.read_log(path)
    assert [event for event, _ in later] == [*(event for event, _ in entries), "started"]
    assert cli("broker", "log", "--database", path)["head"] == head["hash"]


@opens()
@pytest.mark.slow
def test_an_altered_log_is_refused(golden):
    path = golden("broker/broker.db")
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TRIGGER log_is_not_changed")
        database.execute("UPDATE log SET time = '2026-06-01T12:00:01Z' WHERE number = 2")
        database.commit()
    shown = cli("broker", "log", "--database", path, status=4)
    assert shown["error"]["type"] == "AuthenticationError"
