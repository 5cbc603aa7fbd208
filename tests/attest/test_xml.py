from contextlib import suppress

import pytest
from helpers.cases import each
from helpers.foundry import nvidia as foundry
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack import FormatError
from fastrack.attest._formats.xml import canonicalize, parse


def canonical(text):
    return canonicalize(parse(text.encode(), "document")).decode()


@each(
    ("text", "form"),
    [
        ("<a/>", "<a></a>"),
        ("<a  b = '1'\n c=\"2\" />", '<a b="1" c="2"></a>'),
        ("<a c='2' b='1'/>", '<a b="1" c="2"></a>'),
        ("<a>&lt;&gt;&amp;&apos;&quot;</a>", "<a>&lt;&gt;&amp;'\"</a>"),
        ("<a b='&lt;&gt;&amp;&apos;&quot;'/>", '<a b="&lt;>&amp;\'&quot;"></a>'),
        ("<a b='1\t2\n3'/>", '<a b="1 2 3"></a>'),
        ("<a b='&#9;&#10;&#13;'/>", '<a b="&#x9;&#xA;&#xD;"></a>'),
        ("<a>1\r\n2\r3&#13;</a>", "<a>1\n2\n3&#xD;</a>"),
        ("<?xml version='1.0' encoding='utf-8'?>\n<a/>\n", "<a></a>"),
        ("<a>\u00e9&#x20AC;</a>", "<a>\u00e9\u20ac</a>"),
        # Namespaces: by prefix, before attributes, unless they are in force already.
        ("<a xmlns:z='1' xmlns:b='2' xmlns='3'/>", '<a xmlns="3" xmlns:b="2" xmlns:z="1"></a>'),
        ("<a xmlns='1'><b xmlns='1'/></a>", '<a xmlns="1"><b></b></a>'),
        ("<a xmlns='1'><b xmlns=''/></a>", '<a xmlns="1"><b xmlns=""></b></a>'),
        ("<a><b xmlns=''/></a>", "<a><b></b></a>"),
        ("<a xmlns:n='1'><n:b xmlns:n='2'/></a>", '<a xmlns:n="1"><n:b xmlns:n="2"></n:b></a>'),
        # Attributes: by namespace, not by prefix; those without one are first.
        ("<a xmlns:y='1' xmlns:x='2' x:a='' y:b='' z=''/>", '<a xmlns:x="2" xmlns:y="1" z="" y:b="" x:a=""></a>'),
    ],
)
def test_the_canonical_form_is(text, form):
    assert canonical(text) == form
    assert canonical(form) == form


def test_an_element_takes_the_namespaces_around_it_along():
    root = parse(b"<a xmlns='1' xmlns:n='2' n:x=''><n:b><c y=''/></n:b></a>", "document")
    assert canonicalize(root.elements[0]) == b'<n:b xmlns="1" xmlns:n="2"><c y=""></c></n:b>'


def test_an_element_can_be_left_out():
    root = parse(b"<a>1<b>2</b>3<b>4</b></a>", "document")
    assert canonicalize(root, without=root.elements[0]) == b"<a>13<b>4</b></a>"


