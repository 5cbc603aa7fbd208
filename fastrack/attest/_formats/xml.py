"""Read small XML documents, and write them in canonical form.

Only the constructs of signed manifests are read: elements, attributes, namespaces and text. Document types, entities
other than the five of XML, processing instructions, comments, CDATA sections and attributes of the namespace ``xml``
are refused, and so are large or deep documents. The canonical form of a document or an element with its content follows
Canonical XML 1.1 (https://www.w3.org/TR/xml-c14n11/), section 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from xml.parsers import expat

from fastrack._util import gate
from fastrack.attest._errors import malformed
from fastrack.errors import FormatError

_DEEPEST = 16  # elements
_XMLNS = "http://www.w3.org/2000/xmlns/"
_XML = "http://www.w3.org/XML/1998/namespace"
_NO_TEXT = re.compile(r"[ \t\r\n]*")
_IN_TEXT = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#xD;"})
_IN_VALUES = str.maketrans({"&": "&amp;", "<": "&lt;", '"': "&quot;", "\t": "&#x9;", "\n": "&#xA;", "\r": "&#xD;"})

Scope = dict[str, str]


class Element:
    """An element of a document. Its methods raise `FormatError` if a requirement fails.

    `name` is its namespace and local name. `attributes` has values by namespace and local name; without a prefix the
    namespace is "". `children` are elements and text, in order.
    """

    __slots__ = ("attributes", "children", "document", "line", "name", "qualified", "scope", "written")

    def __init__(self, qualified: str, scope: Scope, document: str, line: int) -> None:
        self.qualified = qualified
        self.scope = scope
        self.document = document
        self.line = line
        self.name = ("", "")
        self.attributes: dict[tuple[str, str], str] = {}
        self.written: list[tuple[str, str, str, str]] = []  # namespace, local name, qualified name, value
        self.children: list[Element | str] = []

    @property
    def elements(self) -> list[Element]:
        """The child elements."""
        return [child for child in self.children if isinstance(child, Element)]

    def walk(self) -> Iterator[Element]:
        """Iterate over this element and all below."""
        yield self
        for child in self.elements:
            yield from child.walk()

    def only(self, *names: tuple[str, str]) -> list[Element]:
        """Return the child elements, which must have exactly these names, with only white space between."""
        self.require_no_text()
        elements = self.elements
        actual = [element.name for element in elements]
        if actual != list(names):
            wanted = ", ".join(local for _, local in names) or "nothing"
            raise self.refusal("content", wanted, ", ".join(local for _, local in actual) or "nothing")
        return elements

    def require_no_text(self) -> None:
        """Require only elements and white space."""
        text = "".join(child for child in self.children if isinstance(child, str))
        if not _NO_TEXT.fullmatch(text):
            raise self.refusal("content", "elements", f"the text {text.strip()[:40]!r}")

    def text(self) -> str:
        """Return the text. Elements are refused."""
        if self.elements:
            raise self.refusal("content", "text", "elements")
        return "".join(child for child in self.children if isinstance(child, str))

    def attribute(self, local: str, namespace: str = "") -> str:
        """Return the value of a required attribute."""
        value = self.attributes.get((namespace, local))
        if value is None:
            raise self.refusal(f"attribute {local}", "a value", "none")
        return value

    def expect_attributes(self, **values: str) -> None:
        """Require exactly these attributes, without namespaces."""
        actual = {
            (f"{{{namespace}}}" if namespace else "") + local: value
            for (namespace, local), value in self.attributes.items()
        }
        if actual != values:
            raise self.refusal("attributes", values, actual)

    def refusal(self, field: str, wanted: object, found: object) -> FormatError:
        """Make the error for this element."""
        field = f"{field} of <{self.qualified}> in line {self.line}"
        return malformed(self.document, field, None, wanted=wanted, found=found)


def parse(data: bytes, document: str) -> Element:
    """Parse a document in UTF-8, and return its root."""
    # An element with a declaration of its own copies those in scope, so that their number has to be a small one.
    gate.admit(data, "RIM", name=document)
    builder = _Builder(document)
    try:
        data.decode()  # expat also takes UTF-16 with a byte order mark
        builder.parser.Parse(data, True)
    except (expat.ExpatError, UnicodeDecodeError) as error:
        raise malformed(document, "text", None, wanted="well-formed XML", found=str(error)) from None
    assert builder.root is not None
    return builder.root


class _Builder:
    """The parser's handlers, which build the tree."""

    def __init__(self, document: str) -> None:
        self.document = document
        self.root: Element | None = None
        self._open: list[Element] = []
        parser = self.parser = expat.ParserCreate("UTF-8")
        parser.buffer_text = True
        parser.ordered_attributes = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.XmlDeclHandler = self._declaration
        parser.StartDoctypeDeclHandler = self._refuse("document type")
        parser.EntityDeclHandler = self._refuse("entity")
        parser.ExternalEntityRefHandler = self._refuse("external entity")
        parser.SkippedEntityHandler = self._refuse("entity")
        parser.ProcessingInstructionHandler = self._refuse("processing instruction")
        parser.CommentHandler = self._refuse("comment")
        parser.StartCdataSectionHandler = self._refuse("CDATA section")

    def _refuse(self, construct: str) -> Callable[..., int]:
        def handler(*_: object) -> int:
            field = f"text in line {self.parser.CurrentLineNumber}"
            raise malformed(self.document, field, None, wanted="only elements and text", found=f"a {construct}")

        return handler

    def _declaration(self, version: str, encoding: str | None, standalone: int) -> None:
        if version != "1.0" or (encoding or "UTF-8").upper() != "UTF-8" or standalone == 0:
            declared = f"{version!r}, {encoding!r}, standalone {standalone}"
            raise malformed(self.document, "XML declaration", None, wanted="version 1.0 in UTF-8", found=declared)

    def _start(self, qualified: str, attributes: list[str]) -> None:
        parent = self._open[-1] if self._open else None
        if len(self._open) == _DEEPEST:
            raise malformed(self.document, "depth", None, wanted=f"up to {_DEEPEST}", found="more")
        pairs = list(zip(attributes[::2], attributes[1::2], strict=True))
        element = Element(qualified, parent.scope if parent else {}, self.document, self.parser.CurrentLineNumber)
        declared = [(name, value) for name, value in pairs if name == "xmlns" or name.startswith("xmlns:")]
        if declared:
            element.scope = element.scope | dict(_declare(element, name, value) for name, value in declared)
        for name, value in pairs:
            if name == "xmlns" or name.startswith("xmlns:"):
                continue
            namespace, local = _resolve(element, name, default="")
            if (namespace, local) in element.attributes:
                raise element.refusal(f"attribute {local}", "it once", "it twice")
            element.attributes[namespace, local] = value
            element.written.append((namespace, local, name, value))
        element.name = _resolve(element, qualified, default=element.scope.get("", ""))
        if parent:
            parent.children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def _end(self, _: str) -> None:
        self._open.pop()

    def _text(self, text: str) -> None:
        self._open[-1].children.append(text)


