"""Judge documents of parties that have proved nothing by counts of their bytes, before any parser sees them.

A parser's memory and time follow the values of a document, not its bytes: eight MiB of empty lists are three million
objects. So each kind of document has the most of what it may hold, for those who write it and those who read it.
"""

from collections.abc import Mapping

from fastrack.errors import FormatError

_COUNTED: Mapping[str, tuple[bytes, ...]] = {
    "values": (b",", b":", b"[", b"{"),  # of JSON: one of these stands before each value and before each name
    "lists": (b"[", b"{"),
    "members": (b'":',),
    "lines": (b"\n", b"\r"),
    "certificates": (b"-----BEGIN",),
    "tags": (b"<",),
    "attributes": (b"=",),
    "namespaces": (b"xmlns",),
}

# Where the form of a kind gives no limit, genuine documents have a quarter of these at most. With them the peaks of all
# parsers stay below 16 times the document and 1 MiB (tests/attest/test_parsers.py).
LIMITS: Mapping[str, Mapping[str, int]] = {
    # Between an owner and a machine. An offer has up to 32 devices and 64 manifests with 16 OCSP responses each.
    "fastrack challenge": {"bytes": 1 << 10, "values": 16},
    "fastrack offer": {"bytes": 8 << 20, "values": 4400},
    "fastrack grants": {"bytes": 4 << 20, "values": 1040},
    "envelope": {"values": 256},
    "grant": {"bytes": 64 << 10},  # the envelope of one, in the document of grants
    # In an offer.
    "report": {"bytes": 16 << 10},
    "quote": {"bytes": 64 << 10},
    "certificates": {"bytes": 64 << 10, "certificates": 10},
    "OCSP response": {"bytes": 16 << 10},
    "collateral": {"bytes": 1 << 20},
    "RIM": {"bytes": 1 << 20, "tags": 1024, "attributes": 2560, "namespaces": 32},
    "event log": {"bytes": 4 << 20, "values": 16_384},
    # Of the vendors' services and their mirrors.
    "TCB info": {"bytes": 1 << 20, "values": 8192},
    "QE identity": {"bytes": 1 << 20, "values": 8192},
    "TDX collateral": {"bytes": 4 << 20, "values": 8192},
    "answer about a manifest": {"bytes": 2 << 20, "values": 64},
    # Of a program of this machine: 32 switches, each with a report and its certificates.
    "answer of nvattest": {"bytes": 2 << 20, "values": 1024},
    # Of any other holder of the key: 10,000 shards with 1,000 tensors; 5,000 tensors, 3,750 with brackets in names.
    "index of a dataset": {"bytes": 128 << 20, "lists": 15_010, "members": 15_010},
    # Between a visitor of a tour and its desks: a chain, a manifest, an offer and two documents, in base64.
    "chain of a tour": {"bytes": 64 << 20, "lines": 10_002},  # its plan, its visits and its completion
    "manifest of a tour": {"bytes": 32 << 20},
    "document of a tour": {"bytes": 1 << 20, "values": 20_000},  # a plan of 10,000 visits
    "fastrack visit": {"bytes": 64 << 10, "values": 64},
    "fastrack tour-grants": {"bytes": 32 << 20, "values": 1040},
    **{
        f"fastrack tour-{step}": {"bytes": 144 << 20, "values": 16}
        for step in ("begin", "delegated", "consented", "finish", "finished")
    },
}


def admit(document: bytes, kind: str, *, name: str = "") -> None:
    """Require that a document has no more of anything than its kind may have, else raise `FormatError`.

    No object is made of its content. `name` stands for it in errors, by default its kind.
    """
    for counted, most in LIMITS[kind].items():
        # One byte after the other, as `translate` would make a copy of what may be 144 MiB.
        count = len(document) if counted == "bytes" else sum(map(document.count, _COUNTED[counted]))
        if count > most:
            raise FormatError(
                f"reading the {(name or kind).removeprefix('the ')} failed: expected at most {most} {counted}, got "
                f"{count}. It is damaged, or of another kind; get it again from its origin."
            )


def most_bytes(kind: str) -> int:
    """Return the most bytes that a document of a kind may have."""
    return LIMITS[kind]["bytes"]
