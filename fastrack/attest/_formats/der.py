"""Read the DER (ITU-T X.690) of certificate extensions.

Only canonical forms are accepted: tags of one byte, definite lengths in their shortest form, and integers and
object identifiers in their only form.
"""

from fastrack.attest._errors import malformed
from fastrack.attest._formats.binary import Cursor

INTEGER = 0x02
OCTET_STRING = 0x04
OBJECT_IDENTIFIER = 0x06
ENUMERATED = 0x0A
IA5_STRING = 0x16
SEQUENCE = 0x30

_LONGEST = 4  # bytes of a length


def read_element(cursor: Cursor, field: str) -> tuple[int, Cursor]:
    """Read the next element, of any type, and return its tag and a cursor over its content."""
    offset = cursor.offset
    tag, length = cursor.take(2, field)
    if tag & 0x1F == 0x1F:
        raise malformed(cursor.structure, field, offset, wanted="a tag of one byte", found=f"{tag:#04x}")
    if length >= 0x80:
        length = _read_long_length(cursor, length & 0x7F, field)
    return tag, cursor.part(length, cursor.structure)


def _read_long_length(cursor: Cursor, count: int, field: str) -> int:
    offset = cursor.offset
    if not 1 <= count <= _LONGEST:
        raise malformed(cursor.structure, field, offset, wanted="a length of up to 4 bytes", found=f"{count} bytes")
    length = int.from_bytes(cursor.take(count, field), "big")
    if length < 0x80 or length < 1 << 8 * (count - 1):
        raise malformed(cursor.structure, field, offset, wanted="the shortest form of a length", found=length)
    return length


def read(cursor: Cursor, tag: int, field: str) -> Cursor:
    """Read the next element, which must have this tag, and return a cursor over its content."""
    offset = cursor.offset
    actual, content = read_element(cursor, field)
    if actual != tag:
        raise malformed(cursor.structure, field, offset, wanted=f"the DER tag {tag:#04x}", found=f"{actual:#04x}")
    return content


def read_last(cursor: Cursor, tag: int, field: str) -> Cursor:
    """Read the last element, which must have this tag, and return a cursor over its content."""
    content = read(cursor, tag, field)
    cursor.done()
    return content


def open_value(value: bytes, structure: str, tag: int, field: str) -> Cursor:
    """Return a cursor over the content of the only element of a value, such as an extension."""
    return read_last(Cursor(value, structure), tag, field)


def read_bytes(cursor: Cursor, tag: int, field: str) -> bytes:
    """Read the content of the next element, which must have this tag, such as OCTET_STRING."""
    return read(cursor, tag, field).rest(field)


def read_integer(cursor: Cursor, field: str) -> int:
    """Read an INTEGER that is not negative, in its shortest form."""
    offset = cursor.offset
    content = read_bytes(cursor, INTEGER, field)
    if not content or content[0] & 0x80 or (len(content) > 1 and content[0] == 0 and not content[1] & 0x80):
        raise malformed(cursor.structure, field, offset, wanted="an integer from 0 in its shortest form", found=content)
    return int.from_bytes(content, "big")


def read_oid(cursor: Cursor, field: str) -> str:
    """Read an OBJECT IDENTIFIER, with arcs in shortest form, and return it in dotted form."""
    offset = cursor.offset
    content = read_bytes(cursor, OBJECT_IDENTIFIER, field)
    arcs, value, is_inside = [], 0, False
    for byte in content:
        if not is_inside and byte == 0x80:
            break
        value = value << 7 | byte & 0x7F
        is_inside = bool(byte & 0x80)
        if not is_inside:
            arcs.append(value)
            value = 0
    else:
        if arcs and not is_inside:
            first = min(arcs[0] // 40, 2)
            return ".".join(map(str, [first, arcs[0] - 40 * first, *arcs[1:]]))
    raise malformed(cursor.structure, field, offset, wanted="an object identifier", found=content)
