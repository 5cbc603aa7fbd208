"""Challenges, offers, and grants for machines."""

from hashlib import sha256, sha384, sha512

from helpers.by_hand.documents import is_hexadecimal, is_number, load_line, members, read_base64, read_time, require
from helpers.by_hand.grants import read_granted

KIBIBYTE = 1 << 10
MEBIBYTE = 1 << 20
COLLATERAL = (
    "tcb_info tcb_info_signature tcb_info_issuer_chain qe_identity qe_identity_signature qe_identity_issuer_chain "
    "root_ca_crl pck_crl pck_crl_issuer_chain"
)


def _open(content, kind, names, limit):
    document = members(load_line(content, limit), f"kind version {names}")
    require((document["kind"], document["version"]) == (f"fastrack/{kind}", 1), f"a {kind} of version 1")
    require(is_number(document["version"]), "a number")
    return document


def read_challenge(content):
    document = _open(content, "challenge", "id nonce expires", KIBIBYTE)
    require(is_hexadecimal(document["id"], 32), "an id")
    read_time(document["expires"])
    return {
        "id": document["id"],
        "nonce": read_base64(document["nonce"], [32]).hex(),
        "expires": document["expires"],
    }


def read_offer(content, challenge, time):
    """Check an offer for a challenge, a whole document, and return what its evidence has to be bound to."""
    expected = read_challenge(challenge)
    document = _open(content, "offer", "challenge public cpu devices manifests", 8 * MEBIBYTE)
    require(is_hexadecimal(document["challenge"], 32), "an id")
    public = read_base64(document["public"], [1216])
    _check_cpu(document["cpu"])
    manifests = [_read_manifest(each) for each in document["manifests"]]
    require(len(manifests) <= 64 and len(set(manifests)) == len(manifests), "64 different manifests at most")
    require(len(document["devices"]) <= 32, "32 devices at most")
    devices = [_read_device(each, manifests) for each in document["devices"]]
    named = dict.fromkeys(place for device in document["devices"] for place in device["manifests"])
    require(list(named) == list(range(len(manifests))), "manifests in the order of the devices")
    require(document["challenge"] == expected["id"], "the challenge", "attestation")
    require(read_time(time) < read_time(expected["expires"]), "an offer before the end", "attestation")
    gpus = sha384(b"fastrack/gpus@1" + _parts(*devices)).digest()
    indices = [index.to_bytes(4, "big") for index in range(len(devices))]
    return {
        "public": sha256(public).hexdigest(),
        "cpu": document["cpu"]["type"],
        "nonces": [sha256(b"fastrack/gpu@1" + _parts(challenge, public, each)).hexdigest() for each in indices],
        "report_data": sha512(b"fastrack/offer@1" + _parts(challenge, public, gpus)).hexdigest(),
    }


def _parts(*parts):
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _check_cpu(cpu):
    if cpu["type"] == "snp":
        members(cpu, "type report leaf issuers crl")
        read_base64(cpu["report"], range(1, 16385))
        for name, limit in (("leaf", 65536), ("issuers", 65536), ("crl", MEBIBYTE)):
            require(cpu[name] is None or read_base64(cpu[name], range(1, limit + 1)), name)
        return
    require(cpu["type"] == "tdx", "a type of CPU")
    members(cpu, "type quote collateral" + " event_log" * ("event_log" in cpu))
    read_base64(cpu["quote"], range(1, 65537))
    if "event_log" in cpu:
        read_base64(cpu["event_log"], range(1, 4 * MEBIBYTE + 1))
    if cpu["collateral"] is not None:
        for part in members(cpu["collateral"], COLLATERAL).values():
            read_base64(part, range(1, MEBIBYTE + 1))


def _read_manifest(manifest):
    data = read_base64(members(manifest, "data ocsp")["data"], range(1, MEBIBYTE + 1))
    return _parts(data, _read_ocsp(manifest["ocsp"]))


def _read_ocsp(ocsp):
    if ocsp is None:
        return b""
    require(isinstance(ocsp, list) and len(ocsp) <= 16, "16 responses at most")
    return _parts(_parts(*(read_base64(each, range(1, 16385)) for each in ocsp)))


def _read_device(device, manifests):
    members(device, "report chain ocsp manifests")
    report = read_base64(device["report"], range(1, 16385))
    chain = read_base64(device["chain"], range(1, 65537))
    places = device["manifests"]
    require(isinstance(places, list) and all(is_number(place, 0, len(manifests)) for place in places), "places")
    require(len(set(places)) == len(places), "different places")
    own = _parts(*(manifests[place] for place in places))
    return _parts(report, chain, _read_ocsp(device["ocsp"]), own)


def read_answer(content, challenge, owners, secret_file, time):
    """Open the keys that answer an offer; `challenge` is the id of its challenge."""
    document = _open(content, "grants", "challenge grants", 4 * MEBIBYTE)
    require(is_hexadecimal(document["challenge"], 32), "an id")
    require(isinstance(document["grants"], list) and 1 <= len(document["grants"]) <= 1024, "1 to 1024 grants")
    files = [read_base64(each, range(1, 64 * KIBIBYTE + 1)) for each in document["grants"]]
    require(document["challenge"] == challenge, "the challenge", "attestation")
    return {"keys": [read_granted(each, owners, time, secret_file)["key"] for each in files]}
