"""Replay the event log of a TD: the digests that firmware, boot loader and kernel added to its RTMRs.

The log itself is unsigned. Its digests are proved by a quote, since each register is the hash of all digests that were
added to it; the data beside a digest is proved only where the digest can be computed from it.

Sources: UEFI 2.11, section 38 (registers and their order); TCG PC Client Platform Firmware Profile 1.06, sections 9 and
10 (form and types of events); ACPI 6.5, section 5.2.34 (the table CCEL).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha384

from fastrack._documents.exchange import Reader
from fastrack._documents.fields import INTEGER, TEXT, hexadecimal
from fastrack._util.gate import most_bytes
from fastrack._util.public import public
from fastrack.attest._errors import malformed, refused
from fastrack.attest._formats.binary import Cursor

REGISTERS = 4
EVENT_LOG_LIMIT = most_bytes("event log")  # those of firmware have 64 to 256 KiB
_EVENTS_LIMIT = 1 << 16
_EVIDENCE = "event log"
_SHOWN = 200  # characters of an event that a draft repeats
_NO_ACTION, _IPL, _RUNTIME = 0x3, 0xD, 0x0800_0001
_VARIABLE_BOOTS = {0x8000_0002, 0x8000_000C}
_SHA384 = 0xC
_PAYLOAD, _DIGEST = hexadecimal(None), hexadecimal(48)
_SIZES = {0x4: 20, 0xB: 32, _SHA384: 48, 0xD: 64, 0x12: 32}  # of digests, by the algorithm's number
_NAMES = {
    0x1: "POST_CODE",
    0x4: "SEPARATOR",
    0x5: "ACTION",
    0x6: "EVENT_TAG",
    0x7: "S_CRTM_CONTENTS",
    0x8: "S_CRTM_VERSION",
    0x9: "CPU_MICROCODE",
    0xA: "PLATFORM_CONFIG_FLAGS",
    0xB: "TABLE_OF_DEVICES",
    0xC: "COMPACT_HASH",
    _IPL: "IPL",
    0xE: "IPL_PARTITION_DATA",
    0xF: "NONHOST_CODE",
    0x10: "NONHOST_CONFIG",
    0x11: "NONHOST_INFO",
    0x12: "OMIT_BOOT_DEVICE_EVENTS",
    _RUNTIME: "RUNTIME",
    0x8000_0001: "EFI_VARIABLE_DRIVER_CONFIG",
    0x8000_0002: "EFI_VARIABLE_BOOT",
    0x8000_0003: "EFI_BOOT_SERVICES_APPLICATION",
    0x8000_0004: "EFI_BOOT_SERVICES_DRIVER",
    0x8000_0005: "EFI_RUNTIME_SERVICES_DRIVER",
    0x8000_0006: "EFI_GPT_EVENT",
    0x8000_0007: "EFI_ACTION",
    0x8000_0008: "EFI_PLATFORM_FIRMWARE_BLOB",
    0x8000_0009: "EFI_HANDOFF_TABLES",
    0x8000_000A: "EFI_PLATFORM_FIRMWARE_BLOB2",
    0x8000_000B: "EFI_HANDOFF_TABLES2",
    0x8000_000C: "EFI_VARIABLE_BOOT2",
    0x8000_0010: "EFI_HCRTM_EVENT",
    0x8000_00E0: "EFI_VARIABLE_AUTHORITY",
    0x8000_00E1: "EFI_SPDM_FIRMWARE_BLOB",
    0x8000_00E2: "EFI_SPDM_FIRMWARE_CONFIG",
}


@public
@dataclass(frozen=True, slots=True)
class MeasuredEvent:
    """An event of a log: what was measured into a register.

    Attributes
    ----------
    register : int
        The number of the RTMR, 0 to 3.
    kind : int
        The type of event, as TCG numbers it.
    digest : bytes
        The SHA-384 digest that was added to the register, 48 bytes.
    data : bytes
        Data of the log, which is not signed: see `content`.

    Examples
    --------
    >>> import hashlib
    >>> from fastrack import attest
    >>> event = attest.MeasuredEvent(2, 0xD, hashlib.sha384(b"quiet").digest(), b"kernel_cmdline: quiet")
    >>> event.name, event.content
    ('IPL', b'quiet')
    """

    register: int
    kind: int
    digest: bytes
    data: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the type of event; its number in hexadecimal if TCG gives it none."""
        return _NAMES.get(self.kind, f"{self.kind:#x}")

    @property
    def content(self) -> bytes | None:
        """The part of the data that the digest proves; None if it proves none, as of an image or a file."""
        for part in _parts(self.kind, self.data):
            if sha384(part).digest() == self.digest:
                return part
        return None

    def __str__(self) -> str:
        content = self.content
        if content is None:
            return f"{self.name}: digest {self.digest.hex()}"
        text = ascii(content.rstrip(b"\0").decode(errors="backslashreplace"))
        return f"{self.name}: {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"


