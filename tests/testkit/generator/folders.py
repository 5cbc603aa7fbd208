"""Cases of sealed folders."""

import json
from collections.abc import Callable

from generator.manifests import other_entry, sealed_entry
from generator.parts.case import Cases, canonical, draw, flip, joined, sha256
from generator.parts.drafts import KEY, KEY128, OTHER_KEY, Draft, Stored, Tensor, assemble, draft, scaled, tensor
from generator.parts.messages import seal
from generator.parts.values import bf16_values, quantised_tensors

RULES = {
    "index": ("folders", "The index is a sealed file of the kind `folder`, under the key of the others."),
    "index.authentic": ("folders", "The index is authentic before anything of the folder is used."),
    "index.form": (
        "folders",
        "`files` is canonical JSON with its members, and entries as in a manifest, without plain tensors.",
    ),
    "index.names": ("manifests", "Names are relative, with no part empty, `.` or `..`."),
    "header": (
        "folders",
        "`header/NAME` is the beginning of the file before it was sealed, with the tensors of its entry.",
    ),
    "file.missing": ("folders", "Each file of the index is there."),
    "file.bytes": ("folders", "A file that was copied has the hash of its entry."),
    "file.expected": ("folders", "A sealed file has the id, key, kind, tensors and headers of its entry."),
    "file.metadata": ("folders", "The metadata of a sealed file has the hash of its entry."),
    "file.whole": ("folders", "A file that was sealed whole has one vector of `U8`, with the last part of its name."),
    "file.authentic": ("folders", "Each message of a sealed file is authentic."),
    "quantised": (
        "quantised-values",
        "Values whose scales the header does not list were BF16 before they were sealed.",
    ),
}

INDEX = "fastrack.folder"
CONFIG = b'{"layers": 2}\n'
VOCABULARY = draw("vocabulary", 100)

Payload = dict[str, object]
Folder = dict[str, bytes]


def source(tensors: list[Tensor], owner: dict[str, str]) -> bytes:
    """Return a safetensors file as it was before it was sealed: another order than that of the sealed file."""
    header: Payload = {"__metadata__": owner} if owner else {}
    at = 0
    for one in reversed(tensors):
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [at, at + len(one.data)]}
        at += len(one.data)
    return assemble(json.dumps(header).encode(), b"".join(one.data for one in reversed(tensors)))


class Model:
    """A folder with a model, a vocabulary that is sealed whole, and a configuration that is copied."""

    def __init__(self, key: bytes = KEY, owner: dict[str, str] | None = None) -> None:
        """Seal it."""
        self.key = key
        owner = {"format": "pt"} if owner is None else owner
        tensors = [tensor("a", "F32", [5]), tensor("b", "BF16", [3, 3]), tensor("c", shape=[0])]
        self.model = draft(*tensors, key=key, file="1" * 32, owner=owner)
        self.vocabulary = draft(Tensor("vocabulary.bin", "U8", [100], VOCABULARY), key=key, file="2" * 32)
        self.source = source(tensors, owner)
        self.files: dict[str, bytes | Draft] = {
            "config.json": CONFIG,
            "model.safetensors": self.model,
            "vocabulary.bin": self.vocabulary,
        }
        self.headers = {"model.safetensors": self.source[: -sum(len(one.data) for one in tensors)]}
        self.hashes = {
            "config.json": sha256(CONFIG),
            "model.safetensors": sha256(self.source),
            "vocabulary.bin": sha256(VOCABULARY),
        }

    def listing(self) -> Payload:
        """Return what the tensor `files` has."""
        entries = {
            name: sealed_entry(one, digests=False) if isinstance(one, Draft) else other_entry(one)
            for name, one in self.files.items()
        }
        return {"files": entries, "format": 1}

    def index(self, listing: bytes | None = None) -> Draft:
        """Return the index."""
        data = canonical(self.listing()) if listing is None else listing
        headers = [Tensor(f"header/{name}", "U8", [len(one)], one) for name, one in self.headers.items()]
        return draft(Tensor("files", "U8", [len(data)], data), *headers, key=self.key, file="3" * 32, kind="folder")

    def folder(self, listing: bytes | None = None) -> Folder:
        """Return all files."""
        made = {INDEX: self.index(listing).write()}
        return made | {name: one.write() if isinstance(one, Draft) else one for name, one in self.files.items()}


def opens(made: Cases, name: str, rule: str, files: Folder, hashes: dict[str, str], key: bytes = KEY) -> None:
    """Add a folder that opens."""
    lines, data = joined(files)
    made.opens(name, rule, data, {"files": hashes}, [("key", key.hex()), *lines])


def fails(made: Cases, name: str, rule: str, expect: str, files: Folder, key: bytes = KEY) -> None:
    """Add a folder that is refused."""
    lines, data = joined(files)
    made.fails(name, rule, expect, data, [("key", key.hex()), *lines])


