"""Sets of files: manifests and their anchors, and sealed folders."""

import base64
import re
from hashlib import sha256

from helpers.by_hand import messages, sealed
from helpers.by_hand.documents import (
    canonical,
    is_hexadecimal,
    is_number,
    load,
    load_canonical,
    load_line,
    members,
    read_base64,
    read_time,
    require,
)
from helpers.by_hand.keys import SIGNING, read_public
from helpers.by_hand.signed import MEBIBYTE, open_envelope

TYPE = "application/vnd.fastrack.manifest.v1+json"
SEALED = "file key kind sealed origins plain metadata digests"
HISTORY = 1024


def read_manifest(files, anchor):
    """Verify a folder against its manifest; `anchor` is a line without its newline."""
    anchor = _read_anchor(anchor)
    manifest, digest = open_manifest(files["fastrack.manifest"], anchor["owner"])
    require(_is_accepted(manifest, digest, anchor), "a manifest that follows the anchor", "rollback")
    for name, entry in manifest["files"].items():
        require(name in files, f"the listed file {name}", "rollback")
        compare(entry, files[name])
    anchor |= {"lineage": manifest["lineage"], "version": manifest["version"], "digest": digest}
    return {
        "version": manifest["version"],
        "digest": digest,
        "files": len(manifest["files"]),
        "anchor": canonical(anchor).decode(),
        "log": f"fastrack/manifest@1\n{manifest['lineage']}\n{manifest['version']}\n{digest}\n",
    }


def open_manifest(content, owner):
    """Return the payload of a manifest and its digest, after its signature was verified."""
    payload = open_envelope(content, TYPE, owner, 64 * MEBIBYTE)
    return _read_payload(payload), sha256(payload).hexdigest()


def new_anchor(owner):
    return canonical({"anchor": 1, "owner": owner, "lineage": None, "version": 0, "digest": None}).decode()


def _read_anchor(line):
    anchor = members(load_line(line.encode() + b"\n", 1 << 20), "anchor owner lineage version digest")
    require(is_number(anchor["anchor"]) and anchor["anchor"] == 1 and is_number(anchor["version"]), "an anchor")
    require(read_public(anchor["owner"])[0] in SIGNING, "a key that signs")
    require(anchor["lineage"] is None or is_hexadecimal(anchor["lineage"], 32), "a lineage")
    require(anchor["digest"] is None or is_hexadecimal(anchor["digest"], 64), "a digest")
    has_both = anchor["lineage"] is not None and anchor["version"] > 0
    require(anchor["digest"] is None or has_both, "a lineage and a version beside a digest")
    return anchor


def _is_accepted(manifest, digest, anchor):
    if anchor["lineage"] not in (None, manifest["lineage"]) or manifest["version"] < anchor["version"]:
        return False
    if anchor["digest"] is None or (anchor["digest"], anchor["version"]) == (digest, manifest["version"]):
        return True
    place = manifest["version"] - anchor["version"] - 1
    return place >= 0 and manifest["history"][place : place + 1] == [anchor["digest"]]


def _read_payload(payload):
    manifest = members(load_canonical(payload), "format lineage version history issued files")
    require(is_number(manifest["format"]) and manifest["format"] == 1, "format 1")
    require(is_hexadecimal(manifest["lineage"], 32) and is_number(manifest["version"], 1), "a lineage and version")
    history = manifest["history"]
    require(isinstance(history, list) and all(is_hexadecimal(each, 64) for each in history), "digests")
    require(len(history) == min(manifest["version"] - 1, HISTORY), "all versions before, or the last 1024")
    read_time(manifest["issued"])
    _check_entries(manifest["files"])
    return manifest


def _check_entries(files):
    require(isinstance(files, dict), "an object of files")
    for name, entry in files.items():
        name.encode()
        parts = name.split("/")
        require(1 <= len(name) <= 1024 and not {"", ".", ".."} & set(parts), "a name")
        require(not re.search(r"[\0-\x1f\x7f-\x9f\\]", name), "a name without control characters")
        if "size" in entry:
            members(entry, "size sha256")
            require(is_number(entry["size"]) and is_hexadecimal(entry["sha256"], 64), "a size and a hash")
        else:
            _check_entry(members(entry, SEALED))


def _check_entry(entry):
    require(is_hexadecimal(entry["file"], 32) and is_hexadecimal(entry["key"], 32), "ids")
    require(entry["kind"] in sealed.KINDS, "a kind")
    require(isinstance(entry["sealed"], dict), "sealed tensors")
    for dtype, shape, header in entry["sealed"].values():
        _check_described(dtype, shape)
        read_base64(header, [messages.HEADER_SIZE])
    for dtype, shape, digest in entry["plain"].values():
        _check_described(dtype, shape)
        require(is_hexadecimal(digest, 64), "a hash")
    require(entry["origins"].keys() <= entry["sealed"].keys(), "origins of sealed tensors")
    require(all(is_hexadecimal(each, 32) and each != entry["file"] for each in entry["origins"].values()), "origins")
    require(is_hexadecimal(entry["metadata"], 64), "a hash")
    require(entry["digests"].keys() in (set(), entry["sealed"].keys()), "all digests or none")
    require(all(is_hexadecimal(each, 64) for each in entry["digests"].values()), "digests")


