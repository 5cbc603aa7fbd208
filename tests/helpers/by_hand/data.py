"""Datasets: shards of columns."""

import json
from base64 import b64decode
from hashlib import sha256
from itertools import pairwise

import numpy as np

from helpers.by_hand import messages, sealed
from helpers.by_hand.documents import is_number, load, members, parse, require

MEMBERS = "version data_set shard previous before first samples run complete left_out types files"
NULL = b"\xff" * 8


def read_data_set(files, key, cipher=messages):
    """Read all shards of a dataset in order: the digest of each column, and whether the last run came to its end."""
    names = [f"shard-{number:06d}.safetensors" for number in range(len(files))]
    require(files and files.keys() == set(names), "shards without a gap")
    shards = [_read_shard(files[name], key, cipher) for name in names]
    _check_order(shards)
    hashes = {name: sha256() for name in shards[0][1]}
    for _, columns, samples in shards:
        require(_kinds(columns) == _kinds(shards[0][1]), "the columns of the others")
        for name, (_, rows) in columns.items():
            require(len(rows) == samples, "columns of as many samples")
            for row in rows:
                hashes[name].update(NULL if row is None else len(row).to_bytes(8, "big") + row)
    about = shards[-1][0]
    return {
        "samples": sum(samples for *_, samples in shards),
        "columns": {name: each.hexdigest() for name, each in hashes.items()},
        "complete": about is not None and about["complete"],
    }


def _read_shard(content, key, cipher):
    """Return what a shard says of itself or None, its columns, and the number of its samples."""
    file = sealed.parse(content)
    opened = sealed.open_all(file, [key], "tensor", cipher)
    claims = {name: claim for name, (claim, _) in file.sealed.items()}
    about = None
    if "fastrack.about" in claims:
        claim = claims.pop("fastrack.about")
        require(claim["dtype"] == "U8" and len(claim["shape"]) == 1, "a vector of bytes")
        about = _read_about(opened.pop("fastrack.about"))
    names = _names_of_columns(claims)
    columns = {name: _column(name, claims, opened) for name in names if not _is_validity(name, names)}
    require(columns, "a column")
    samples = len(next(iter(columns.values()))[1])
    if about is not None:
        require(about["types"].keys() == names, "the columns of the types")
        require(about["samples"] == samples, "as many samples as it says")
    return about, columns, samples


def _read_about(content):
    load(content.decode(errors="replace"))  # which refuses lone surrogates
    about = members(parse(content.decode(errors="surrogateescape")), MEMBERS)  # as names of files need not be UTF-8
    load(json.dumps(about | {"files": []}))
    require(is_number(about["version"]) and about["version"] == 1, "version 1")
    require(all(isinstance(about[name], str) for name in ("data_set", "shard", "previous")), "ids")
    require(about["data_set"] and about["shard"], "ids")
    require(all(is_number(about[name]) for name in ("before", "first", "samples", "run")), "numbers")
    require(all(type(about[name]) is bool for name in ("complete", "left_out")), "true or false")
    for text in about["types"].values():
        require(text in ("", "text", "json") or text.startswith("arrow:"), "a type")
        b64decode(text.removeprefix("arrow:") if text.startswith("arrow:") else "", validate=True)
    require(isinstance(about["files"], list), "a list of files")
    require(all(isinstance(name, str) and is_number(count) for name, count in about["files"]), "files")
    counted = sum(count for _, count in about["files"])
    require(not about["files"] or counted == about["samples"], "files of all samples")
    return about


def _names_of_columns(claims):
    records = {name.removesuffix(".records") for name in claims if name.endswith(".records")}
    records = {name for name in records if f"{name}.offsets" in claims}
    parts = {f"{name}.{part}" for name in records for part in ("records", "offsets")}
    return (claims.keys() - parts) | records


def _is_validity(name, names):
    return name.endswith(".valid") and name.removesuffix(".valid") in names


def _column(name, claims, opened):
    """Return what a column is made of and the bytes of each sample, None for a null."""
    if name in claims:
        made_of = claims[name]["dtype"], claims[name]["shape"][1:]
        require(claims[name]["shape"], "a dimension of samples")
        rows = _split(opened[name], claims[name]["shape"][0])
    else:
        made_of = (claims[f"{name}.records"]["dtype"],)
        rows = _records(name, claims, opened)
    if f"{name}.valid" in claims:
        made_of += ("nulls",)
        claim = claims[f"{name}.valid"]
        require((claim["dtype"], claim["shape"]) == ("BOOL", [len(rows)]), "a bool for each sample")
        rows = [row if is_valid else None for row, is_valid in zip(rows, opened[f"{name}.valid"], strict=True)]
    return made_of, rows


def _split(content, count):
    require(not count or len(content) % count == 0, "samples of whole bytes")
    size = len(content) // count if count else 0
    return [content[at * size : (at + 1) * size] for at in range(count)]


def _records(name, claims, opened):
    claim, ends = claims[f"{name}.records"], claims[f"{name}.offsets"]
    require(len(claim["shape"]) == 1 and ends["dtype"] == "I64" and len(ends["shape"]) == 1, "records and offsets")
    offsets = np.frombuffer(opened[f"{name}.offsets"], "<i8").tolist()
    require(offsets and offsets[0] == 0 and offsets == sorted(offsets), "offsets in order")
    require(offsets[-1] == claim["shape"][0], "offsets of all records")
    bits, content = sealed.BITS[claim["dtype"]], opened[f"{name}.records"]
    require(all(end * bits % 8 == 0 for end in offsets), "records of whole bytes")
    return [content[a * bits // 8 : b * bits // 8] for a, b in pairwise(offsets)]


def _kinds(columns):
    return {name: made_of for name, (made_of, _) in columns.items()}


def _check_order(shards):
    """Require that each shard is at its place, behind the shard of its `previous`."""
    abouts = [about for about, *_ in shards if about is not None]
    unsaid = sum(samples for about, _, samples in shards if about is None)
    require(all(about["before"] == unsaid for about in abouts), "all samples that no shard tells of")
    last, first = None, 0
    for about, _, samples in shards:
        if about is not None:
            require(about["data_set"] == abouts[0]["data_set"], "the dataset of the others")
            require(about["first"] == first, "the place in the dataset")
            require(about["previous"] == ("" if last is None else last["shard"]), "the shard before")
            require(about["run"] in (first, 0 if last is None else last["run"]), "a run that begins here or goes on")
        last, first = about, first + samples