@each(
    ("text", "found"),
    [
        ("<!DOCTYPE a><a/>", "a document type"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", "a document type"),
        ("<!DOCTYPE a SYSTEM 'file:///etc/passwd'><a/>", "a document type"),
        ("<a>&b;</a>", "undefined entity"),
        ("<?b c?><a/>", "a processing instruction"),
        ("<a/><?b c?>", "a processing instruction"),
        ("<a><!-- b --></a>", "a comment"),
        ("<a/><!-- b -->", "a comment"),
        ("<a><![CDATA[b]]></a>", "a CDATA section"),
        ("<a xml:lang='en'/>", "xml:lang"),
        ("<a xmlns:b='http://www.w3.org/XML/1998/namespace' b:lang='en'/>", "namespace"),
        ("<a xmlns:xml='http://www.w3.org/XML/1998/namespace'/>", "namespace"),
        ("<a xmlns:b='http://www.w3.org/2000/xmlns/'/>", "xmlns"),
        ("<a xmlns:b=''/>", "got none"),
        ("<b:a/>", "'b:a'"),
        ("<a b:c=''/>", "'b:c'"),
        ("<a xmlns:b='1' xmlns:c='1' b:d='' c:d=''/>", "it twice"),
        ("<a xmlns:b='1' b:c:d=''/>", "'b:c:d'"),
        ("<:a/>", "':a'"),
        ("<a b='1' b='2'/>", "duplicate attribute"),
        ("<?xml version='1.1'?><a/>", "1.1"),
        ("<?xml version='1.0' encoding='latin-1'?><a/>", "latin-1"),
        ("<?xml version='1.0' standalone='no'?><a/>", "standalone"),
        ("", "no element found"),
        ("<a>", "no element found"),
        ("<a/><a/>", "junk"),
        ("<a>\0</a>", "not well-formed"),
        ("<a>" * 17 + "</a>" * 17, "more"),
        ("<a>" + "b" * (1 << 20) + "</a>", "1048583"),
    ],
)
def test_is_refused(text, found):
    with pytest.raises(FormatError, match=found):
        parse(text.encode(), "document")


def test_only_utf_8_is_read():
    for text in ("<a>\u00e9</a>".encode("latin-1"), "<a/>".encode("utf-16"), b"<a>\xed\xa0\x80</a>"):
        with pytest.raises(FormatError):
            parse(text, "document")


NAMES = st.sampled_from(["a", "b", "n:a", "n:b", "m:a"])
TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]) | st.sampled_from("\t\n\r&<>\"'"), max_size=6
)
URIS = st.sampled_from(["urn:1", "urn:2", "urn:3"])


def escaped(text):
    return "".join(f"&#{ord(one)};" if one in "\t\n\r&<>\"'" else one for one in text)


@st.composite
def documents(draw, depth=0):
    name = draw(NAMES)
    attributes = draw(st.dictionaries(NAMES, TEXT, max_size=3))
    declared = draw(st.dictionaries(st.sampled_from(["xmlns", "xmlns:n", "xmlns:m"]), URIS, max_size=3))
    if not depth:
        declared = {"xmlns:n": "urn:1", "xmlns:m": "urn:2"} | declared
    start = "".join(f" {key}='{escaped(value)}'" for key, value in {**attributes, **declared}.items())
    inner = [escaped(draw(TEXT))]
    for _ in range(draw(st.integers(0, 2)) if depth < 3 else 0):
        inner += [draw(documents(depth + 1)), escaped(draw(TEXT))]
    return f"<{name}{start}>{''.join(inner)}</{name}>"


@settings(max_examples=100, deadline=None)
@given(documents())
@pytest.mark.slow
def test_the_canonical_form_is_that_of_lxml(text):
    etree = pytest.importorskip("lxml.etree")
    with suppress(FormatError):  # two attributes of one name
        root = parse(text.encode(), "document")
        other = etree.fromstring(text.encode())
        assert canonicalize(root) == etree.tostring(other, method="c14n")


def c14n_of_subset(etree, element):
    element.tail = None
    return etree.tostring(element, method="c14n")


def test_manifests_have_the_canonical_form_of_lxml():
    compare_with_lxml([foundry.rim(), foundry.vbios_rim(), foundry.switch_rim()])


def test_real_manifests_have_the_canonical_form_of_lxml(evidence):
    paths = sorted((evidence / "nvidia").glob("*.xml"))
    assert len(paths) >= 4
    compare_with_lxml([path.read_bytes() for path in paths])


def compare_with_lxml(manifests):
    etree = pytest.importorskip("lxml.etree")
    for data in manifests:
        root, other = parse(data, "document"), etree.fromstring(data)
        assert canonicalize(root) == etree.tostring(other, method="c14n")
        signature, theirs = root.elements[-1], other[-1]
        assert canonicalize(signature.elements[0]) == c14n_of_subset(etree, theirs[0])
        assert canonicalize(root, without=signature) == without_signature(etree, other)


def without_signature(etree, root):
    tail, signature = root[-1].tail or "", root[-1]
    before = signature.getprevious()
    before.tail = (before.tail or "") + tail
    root.remove(signature)
    return etree.tostring(root, method="c14n")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text("<>/='\"a:b xmlns&;#![-]?", max_size=60).map(str.encode))
def test_garbage_is_a_format_error(data):
    with suppress(FormatError):
        canonicalize(parse(data, "document"))