def _check_described(dtype, shape):
    require(dtype in sealed.BITS and isinstance(shape, list) and len(shape) <= 64, "a dtype and a shape")
    require(all(map(is_number, shape)), "extents")


def compare(entry, content):
    """Compare a file with its entry, and return it parsed if something is sealed in it."""
    if "size" in entry:
        found = {"size": len(content), "sha256": sha256(content).hexdigest()}
        require(entry == found, "the size and hash", "authentication")
        return None
    file = sealed.parse(content)
    found = {name: (claim["dtype"], claim["shape"]) for name, (claim, _) in file.sealed.items()}
    listed = {name: (dtype, shape) for name, (dtype, shape, _) in entry["sealed"].items()}
    require((file.id, file.key, file.kind) == tuple(entry[name] for name in ("file", "key", "kind")), "it", "rollback")
    require(found == listed, "the sealed tensors", "rollback")
    origins = {name: file.origin(name) for name in file.sealed if file.origin(name) != file.id}
    require(origins == entry["origins"], "the origins", "rollback")
    headers = {name: base64.b64encode(message[:56]).decode() for name, (_, message) in file.sealed.items()}
    require(headers == {name: header for name, (_, _, header) in entry["sealed"].items()}, "the headers", "rollback")
    plain = {name: list(sealed.describe(*stored).values()) for name, stored in file.plain.items()}
    kinds = [{name: described[:2] for name, described in each.items()} for each in (plain, entry["plain"])]
    require(kinds[0] == kinds[1], "the plain tensors", "rollback")
    require(plain == entry["plain"], "the content of plain tensors", "authentication")
    require(sha256(canonical(file.metadata)).hexdigest() == entry["metadata"], "the metadata", "authentication")
    digests = {name: sha256(file.sealed[name][1]).hexdigest() for name in entry["digests"]}
    require(digests == entry["digests"], "the digests of messages", "authentication")
    return file


def read_folder(files, key, cipher=messages):
    """Open a sealed folder: the hash of each file before it was sealed."""
    index = sealed.open_all(sealed.parse(files["fastrack.folder"]), [key], "folder", cipher)
    file = sealed.parse(files["fastrack.folder"])
    require(all((each["dtype"], len(each["shape"])) == ("U8", 1) for each, _ in file.sealed.values()), "bytes")
    listed = members(load_canonical(index["files"]), "format files")
    require(is_number(listed["format"]) and listed["format"] == 1, "format 1")
    _check_entries(listed["files"])
    headers = {f"header/{name}" for name, entry in listed["files"].items() if "sealed" in entry}
    require(index.keys() <= {"files", *headers} and not file.plain, "headers of sealed files, and nothing unencrypted")
    found = {}
    for name, entry in listed["files"].items():
        require(name in files, f"the listed file {name}", "rollback")
        require(not entry.get("plain"), "no plain tensors")
        file = compare(entry, files[name])
        content = files[name] if file is None else _restore(name, file, index.get(f"header/{name}"), key, cipher)
        found[name] = sha256(content).hexdigest()
    return {"files": found}


def _restore(path, file, header, key, cipher):
    """Return a file as it was before it was sealed; `header` is what it begins with, if it was of tensors."""
    opened = sealed.open_all(file, [key], "tensor", cipher)
    if header is None:
        require(file.sealed.keys() == {path.split("/")[-1]}, "one tensor of the last part of the name")
        ((claim, _),) = file.sealed.values()
        require(claim["dtype"] == "U8" and len(claim["shape"]) == 1, "one vector of bytes")
        return b"".join(opened.values())
    require(int.from_bytes(header[:8], "little") == len(header) - 8 and header[8:9] == b"{", "a whole header")
    entries = load(header[8:])
    marks = entries.pop("__metadata__", None) or {}
    require(all(isinstance(value, str) for value in marks.values()), "metadata of texts")
    sealed.drop_guard_of(entries)
    scales = {claim["scale"]["name"] for claim, _ in file.sealed.values() if "scale" in claim}
    require(file.sealed.keys() - scales <= entries.keys(), "all tensors of the file")
    body = b""
    for name, entry in sorted(entries.items(), key=lambda each: each[1]["data_offsets"]):
        claim, _ = file.sealed[name]
        is_widened = "scale" in claim and claim["scale"]["name"] not in entries
        content = sealed.widen(file, opened, name) if is_widened else opened[name]
        described = {"dtype": "BF16" if is_widened else claim["dtype"], "shape": claim["shape"]}
        described["data_offsets"] = [len(body), len(body) + len(content)]
        require(canonical(entry) == canonical(described), "an entry of the tensor")
        body += content
    return header + body
