"""Cases of `sealed`: the entry `fastrack.tensors`, messages of other files, and scales."""

from generator.parts.case import Cases, flip
from generator.parts.drafts import FILE, KEY, OTHER_FILE, OTHER_KEY, Draft, Stored, Tensor, draft, scaled, tensor
from generator.parts.messages import binding, message_size, seal
from generator.sealed_messages import KEYS, opened

RULES = {
    "entries": ("the-file", "`fastrack.tensors` is a JSON object, in any spelling that JSON has."),
    "entries.duplicate": ("what-a-reader-must-check", "No object in `fastrack.tensors` has a member twice."),
    "entries.names": ("context", "Names are Unicode text, without lone surrogates."),
    "entries.listed": ("what-a-reader-must-check", "Every listed tensor is there."),
    "entry.members": (
        "what-a-reader-must-check",
        "An entry has a dtype and a shape, perhaps the known others, and nothing else.",
    ),
    "entry.dtype": ("context", "The dtype is a name of the table, and the tensor has whole bytes."),
    "entry.shape": ("what-a-reader-must-check", "Extents are whole numbers, and not negative."),
    "entry.extents": ("context", "There are at most 64 extents, with a product, where 0 counts as 1, of at most 2⁵⁶."),
    "entry.stored": (
        "what-a-reader-must-check",
        "The stored vector is `U8`, and has exactly the size of a message of dtype and shape.",
    ),
    "binding": ("the-file", "A message of another file is bound to the file that holds it, by the owner's key."),
    "binding.form": (
        "the-file",
        "`file` is a file id, and `binding` 56 bytes in lower-case hexadecimal; there are both or none.",
    ),
    "scale": ("quantised-values", "Scales belong to values, and their entry is authenticated with the values."),
    "scale.members": ("what-a-reader-must-check", "A scale has its four members and no other."),
    "scale.dtypes": ("quantised-values", "Values are F8_E4M3, F8_E5M2 or I8, and scales F32 or BF16."),
    "scale.block": (
        "quantised-values",
        "A block has from 1 to all rows and columns, and gives as many scales as there are.",
    ),
    "scale.listed": (
        "what-a-reader-must-check",
        "The scales are a listed tensor of that name, dtype and shape, without a scale, of the same file id.",
    ),
}


def cases() -> Cases:
    """Return the cases of this module."""
    made = Cases("sealed", RULES)
    for add in (spellings, members, shapes, stored, bindings, binding_forms, scales, scale_forms):
        add(made)
    return made


def listing(text: str) -> bytes:
    """Return a file of one tensor, `a`, whose entry `fastrack.tensors` is this text."""
    one = draft(tensor("a"))
    one.listed = text
    return one.write()


GOOD = '{"dtype":"U8","shape":[20]}'