def cases() -> Cases:
    """Return the cases of folders."""
    made = Cases("folder", RULES)
    for add in (successes, quantised, indexes, listings, headers, files, exchanged):
        add(made)
    return made


def successes(made: Cases) -> None:
    """Add folders that open."""
    one = Model()
    opens(made, "model", "index", one.folder(), one.hashes)
    opens(made, "more-files", "file.missing", one.folder() | {"notes.txt": b"not listed"}, one.hashes)
    small = Model(KEY128)
    opens(made, "128-bits", "index", small.folder(), small.hashes, KEY128)
    plain = Model(owner={})
    opens(made, "no-metadata", "header", plain.folder(), plain.hashes)
    deep = Model()
    deep.files = {f"sub/{name}": file for name, file in deep.files.items()}
    deep.headers = {f"sub/{name}": header for name, header in deep.headers.items()}
    deep.hashes = {f"sub/{name}": text for name, text in deep.hashes.items()}
    opens(made, "folders-in-it", "index", deep.folder(), deep.hashes)
    below = draft(Tensor("vocabulary.bin", "U8", [100], VOCABULARY), file="2" * 32)
    named = Model()
    named.files, named.headers = {"sub/a/vocabulary.bin": below}, {}
    opens(
        made, "whole-file-in-a-folder", "file.authentic", named.folder(), {"sub/a/vocabulary.bin": sha256(VOCABULARY)}
    )
    only = Model()
    only.files, only.headers = {"config.json": CONFIG}, {}
    opens(made, "nothing-sealed", "index", only.folder(), {"config.json": sha256(CONFIG)})
    none = Model()
    none.files, none.headers = {}, {}
    opens(made, "empty", "index", none.folder(), {})


def quantised(made: Cases) -> None:
    """Add a folder whose values are widened, and one whose values stay."""
    values, scales = quantised_tensors()
    other = tensor("norm", "BF16", [4])
    wide = Tensor(values.name, "BF16", values.shape, bf16_values(values, scales, [1, values.shape[-1]]))
    for name, before in (("widened", [wide, other]), ("not-widened", [values, scales, other])):
        one = Model(owner={})
        sealed = draft(values, scales, other, file="1" * 32)
        scaled(sealed, values.name, scales.name, [1, values.shape[-1]])
        was = source(before, {})
        one.files = {"model.safetensors": sealed}
        one.headers = {"model.safetensors": was[: -sum(len(each.data) for each in before)]}
        opens(made, f"quantised-{name}", "quantised", one.folder(), {"model.safetensors": sha256(was)})


def indexes(made: Cases) -> None:
    """Add indexes that are none, or were altered."""
    good = Model()
    folder = good.folder()
    fails(made, "key-unknown", "index", "unknown-key", folder, OTHER_KEY)
    for name, tensor_name, index in (("files", "files", -1), ("header", "header/model.safetensors", 60)):
        one = good.index()
        one.alter(tensor_name, lambda data, index=index: flip(data, index))
        fails(made, f"index-{name}-altered", "index.authentic", "authentication", folder | {INDEX: one.write()})
    commitment = good.index()
    commitment.alter("files", lambda data: flip(data, 24))
    fails(made, "index-commitment", "index.authentic", "authentication", folder | {INDEX: commitment.write()})
    plain = good.index()
    listing = canonical(good.listing())
    del plain.entries["files"]
    plain.stored["files"] = Stored("U8", [len(listing)], listing)
    fails(made, "index-files-in-plain", "index", "format", folder | {INDEX: plain.write()})
    beside = good.index()
    beside.stored["p"] = Stored("U8", [1], b"p")
    fails(made, "index-with-a-plain-tensor", "index.form", "format", folder | {INDEX: beside.write()})
    spare = Model()
    spare.headers["config.json"] = spare.headers["model.safetensors"]
    fails(made, "index-header-of-a-copied-file", "header", "format", spare.folder())
    spare.headers = Model().headers | {"vocabulary.bin": Model().headers["model.safetensors"]}
    fails(made, "index-header-of-a-file-sealed-whole", "header", "format", spare.folder())
    retyped = good.index()
    retyped.entries["files"]["dtype"] = "I8"
    retyped.reseal("files")
    fails(made, "index-files-as-i8", "index.form", "format", folder | {INDEX: retyped.write()})
    more = good.index()
    more.sealed.append(tensor("more"))
    more.entries["more"] = {"dtype": "U8", "shape": [20]}
    more.reseal("more")
    fails(made, "index-with-another-tensor", "index.form", "format", folder | {INDEX: more.write()})
    kindless = good.index()
    kindless.kind = None
    for each in kindless.sealed:
        kindless.reseal(each.name)
    del kindless.metadata["fastrack.kind"]
    fails(made, "index-of-tensors", "index", "format", folder | {INDEX: kindless.write()})
    foreign = good.index()
    foreign.kind = "index"
    for each in foreign.sealed:
        foreign.reseal(each.name)
    foreign.metadata["fastrack.kind"] = "index"
    fails(made, "index-of-a-data-set", "index", "format", folder | {INDEX: foreign.write()})
    claimed = good.index()
    claimed.stored["files"].data = seal(
        KEY, draw("salt", 24), claimed.context("files").replace(b"folder@1", b"tensor@1"), listing
    )
    fails(made, "index-sealed-as-tensor", "index.authentic", "authentication", folder | {INDEX: claimed.write()})