@public
@dataclass(frozen=True, slots=True)
class EventRule:
    """An event that a policy names: one of these digests, or any event if they are None.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.EventRule(None) == attest.EventRule(frozenset())
    False
    """

    digests: frozenset[bytes] | None


@public
@dataclass(frozen=True, slots=True)
class EventLog:
    """The events of a log in their order, without those that change no register.

    Attributes
    ----------
    events : tuple of MeasuredEvent
        The events of all registers.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.EventLog(()).rtmrs == (bytes(48),) * 4
    True
    """

    events: tuple[MeasuredEvent, ...]

    @classmethod
    def parse(cls, data: bytes) -> EventLog:
        """Read a log: the table CCEL as firmware writes it, or the JSON of dstack.

        Raises
        ------
        FormatError
            If it is neither, is cut short, or lacks a digest of SHA-384.
        """
        if len(data) > EVENT_LOG_LIMIT:
            raise malformed(_EVIDENCE, "size", None, wanted=f"at most {EVENT_LOG_LIMIT} bytes", found=len(data))
        return cls(tuple(_read_dstack(data) if data[:1] in {b"[", b"{"} else _read_ccel(data)))

    @property
    def rtmrs(self) -> tuple[bytes, ...]:
        """The values that the four RTMRs have after these events, 48 bytes each."""
        registers = [bytes(48)] * REGISTERS
        for event in self.events:
            registers[event.register] = sha384(registers[event.register] + event.digest).digest()
        return tuple(registers)

    def of(self, register: int) -> tuple[MeasuredEvent, ...]:
        """Return the events of one RTMR."""
        return tuple(event for event in self.events if event.register == register)

    def proved_by(self, rtmrs: Sequence[bytes]) -> EventLog:
        """Return the events of those of the four RTMRs of a verified quote that they made."""
        proved = {number for number, made in enumerate(self.rtmrs) if made == rtmrs[number]}
        return EventLog(tuple(event for event in self.events if event.register in proved))

    def require(self, rtmrs: Sequence[bytes], registers: Iterable[int] = range(REGISTERS)) -> None:
        """Require that the events are those that made RTMRs of a verified quote, all four or some.

        Raises
        ------
        AttestationError
            If they are not; it names the first register that differs.
        """
        made = self.rtmrs
        for number in registers:
            if made[number] != rtmrs[number]:
                advice = "The log was altered, is of another boot, or lacks events; collect it anew on the machine."
                raise refused(_EVIDENCE, f"RTMR{number}", wanted=rtmrs[number], found=made[number], advice=advice)


def text_digests(text: str) -> frozenset[bytes]:
    """Return the digests that boot loaders and kernels give a text, such as a command line.

    They hash it in UTF-8 (GRUB, systemd-boot) or UTF-16 (the EFI stub of Linux), with a zero at its end or without.
    """
    ended = (text, text + "\0")
    return frozenset(sha384(each.encode(code)).digest() for each in ended for code in ("utf-8", "utf-16-le"))


def _parts(kind: int, data: bytes) -> Iterator[bytes]:
    """Yield the parts of an event's data of which its digest may be the hash."""
    yield data
    if kind in _VARIABLE_BOOTS and len(data) >= 32:
        start = 32 + 2 * int.from_bytes(data[16:24], "little")  # GUID, two sizes, and the name in UTF-16
        yield data[start : start + int.from_bytes(data[24:32], "little")]
    if kind == _IPL:
        for text in (data, data.partition(b": ")[2]):
            yield text.removesuffix(b"\0")
            yield text.rstrip(b"\0") + b"\0"