def spellings(made: Cases) -> None:
    """Add other spellings of the whole entry, and what is none."""
    one = draft(tensor("a"))
    for name, text in {
        "compact": '{"a":' + GOOD + "}",
        "spaced": ' {\n "a" : { "shape" :\t[ 20 ] , "dtype" : "U8" } }\r\n',
        "escaped": '{"\\u0061":{"\\u0064type":"U\\u0038","shape":[20]}}',
    }.items():
        opened(made, f"entries-{name}", "entries", one, listing(text))
    astral = draft(tensor("🚀/é"))
    astral.listed = '{"\\ud83d\\ude80\\/\\u00E9":' + GOOD + "}"
    opened(made, "entries-surrogates", "entries", astral, comment="a pair of surrogates, an escaped slash")
    for name, text in {
        "empty": "",
        "array": "[]",
        "null": "null",
        "truncated": '{"a":' + GOOD,
        "trailing": '{"a":' + GOOD + "}}",
        "trailing-comma": '{"a":' + GOOD + ",}",
        "quotes": "{'a':" + GOOD.replace('"', "'") + "}",
        "control": '{"a":' + GOOD + ',"\t":' + GOOD + "}",
        "comment": '{"a":' + GOOD + "/**/}",
        "infinity": '{"a":{"dtype":"U8","shape":[Infinity]}}',
        "leading-mark": '\ufeff{"a":' + GOOD + "}",
        "entry-null": '{"a":null}',
        "entry-array": '{"a":["U8",[20]]}',
    }.items():
        made.fails(f"entries-{name}", "entries", "format", listing(text), KEYS)
    deep = '{"a":{"dtype":"U8","shape":' + "[" * 3000 + "]" * 3000 + "}}"
    made.fails("entries-deep", "entries", "format", listing(deep), KEYS)
    for name, text in {
        "name": '{"a":{"dtype":"F32","shape":[5]},"a":' + GOOD + "}",
        "name-escaped": '{"a":{"dtype":"F32","shape":[5]},"\\u0061":' + GOOD + "}",
        "same": '{"a":' + GOOD + ',"a":' + GOOD + "}",
        "dtype": '{"a":{"dtype":"F32","dtype":"U8","shape":[20]}}',
        "shape": '{"a":{"dtype":"U8","shape":[1],"shape":[20]}}',
    }.items():
        made.fails(f"entries-duplicate-{name}", "entries.duplicate", "format", listing(text), KEYS)
    lone = '{"a":' + GOOD + ',"\\ud800":{"dtype":"U8","shape":[0]}}'
    made.fails("entries-lone-surrogate", "entries.names", "format", listing(lone), KEYS)
    made.fails("entries-not-there", "entries.listed", "format", listing('{"a":' + GOOD + ',"b":' + GOOD + "}"), KEYS)
    lower = draft(tensor("a"))
    lower.listed = '{"A":' + GOOD + "}"
    made.fails("entries-other-case", "entries.listed", "format", lower.write(), KEYS)


def members(made: Cases) -> None:
    """Add entries with other members."""
    for name, text in {
        "extra": '{"dtype":"U8","shape":[20],"more":1}',
        "null": '{"dtype":"U8","shape":[20],"scale":null}',
        "context-member": '{"dtype":"U8","name":"a","shape":[20]}',
        "no-dtype": '{"shape":[20]}',
        "no-shape": '{"dtype":"U8"}',
        "upper-case": '{"Dtype":"U8","shape":[20]}',
    }.items():
        made.fails(f"entry-{name}", "entry.members", "format", listing('{"a":' + text + "}"), KEYS)
    for name, dtype in {"unknown": "U9", "lower-case": "u8", "alias": "uint8", "empty": "", "space": "U8 "}.items():
        one = draft(tensor("a"))
        one.entries["a"]["dtype"] = dtype
        one.reseal("a")
        made.fails(f"entry-dtype-{name}", "entry.dtype", "format", one.write(), KEYS)
    text = '{"a":{"dtype":["U8"],"shape":[20]}}'
    made.fails("entry-dtype-array", "entry.dtype", "format", listing(text), KEYS)
    for dtype, extent in (("F4", 3), ("F6_E2M3", 2), ("F6_E3M2", 5)):
        one = draft(Tensor("a", dtype, [extent], b"abc"))
        label = dtype.lower().replace("_", "-")
        made.fails(f"entry-half-bytes-{label}", "entry.dtype", "format", one.write(), KEYS)