def _declare(element: Element, name: str, value: str) -> tuple[str, str]:
    """Check a declaration of a namespace, and return the prefix and the namespace."""
    prefix = name.removeprefix("xmlns").removeprefix(":")
    if (
        prefix in {"xml", "xmlns"}
        or ":" in prefix
        or value in {_XML, _XMLNS}
        or (name != "xmlns" and not (prefix and value))
    ):
        raise element.refusal(name, "a namespace", value or "none")
    return prefix, value


def _resolve(element: Element, qualified: str, *, default: str) -> tuple[str, str]:
    """Return the namespace and the local name of a qualified name."""
    prefix, colon, local = qualified.partition(":")
    if not colon:
        return default, qualified
    namespace = element.scope.get(prefix)
    if not prefix or not local or ":" in local or prefix == "xml" or namespace is None:
        raise element.refusal("name", "a declared prefix", repr(qualified))
    return namespace, local


def canonicalize(element: Element, *, without: Element | None = None) -> bytes:
    """Write an element with its content as Canonical XML 1.1, without comments.

    Namespaces of outer elements are included. `without` is an inner element to leave out, such as the signature
    (XML Signature, section 6.6.4).
    """
    written = bytearray()
    # Each part by itself, as one character may quadruple the memory of all that is joined with it.
    _write(element, {}, without, lambda text: written.extend(text.encode()))
    return bytes(written)


def _write(element: Element, written: Scope, without: Element | None, put: Callable[[str], None]) -> None:
    put(f"<{element.qualified}")
    if element.scope is not written:
        for prefix, namespace in sorted(element.scope.items()):
            if written.get(prefix, "") != namespace:
                put(f' xmlns{":" if prefix else ""}{prefix}="{namespace.translate(_IN_VALUES)}"')
    for _, _, qualified, value in sorted(element.written):
        put(f' {qualified}="{value.translate(_IN_VALUES)}"')
    put(">")
    for child in element.children:
        if isinstance(child, str):
            put(child.translate(_IN_TEXT))
        elif child is not without:
            _write(child, element.scope, without, put)
    put(f"</{element.qualified}>")