def listings(made: Cases) -> None:
    """Add indexes whose `files` are wrong."""
    one = Model()
    good = one.listing()
    text = canonical(good)
    entries = dict(good["files"])
    model, config = dict(entries["model.safetensors"]), dict(entries["config.json"])
    for name, data in {
        "spaces": json.dumps(good, sort_keys=True).encode(),
        "turned": json.dumps({"format": 1, "files": good["files"]}, separators=(",", ":")).encode(),
        "newline": text + b"\n",
        "format-2": canonical(good | {"format": 2}),
        "format-fraction": text.replace(b'"format":1', b'"format":1.0'),
        "format-true": canonical(good | {"format": True}),
        "without-format": canonical({"files": good["files"]}),
        "extra-member": canonical(good | {"more": 1}),
        "file-twice": text.replace(b'"config.json":', b'"config.json":{},"config.json":'),
        "files-array": canonical(good | {"files": []}),
        "entry-extra-member": canonical(good | {"files": entries | {"config.json": config | {"more": 1}}}),
        "entry-plain": canonical(
            good | {"files": entries | {"model.safetensors": model | {"plain": {"p": ["U8", [1], sha256(b"p")]}}}}
        ),
        "entry-without-metadata": canonical(
            good | {"files": entries | {"model.safetensors": {k: v for k, v in model.items() if k != "metadata"}}}
        ),
    }.items():
        fails(made, f"files-{name}", "index.form", "format", one.folder(data))
    for name, path in {
        "parent": "../config.json",
        "absolute": "/config.json",
        "dot": "./config.json",
        "backslash": "a\\b",
        "control": "a\x1fb",
        "c1": "a\x9bb",
    }.items():
        data = canonical(good | {"files": entries | {path: config}})
        fails(made, f"name-{name}", "index.names", "format", one.folder(data))


def headers(made: Cases) -> None:
    """Add indexes whose headers are not those of their files."""

    def failing(name: str, edit: Callable[[Model], object]) -> None:
        one = Model()
        edit(one)
        fails(made, f"header-{name}", "header", "format", one.folder())

    def tensors(*changed: Tensor) -> dict[str, bytes]:
        data = source(list(changed), {"format": "pt"})
        return {"model.safetensors": data[: len(data) - sum(len(each.data) for each in changed)]}

    a, b, c = tensor("a", "F32", [5]), tensor("b", "BF16", [3, 3]), tensor("c", shape=[0])
    failing("missing", lambda one: one.headers.clear())
    failing("of-one-tensor-less", lambda one: one.headers.update(tensors(a, b)))
    failing("of-one-tensor-more", lambda one: one.headers.update(tensors(a, b, c, tensor("d"))))
    failing("of-another-dtype", lambda one: one.headers.update(tensors(tensor("a", "I32", [5]), b, c)))
    failing("of-another-shape", lambda one: one.headers.update(tensors(tensor("a", "F32", [5, 1]), b, c)))
    failing("of-another-name", lambda one: one.headers.update(tensors(tensor("x", "F32", [5]), b, c)))
    failing("truncated", lambda one: one.headers.update({"model.safetensors": one.headers["model.safetensors"][:-1]}))
    failing("trailing", lambda one: one.headers.update({"model.safetensors": one.headers["model.safetensors"] + b"\0"}))

    def respelled(name: str, old: bytes, new: bytes) -> None:
        header = Model().headers["model.safetensors"]
        text = header[8:].replace(old, new, 1)
        made_of = {"model.safetensors": len(text).to_bytes(8, "little") + text}
        failing(name, lambda one: one.headers.update(made_of))

    respelled("of-a-fraction", b'"data_offsets": [0,', b'"data_offsets": [0.0,')
    respelled("of-false", b'"data_offsets": [0,', b'"data_offsets": [false,')
    respelled("space-in-front", b"{", b" {")
    respelled("metadata-number", b'"pt"', b"1")
    respelled("member-twice", b'"dtype"', b'"dtype": "F32", "dtype"')
    failing("no-header", lambda one: one.headers.update({"model.safetensors": b"[]"}))