def shapes(made: Cases) -> None:
    """Add shapes that are none, sealed as they are written."""
    for name, text in {
        "fraction": "[20.0]",
        "exponent": "[2e1]",
        "negative": "[-20]",
        "two-negative": "[-4,-5]",
        "minus-zero": "[20,-0]",
        "true": "[20,true]",
        "text": '["20"]',
        "null": "[null]",
        "number": "20",
        "word": '"20"',
        "object": '{"0":20}',
        "nested": "[[20]]",
        "leading-zero": "[020]",
        "plus": "[+20]",
    }.items():
        one = draft(tensor("a", shape=[20] if name != "minus-zero" else [20, 0]))
        context = one.context("a").replace(b"[20]", text.encode()).replace(b"[20,0]", text.encode())
        message = seal(KEY, one.salt("a"), context, one.sealed[0].data)
        one.stored["a"] = Stored("U8", [len(message)], message)
        one.listed = '{"a":{"dtype":"U8","shape":' + text + "}}"
        made.fails(f"shape-{name}", "entry.shape", "format", one.write(), KEYS)
    for name, text in (("fraction", "[20.0]"), ("exponent", "[2e1]")):
        data = listing('{"a":{"dtype":"U8","shape":' + text + "}}")
        made.fails(f"shape-{name}-for-whole", "entry.shape", "format", data, KEYS, "sealed with the extent 20")
    for name, shape in {
        "extents-65": [1] * 65,
        "extents-product": [1 << 28, 1 << 28, 2, 0],
        "extents-zeros": [0, (1 << 56) + 1, 0],
        "extents-64-bits": [1 << 63, 2, 0],
        "extents-past-floats": [10**400, 0],
    }.items():
        data = b"" if 0 in shape else b"a"
        made.fails(name, "entry.extents", "format", draft(Tensor("a", "U8", shape, data)).write(), KEYS)
    opened(made, "extents-of-56-bits", "entry.extents", draft(Tensor("a", "U8", [1 << 28, 1 << 28, 0], b"")))


