"""Make event logs: CCEL, and dstack's JSON."""

import json
import struct
from hashlib import sha384

SEPARATOR, IPL, APPLICATION, BOOT_VARIABLE, NO_ACTION = 0x4, 0xD, 0x80000003, 0x80000002, 0x3
SHA256, SHA384 = 0xB, 0xC


def digest(data):
    return sha384(data).digest()


def header(algorithms=((SHA256, 32), (SHA384, 48)), register=0, kind=NO_ACTION):
    spec = b"Spec ID Event03\0" + bytes(8) + struct.pack("<I", len(algorithms))
    spec += b"".join(struct.pack("<HH", *pair) for pair in algorithms) + b"\0"
    return struct.pack("<II20xI", register, kind, len(spec)) + spec


def event(register, kind, data, *, value=None, algorithms=(SHA256, SHA384)):
    value = digest(data) if value is None else value
    values = {SHA256: bytes(32), SHA384: value}
    digests = b"".join(struct.pack("<H", one) + values[one] for one in algorithms)
    return struct.pack("<III", register, kind, len(algorithms)) + digests + struct.pack("<I", len(data)) + data


def variable(value):
    name = "BootOrder"
    return bytes(16) + struct.pack("<QQ", len(name), len(value)) + name.encode("utf-16-le") + value


EVENTS = [
    event(1, BOOT_VARIABLE, variable(b"\1\0"), value=digest(b"\1\0")),
    event(1, SEPARATOR, bytes(4)),
    event(2, APPLICATION, b"path of a kernel", value=digest(b"the kernel itself")),
    event(3, IPL, b"kernel_cmdline: quiet root=/dev/vda\0", value=digest(b"quiet root=/dev/vda")),
    event(1, NO_ACTION, b"nothing"),
    event(4, 0x12345, b"by the workload"),
]


def ccel(events=EVENTS, end=b"\xff" * 64):
    return header() + b"".join(events) + end


def dstack(version=None, **changes):
    members = {"imr": 3, "event_type": 0x08000001, "event": "app-id", "event_payload": "c0ffee"}
    members["digest"] = digest(struct.pack("<I", 0x08000001) + b":app-id:\xc0\xff\xee").hex()
    if version:
        text = '{"name":"app-id","payload":"c0ffee","type":134217729}'
        members |= {"version": version, "digest": digest(text.encode()).hex()}
    boot = {"imr": 0, "event_type": 1, "event": "", "event_payload": "00", "digest": "ab" * 48}
    found = {name: value for name, value in (members | changes).items() if value is not None}
    return json.dumps([boot, found]).encode()