def files(made: Cases) -> None:
    """Add folders whose files were altered."""
    good = Model().folder()
    for name in Model().files:
        label = name.split(".")[0]
        fails(made, f"missing-{label}", "file.missing", "rollback", {k: v for k, v in good.items() if k != name})
    for label, data in {"altered": flip(CONFIG, 0), "longer": CONFIG + b" ", "empty": b""}.items():
        fails(made, f"config-{label}", "file.bytes", "authentication", good | {"config.json": data})

    def edited(name: str, rule: str, expect: str, edit: Callable[[Draft], object]) -> None:
        one = Model().model
        edit(one)
        fails(made, name, f"file.{rule}", expect, good | {"model.safetensors": one.write()})

    edited("tag", "authentic", "authentication", lambda one: one.alter("a", lambda data: flip(data, -1)))
    edited("tag-of-nothing", "authentic", "authentication", lambda one: one.alter("c", lambda data: flip(data, -1)))
    edited("ciphertext", "authentic", "authentication", lambda one: one.alter("b", lambda data: flip(data, 57)))
    edited("metadata", "metadata", "authentication", lambda one: one.owner.update(format="np"))
    edited("metadata-added", "metadata", "authentication", lambda one: one.owner.update(note=""))
    edited("plain-added", "expected", "rollback", lambda one: one.stored.update(p=Stored("U8", [1], b"p")))
    edited("file-id", "expected", "rollback", lambda one: one.metadata.update({"fastrack.file": "f" * 32}))
    edited("message-older", "expected", "rollback", _older)
    edited("tensor-added", "expected", "rollback", _added)
    edited("tensor-removed", "expected", "rollback", _removed)
    edited("tensor-in-plain", "expected", "rollback", _in_plain)


def _older(one: Draft) -> None:
    message = seal(KEY, draw("an older salt", 24), one.context("a"), bytes(20))
    one.stored["a"] = Stored("U8", [len(message)], message)


def _added(one: Draft) -> None:
    one.sealed.append(tensor("d"))
    one.entries["d"] = {"dtype": "U8", "shape": [20]}
    one.reseal("d")


def _removed(one: Draft) -> None:
    del one.stored["c"], one.entries["c"]


def _in_plain(one: Draft) -> None:
    del one.entries["a"]
    one.stored["a"] = Stored("F32", [5], one.sealed[0].data)


def exchanged(made: Cases) -> None:
    """Add folders some of whose files are of others, all of them under the same key."""
    one = Model()
    twin = draft(*one.model.sealed, file="4" * 32, owner=one.model.owner)
    fails(
        made, "file-of-another-folder", "file.expected", "rollback", one.folder() | {"model.safetensors": twin.write()}
    )
    two = Model()
    two.files = {"1.bin": draft(Tensor("1.bin", "U8", [20], bytes(20)), file="1" * 32)}
    two.files["2.bin"] = draft(Tensor("2.bin", "U8", [20], bytes(20)), file="2" * 32)
    two.headers = {}
    opens(made, "two-alike", "file.expected", two.folder(), dict.fromkeys(two.files, sha256(bytes(20))))
    turned = two.folder()
    turned["1.bin"], turned["2.bin"] = turned["2.bin"], turned["1.bin"]
    fails(made, "files-exchanged", "file.expected", "rollback", turned)
    other_key = draft(*one.model.sealed, key=OTHER_KEY, file="1" * 32, owner=one.model.owner)
    fails(
        made,
        "file-under-another-key",
        "file.expected",
        "rollback",
        one.folder() | {"model.safetensors": other_key.write()},
    )
    pair = Model()
    whole = Tensor("vocabulary.bin", "U8", [100], VOCABULARY)
    pair.files["vocabulary.bin"] = draft(whole, tensor("more"), file="2" * 32)
    fails(made, "whole-file-of-two-tensors", "file.whole", "format", pair.folder())
    pair.files["vocabulary.bin"] = draft(Tensor("vocabulary.bin", "I8", [100], VOCABULARY), file="2" * 32)
    fails(made, "whole-file-of-i8", "file.whole", "format", pair.folder())
    pair.files["vocabulary.bin"] = draft(Tensor("words.bin", "U8", [100], VOCABULARY), file="2" * 32)
    fails(made, "whole-file-of-another-name", "file.whole", "format", pair.folder())
    pair.files["vocabulary.bin"] = draft(whole, file="2" * 32, kind="checkpoint")
    fails(made, "whole-file-of-a-checkpoint", "file.whole", "format", pair.folder())
    plain = one.folder() | {"vocabulary.bin": VOCABULARY}
    fails(made, "file-in-plain", "file.expected", "format", plain)