def stored(made: Cases) -> None:
    """Add messages that are stored as something else, or have another size."""
    size = message_size(20)
    for name, dtype, shape in (
        ("dtype", "I8", [size]),
        ("matrix", "U8", [size, 1]),
        ("row", "U8", [1, size]),
        ("words", "U16", [size // 2]),
    ):
        one = draft(tensor("a"))
        one.stored["a"].dtype, one.stored["a"].shape = dtype, shape
        made.fails(f"stored-{name}", "entry.stored", "format", one.write(), KEYS)
    for name, data in (("longer", bytes(21)), ("shorter", bytes(19)), ("another-chunk", bytes(16404))):
        one = draft(tensor("a"))
        one.reseal("a", data)
        made.fails(f"stored-{name}", "entry.stored", "format", one.write(), KEYS, "sealed so, in the right context")
    for name, cut in (("empty", 0), ("header-alone", 56), ("no-tag", 76)):
        one = draft(tensor("a"))
        one.stored["a"] = Stored("U8", [cut], one.stored["a"].data[:cut])
        made.fails(f"stored-{name}", "entry.stored", "format", one.write(), KEYS)
    whole = draft(tensor("a", shape=[16384]))
    whole.stored["a"] = Stored("U8", [56 + 16400], whole.stored["a"].data[:-16])
    made.fails("stored-without-last-chunk", "entry.stored", "format", whole.write(), KEYS, "cut at the end of a chunk")
    trailing = draft(tensor("a"))
    trailing.stored["a"] = Stored("U8", [size + 1], trailing.stored["a"].data + b"\0")
    made.fails("stored-trailing", "entry.stored", "format", trailing.write(), KEYS)
    claim = draft(tensor("a"))
    claim.listed = '{"a":{"dtype":"F64","shape":[1099511627776]}}'
    made.fails("stored-claim", "entry.stored", "format", claim.write(), KEYS, "8 TiB are claimed")


def moved(*names: str, **more: Tensor) -> Draft:
    """Return a file into which tensors were put that were sealed in another."""
    one = draft(*(tensor(name) for name in names), tensor("own"), **more)
    for name in names:
        one.move(name, OTHER_FILE)
    return one


def bindings(made: Cases) -> None:
    """Add messages of other files, bound to the file that holds them or not."""
    opened(made, "moved", "binding", moved("a"))
    opened(made, "moved-two", "binding", moved("a", "é"))
    several = moved("a")
    several.move("own", "f" * 32)
    opened(made, "moved-from-two-files", "binding", several)
    for name, index in (("salt", 0), ("commitment", 24), ("last-bit", 55)):
        one = moved("a")
        one.entries["a"]["binding"] = flip(bytes.fromhex(str(one.entries["a"]["binding"])), index).hex()
        made.fails(f"binding-{name}", "binding", "authentication", one.write(), KEYS)
    held = moved("a")
    bound = binding(KEY, bytes(24), OTHER_FILE, held.context("a"))
    held.entries["a"]["binding"] = bound.hex()
    made.fails("binding-to-another-file", "binding", "authentication", held.write(), KEYS)
    foreign = moved("a")
    foreign.entries["a"]["binding"] = binding(OTHER_KEY, bytes(24), FILE, foreign.context("a")).hex()
    made.fails(
        "binding-by-another-key", "binding", "authentication", foreign.write(), [*KEYS, ("key", OTHER_KEY.hex())]
    )
    two = moved("a", "b")
    two.entries["a"]["binding"], two.entries["b"]["binding"] = two.entries["b"]["binding"], two.entries["a"]["binding"]
    made.fails("bindings-exchanged", "binding", "authentication", two.write(), KEYS)
    origin = moved("a")
    origin.entries["a"]["file"] = FILE
    made.fails("binding-origin-altered", "binding", "authentication", origin.write(), KEYS)
    header = moved("a")
    header.entries["a"]["binding"] = header.stored["a"].data[:56].hex()
    made.fails("binding-is-the-header", "binding", "authentication", header.write(), KEYS)
    altered = moved("a")
    altered.alter("a", lambda data: flip(data, 24))
    made.fails("moved-commitment", "binding", "authentication", altered.write(), KEYS, "the binding holds")


def binding_forms(made: Cases) -> None:
    """Add bindings that are none."""
    alone = moved("a")
    del alone.entries["a"]["binding"]
    made.fails("binding-missing", "binding.form", "format", alone.write(), KEYS)
    nameless = moved("a")
    nameless.reseal("a", file=FILE)
    del nameless.entries["a"]["file"]
    made.fails("binding-without-file", "binding.form", "format", nameless.write(), KEYS)
    for name, edit in {
        "upper-case": str.upper,
        "short": lambda text: text[:-2],
        "long": lambda text: text + "00",
        "space": lambda text: " " + text,
    }.items():
        one = moved("a")
        one.entries["a"]["binding"] = edit(str(one.entries["a"]["binding"]))
        made.fails(f"binding-{name}", "binding.form", "format", one.write(), KEYS)
    for name, origin in (("upper-case", OTHER_FILE.upper()), ("short", OTHER_FILE[:-1]), ("empty", "")):
        one = draft(tensor("a"))
        one.move("a", origin)
        made.fails(f"origin-{name}", "binding.form", "format", one.write(), KEYS)
    number = moved("a")
    number.entries["a"]["binding"] = 1
    made.fails("binding-number", "binding.form", "format", number.write(), KEYS)


def quantised(
    dtype: str = "F8_E4M3", shape: tuple[int, ...] = (4, 6), scale: str = "F32", block: tuple[int, int] = (1, 6)
) -> Draft:
    """Return a file of values and their scales."""
    rows, columns = 1, shape[-1] if shape else 1
    for extent in shape[:-1]:
        rows *= extent
    scales = [-(-rows // block[0]), -(-columns // block[1])]
    one = draft(tensor("w", dtype, list(shape)), tensor("s", scale, scales))
    scaled(one, "w", "s", list(block))
    return one


def scales(made: Cases) -> None:
    """Add quantised values, opened as they are."""
    for dtype in ("F8_E4M3", "F8_E5M2", "I8"):
        for scale in ("F32", "BF16"):
            name = f"scale-{dtype.lower().replace('_', '-')}-{scale.lower()}"
            opened(made, name, "scale", quantised(dtype, scale=scale))
    opened(made, "scale-of-tensor", "scale", quantised(block=(4, 6)))
    opened(made, "scale-of-blocks", "scale", quantised(shape=(5, 7), block=(2, 3)))
    opened(made, "scale-of-three-dimensions", "scale", quantised(shape=(2, 3, 8), block=(4, 8)))
    opened(made, "scale-of-vector", "scale", quantised(shape=(10,), block=(1, 5)))
    both = quantised()
    for name in ("w", "s"):
        both.move(name, OTHER_FILE)
    opened(made, "scale-moved", "scale", both)
    altered = quantised(shape=(192, 2), block=(96, 2))
    altered.entries["w"]["scale"]["block"] = [128, 2]
    made.fails("scale-block-altered", "scale", "authentication", altered.write(), KEYS, "2 scales, of 128 rows for 96")
    taken = quantised()
    del taken.entries["w"]["scale"]
    made.fails("scale-removed", "scale", "authentication", taken.write(), KEYS)
    others = draft(tensor("w", "I8", [2, 4]), tensor("s", "F32", [2, 1]), tensor("t", "F32", [2, 1]))
    scaled(others, "w", "s", [1, 4])
    others.entries["w"]["scale"]["name"] = "t"
    made.fails("scale-of-another-name", "scale", "authentication", others.write(), KEYS)
    added = draft(tensor("w", "I8", [2, 4]), tensor("s", "F32", [2, 1]))
    scaled(added, "w", "s", [1, 4])
    plain = draft(tensor("w", "I8", [2, 4]), tensor("s", "F32", [2, 1]))
    added.stored = plain.stored
    made.fails("scale-added", "scale", "authentication", added.write(), KEYS)


def scale_forms(made: Cases) -> None:
    """Add scales that are none; the values are sealed with them as they are."""

    def failing(name: str, rule: str, one: Draft, /, **members: object) -> None:
        scale = {**one.entries["w"]["scale"], **members}
        one.entries["w"]["scale"] = {member: value for member, value in scale.items() if value is not None}
        one.reseal("w")
        made.fails(f"scale-{name}", f"scale.{rule}", "format", one.write(), KEYS)

    failing("extra-member", "members", quantised(), zero=0)
    for member in ("block", "dtype", "name", "shape"):
        failing(f"without-{member}", "members", quantised(), **{member: None})
    for dtype in ("U8", "F8_E8M0", "F8_E4M3FNUZ", "BF16"):
        failing(f"values-{dtype.lower().replace('_', '-')}", "dtypes", quantised(dtype))
    for dtype in ("F16", "F64", "F8_E8M0"):
        failing(f"scales-{dtype.lower().replace('_', '-')}", "dtypes", quantised(scale=dtype))
    for name, block in {
        "zero": [0, 6],
        "negative": [-1, 6],
        "too-many-rows": [5, 6],
        "too-many-columns": [1, 7],
        "one-number": [4],
        "three-numbers": [1, 6, 1],
        "fraction": [1.0, 6],
        "true": [True, 6],
        "text": ["1", 6],
        "other-count": [2, 6],
    }.items():
        one = quantised(block=(4, 6)) if name == "too-many-rows" else quantised()
        failing(f"block-{name}", "block", one, block=block)
    failing("of-no-rows", "block", quantised(shape=(0, 6)))
    failing("of-no-columns", "block", quantised(shape=(4, 0), block=(1, 1)))
    failing("not-listed", "listed", quantised(), name="x")
    failing("of-another-shape", "listed", quantised(), shape=[2, 2])
    failing("of-another-dtype", "listed", quantised(), dtype="BF16")
    failing("of-itself", "listed", quantised(), name="w")
    duplicate = quantised()
    duplicate.listed = duplicate.text().replace('"block":', '"block": [4, 6], "block":')
    made.fails("scale-duplicate-block", "entries.duplicate", "format", duplicate.write(), KEYS)
    chain = draft(tensor("w", "I8", [2, 4]), tensor("s", "I8", [2, 1]), tensor("t", "F32", [2, 1]))
    chain.entries["s"]["scale"] = {"block": [1, 1], "dtype": "F32", "name": "t", "shape": [2, 1]}
    chain.reseal("s")
    chain.entries["w"]["scale"] = {"block": [1, 4], "dtype": "I8", "name": "s", "shape": [2, 1]}
    failing("with-a-scale", "listed", chain)
    plain = quantised()
    del plain.entries["s"]
    failing("in-plain", "listed", plain)
    apart = quantised()
    apart.move("w", OTHER_FILE)
    made.fails("scale-of-another-file", "scale.listed", "format", apart.write(), KEYS, "only the values were moved")
