"""Reads what a shared object of ELF for 64 bits says of itself to the system's loader (System V ABI; man 5 elf)."""

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

SHARED_OBJECT = 3
LOAD, DYNAMIC, NOTE = 1, 2, 4
GNU_STACK, GNU_RELRO, GNU_PROPERTY = 0x6474E551, 0x6474E552, 0x6474E553
EXECUTE, WRITE = 1, 2

NEEDED, FLAGS, TEXTREL, FLAGS_1 = 1, 30, 22, 0x6FFFFFFB
_RELA, _RELA_SIZE, _JUMPS, _JUMPS_SIZE = 7, 8, 23, 2
DF_TEXTREL, DF_BIND_NOW, DF_1_NOW = 4, 8, 1

_DYNSYM, _VERNEED = 11, 0x6FFFFFFE  # kinds of sections
_UNDEFINED, _LOCAL = 0, 0

X86_64, AARCH64 = 62, 183
RELATIVE = {X86_64: 8, AARCH64: 1027}  # the kind of a relocation that adds the address of the object
# By machine: the property of an object in which each place that may be jumped to has a mark, its bit, and that mark.
LANDINGS = {
    X86_64: (0xC0000002, 1, bytes.fromhex("f30f1efa")),  # endbr64
    AARCH64: (0xC0000000, 1, bytes.fromhex("5f2403d5")),  # bti c
}


class Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    file_size: int
    size: int
    alignment: int

    def has(self, address):
        return self.address <= address < self.address + self.size


class Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class Entry(NamedTuple):
    tag: int
    value: int


class Symbol(NamedTuple):
    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


class Relocation(NamedTuple):
    address: int
    info: int
    addend: int


@dataclass
class SharedObject:
    """A shared object, by its bytes."""

    data: bytes

    @classmethod
    def read(cls, path):
        data = Path(path).read_bytes()
        assert data[:6] == b"\x7fELF\2\1", "it is not ELF for 64 bits, with the low byte first"
        return cls(data)

    def _rows(self, kind, layout, offset, size):
        return [kind(*row) for row in struct.iter_unpack("<" + layout, self.data[offset : offset + size])]

    @cached_property
    def _header(self):
        # Kind, machine, version, entry, program headers, section headers, flags, and sizes and counts of the headers.
        return struct.unpack_from("<HHIQQQIHHHHHH", self.data, 16)

    @property
    def kind(self):
        return self._header[0]

    @property
    def machine(self):
        return self._header[1]

    @cached_property
    def segments(self):
        return self._rows(Segment, "IIQQQQQQ", self._header[4], self._header[8] * self._header[9])

    @cached_property
    def _sections(self):
        return self._rows(Section, "IIQQQQIIQQ", self._header[5], self._header[10] * self._header[11])

    def segments_of(self, kind):
        return [segment for segment in self.segments if segment.kind == kind]

    @cached_property
    def dynamic(self):
        (segment,) = self.segments_of(DYNAMIC)
        found = {}
        for entry in self._rows(Entry, "QQ", segment.offset, segment.file_size):
            found.setdefault(entry.tag, []).append(entry.value)
        return found

    def word(self, tag):
        return self.dynamic.get(tag, [0])[0]

    def at(self, address, size):
        """Return bytes at an address, as they are in the file."""
        start = self._offset(address)
        return self.data[start : start + size]

    def _offset(self, address):
        (segment,) = (each for each in self.segments_of(LOAD) if each.has(address))
        return segment.offset + address - segment.address

    def _text(self, section, offset):
        start = self._sections[section].offset + offset
        return self.data[start : self.data.index(b"\0", start)].decode()

    def text_at(self, address):
        return self.at(address, 256).partition(b"\0")[0].decode()

    @cached_property
    def _symbols(self):
        (section,) = (each for each in self._sections if each.kind == _DYNSYM)
        return section

    def symbols(self, *, defined):
        """Return the names of the symbols that others may use, or of those that others have to define."""
        symbols = self._rows(Symbol, "IBBHQQ", self._symbols.offset, self._symbols.size)[1:]
        chosen = (each for each in symbols if (each.section != _UNDEFINED) == defined)
        return {self._text(self._symbols.link, each.name) for each in chosen if each.info >> 4 != _LOCAL}

    def libraries(self):
        return {self._text(self._symbols.link, name) for name in self.dynamic.get(NEEDED, [])}

    def versions(self):
        """Return the versions of libraries that it needs, by their names."""
        found = set()
        for section in (each for each in self._sections if each.kind == _VERNEED):
            place = section.offset
            for _ in range(section.info):
                _, count, _, first, following = struct.unpack_from("<HHIII", self.data, place)
                entry = place + first
                for _ in range(count):
                    _, _, _, name, after = struct.unpack_from("<IHHII", self.data, entry)
                    found.add(self._text(section.link, name))
                    entry += after
                place += following
        return found

    @cached_property
    def _relocations(self):
        return [
            relocation
            for start, size in ((_RELA, _RELA_SIZE), (_JUMPS, _JUMPS_SIZE))
            if start in self.dynamic
            for relocation in self._rows(Relocation, "QQq", self._offset(self.word(start)), self.word(size))
        ]

    @cached_property
    def pointers(self):
        """The places in its data that point into itself, with the addresses that they point to."""
        kind = RELATIVE[self.machine]
        return {each.address: each.addend for each in self._relocations if each.info & 0xFFFFFFFF == kind}

    @cached_property
    def imported(self):
        """The places in its data that the loader writes addresses of others to."""
        return [each.address for each in self._relocations if each.info >> 32]

    def is_code(self, address):
        return any(each.has(address) and each.flags & EXECUTE for each in self.segments_of(LOAD))

    def properties(self):
        """Return the words of its GNU properties, by their kinds."""
        if not self.segments_of(GNU_PROPERTY):
            return {}
        (note,) = self.segments_of(GNU_PROPERTY)
        name, size, kind, owner = struct.unpack_from("<III4s", self.data, note.offset)
        assert (name, kind, owner) == (4, 5, b"GNU\0")
        found, place = {}, note.offset + 16
        while place < note.offset + 16 + size:
            kind, length = struct.unpack_from("<II", self.data, place)
            found[kind] = int.from_bytes(self.data[place + 8 : place + 8 + length], "little")
            place += 8 + (length + 7 & -8)
        return found