def _read_ccel(data: bytes) -> Iterator[MeasuredEvent]:
    log = Cursor(data, _EVIDENCE)
    log.u32("register")  # 0 or 1: firmware differs, and this event changes none
    log.expect(_NO_ACTION.to_bytes(4, "little") + bytes(20), "first event")
    sizes = _read_header(log.part(log.u32("header size"), "event log header"))
    for _ in range(_EVENTS_LIMIT):
        if log.remaining < 8:
            return
        offset, register, kind = log.offset, log.u32("register"), log.u32("type")
        if register == 0xFFFF_FFFF or (register, kind) == (0, 0):  # what firmware fills the area with, 0xFF or zeros
            return
        digests = {}
        for _ in range(log.u32("number of digests")):
            algorithm = log.u16("algorithm")
            if algorithm not in sizes or algorithm in digests:
                raise malformed(_EVIDENCE, "algorithm", offset, wanted="one of its header, once", found=algorithm)
            digests[algorithm] = log.take(sizes[algorithm], "digest")
        body = log.take(log.u32("event size"), "event")
        if kind == _NO_ACTION:
            continue
        if not 1 <= register <= REGISTERS:  # 0 is MRTD, which no log adds to
            raise malformed(_EVIDENCE, "register", offset, wanted=f"1 to {REGISTERS}", found=register)
        if _SHA384 not in digests:
            raise malformed(_EVIDENCE, "digests", offset, wanted="one of SHA-384", found="none")
        yield MeasuredEvent(register - 1, kind, digests[_SHA384], body)
    raise malformed(_EVIDENCE, "events", None, wanted=f"at most {_EVENTS_LIMIT}", found="more")


def _read_header(header: Cursor) -> dict[int, int]:
    """Read the header of a log: the sizes of its digests, by the numbers of their algorithms."""
    header.expect(b"Spec ID Event03\0", "signature")
    header.take(8, "version")
    sizes = {}
    for _ in range(header.u32("number of algorithms")):
        algorithm, size = header.u16("algorithm"), header.u16("digest size")
        if size != _SIZES.get(algorithm, size):
            raise malformed(header.structure, "digest size", header.offset, wanted=_SIZES[algorithm], found=size)
        sizes[algorithm] = size
    header.take(header.u8("vendor size"), "vendor data")
    return sizes


def _read_dstack(data: bytes) -> Iterator[MeasuredEvent]:
    """Read the log of dstack."""
    log = Reader.parse(data, _EVIDENCE)
    if isinstance(log.value, dict):
        log = log.member("event_log")
        if isinstance(log.value, str):
            log = Reader.parse(log.value.encode(errors="surrogatepass"), _EVIDENCE)
    for number, event in enumerate(Reader({"events": log.value}, _EVIDENCE).items("events")):
        if number >= _EVENTS_LIMIT:
            raise malformed(_EVIDENCE, "events", None, wanted=f"at most {_EVENTS_LIMIT}", found="more")
        read = _read_dstack_event(event)
        if read.kind != _NO_ACTION:
            yield read


def _read_dstack_event(event: Reader) -> MeasuredEvent:
    """Read an event. The digests of those of the workload are computed, and compared where the log has them."""
    register, kind = event.read("imr", INTEGER), event.member("event_type").value
    if register >= REGISTERS:
        raise event.member("imr").refusal(f"0 to {REGISTERS - 1}", register)
    if type(kind) is not int or not 0 <= kind < 1 << 32:
        raise event.member("event_type").refusal("an integer of 32 bits", kind)
    payload = event.read("event_payload", _PAYLOAD)
    digest = event.read("digest", _DIGEST) if "digest" in event.names and event.read("digest", TEXT) else None
    if kind == _RUNTIME:
        payload = _dstack_content(event, payload)
        made = sha384(payload).digest()
        if digest not in {None, made}:
            raise event.member("digest").refusal("the digest of its name and payload", "another")
        digest = made
    if digest is None:
        raise event.refusal("a member 'digest'", "none")
    return MeasuredEvent(register, kind, digest, payload)


def _dstack_content(event: Reader, payload: bytes) -> bytes:
    """Return the bytes whose digest a runtime event of dstack adds."""
    name = event.read("event", TEXT)
    if not name.isprintable():
        raise event.member("event").refusal("printable text", ascii(name))
    if "version" in event.names and event.read("version", INTEGER) == 2:
        members = {"name": name, "payload": payload.hex(), "type": _RUNTIME}
        return json.dumps(members, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
    return _RUNTIME.to_bytes(4, "little") + b":" + name.encode() + b":" + payload
