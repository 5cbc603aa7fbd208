"""Keys from a Key Broker Service by a Confidential Data Hub, on a stand-in after its sources, not the real service."""

import socket
import time
import traceback

import numpy as np
import pytest
from helpers.cases import each
from helpers.commands import invoke
from helpers.data_hub import FAILED, running

import fastrack
from fastrack.errors import FormatError, GrantError, ProviderError, UnknownKeyError
from fastrack.grants import Grants, Identity, Signer
from fastrack.providers import _kbs

OWNER = "kbs:///models/key/owner"
ENOUGH = 1.0  # seconds for an answer
LATEST = 3.0  # seconds until an error, on a busy machine


@pytest.fixture
def text(key, tmp_path):
    key.save(tmp_path / "owner.key")
    return (tmp_path / "owner.key").read_bytes()


@pytest.fixture
def hub(key, text, monkeypatch):
    resources = {
        "models/key/owner": text,
        "models/key/raw": bytes(key.material()),
        "models/key/short": bytes(key.material())[:31],
        "models/key/zeros": bytes(32),
        "models/key/empty": b"",
        "models/key/windows": text.replace(b"\n", b"\r\n"),
        "models/key/large": b"x" * (1 << 20),
        "models/key/jwk": b'{"kty": "oct", "k": "AAAA"}',
        "models/key/refused": text,
    }
    monkeypatch.setattr(_kbs, "SECONDS", ENOUGH)
    with running(resources) as hub:
        hub.refused.add("models/key/refused")
        monkeypatch.setenv("CDH_ADDR", hub.address)
        yield hub


def fail(source, kind):
    """Return the one line of an error that is raised in time, and has no secret."""
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        fastrack.seal(np.arange(2), source)
    assert time.monotonic() - begin < LATEST
    said = str(caught.value)
    assert "\n" not in said
    assert source in said
    shown = "".join(traceback.format_exception(caught.value))
    assert FAILED.decode() not in shown  # nothing that a server says is repeated
    assert "0123456789abcdef" not in shown
    error = caught.value
    while error is not None:
        assert not getattr(error, "partial", b"")  # of an answer that was cut
        error = error.__context__
    return said


@pytest.mark.usefixtures("hub")
@each("tag", ["owner", "raw"])
def test_a_key_file_and_32_bytes_are_a_key(key, tag):
    sealed = fastrack.seal(np.arange(5), f"kbs:///models/key/{tag}")
    assert sealed.key_id == key.id
    assert fastrack.unseal(sealed, keys=f"kbs:///models/key/{tag}", framework="numpy").tolist() == [0, 1, 2, 3, 4]


def test_grants_are_unlocked_by_the_identity_of_the_environment(hub, key, tmp_path, monkeypatch):
    owner, guest, other = Signer.generate(), Identity.generate(), Identity.generate()
    hub.resources["models/key/grants"] = Grants.issue(key, [guest.recipient], signer=owner, files=[]).envelope
    source = "kbs:///models/key/grants"
    assert "set FASTRACK_IDENTITY and FASTRACK_OWNER" in fail(source, UnknownKeyError)
    owner.verifier.save(tmp_path / "owner.pub")
    guest.save(tmp_path / "guest")
    other.save(tmp_path / "other")
    monkeypatch.setenv("FASTRACK_OWNER", str(tmp_path / "owner.pub"))
    monkeypatch.setenv("FASTRACK_IDENTITY", str(tmp_path / "guest"))
    granted = fastrack.KeyRing(source).first
    assert granted == key
    assert granted.is_restricted
    monkeypatch.setenv("FASTRACK_IDENTITY", str(tmp_path / "other"))
    with pytest.raises(GrantError, match="was not granted to"):
        fastrack.KeyRing(source).first  # noqa: B018 - it asks


def test_a_ring_asks_once_and_only_for_the_resource(hub, key):
    ring = fastrack.KeyRing(OWNER)
    assert not hub.asked  # when it is made
    assert ring[key.id] == ring[key.id] == key
    ((path, headers),) = hub.asked
    assert path == "/cdh/resource/models/key/owner"
    assert not {"Authorization", "Cookie"} & headers.keys()


@pytest.mark.usefixtures("hub")
def test_the_id_of_another_key_is_told_as_a_key_that_is_missing(key):
    sealed = fastrack.seal(np.arange(2), other := fastrack.Key.generate())
    with pytest.raises(UnknownKeyError) as caught:
        fastrack.unseal(sealed, keys=OWNER)
    wanted = f"key {other.id} is needed but was not given (given: {key.id}, in {OWNER}); add it to keys="
    assert str(caught.value) == wanted
    ring = fastrack.KeyRing([OWNER, other])
    assert ring[other.id] == other


@pytest.mark.usefixtures("hub")
@each(
    "tag,said",
    {
        "absent": "got status 500. This is its status for a resource that the KBS lacks or refuses to this machine",
        "refused": "for a KBS that it does not reach: the logs of the hub and of the KBS say which",
        "forbidden": "got status 403. The hub answers only its own guest: ask from inside the pod",
        "slow": "got none in 1 s. See the logs of the hub and of the KBS, and try again",
        "dripping": "got none in 1 s. See the logs",
        "cut": "got a part, or none in HTTP. Try again, or correct CDH_ADDR",
        "not-http": "got a part, or none in HTTP. Try again",
        "large": "got more than 65536 bytes. Name the resource of a key",
        "redirect": "got status 302, a redirect, which is not followed. Correct CDH_ADDR",
    }.items(),
)
@pytest.mark.slow
def test_a_hub_that_gives_no_resource_is_one_line_in_time(tag, said):
    assert said in fail(f"kbs:///models/key/{tag}", ProviderError)


def test_a_gibibyte_is_not_read(hub):
    assert "more than 65536 bytes" in fail("kbs:///models/key/huge", ProviderError)
    assert hub.sent < 32 << 20  # what sockets hold


def test_a_redirect_is_not_followed(hub):
    fail("kbs:///models/key/redirect", ProviderError)
    assert [path for path, _ in hub.asked] == ["/cdh/resource/models/key/redirect"]


@pytest.mark.usefixtures("hub")
@each(
    "tag,said",
    {
        "empty": "got 0 bytes: the text is not a fastrack key file",
        "short": "expected a key file, grants or 32 random bytes as the resource, got 31 bytes",
        "zeros": "got zeros only",
        "windows": "its lines end in CRLF. Convert it",
        "jwk": "got 27 bytes: the text is not a fastrack key file",
    }.items(),
)
def test_a_resource_that_is_no_key_is_named(tag, said, key):
    message = fail(f"kbs:///models/key/{tag}", FormatError)
    assert said in message
    assert bytes(key.material())[:8].hex() not in message


def test_a_feature_that_is_off_is_told(hub):
    hub.has_resources = False
    assert "got status 404. Start api-server-rest with --features resource or all" in fail(OWNER, ProviderError)


def test_a_kbs_that_is_not_reached_is_told_as_the_hub_tells_it(hub):
    hub.is_reached = False
    assert "got status 500" in fail(OWNER, ProviderError)


def test_a_hub_that_is_absent_is_told_at_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("CDH_ADDR", f"http://127.0.0.1:{port}")
    said = fail(OWNER, ProviderError)
    assert f"got ConnectionRefusedError at 127.0.0.1:{port}. Start api-server-rest in this guest" in said


@each(
    "address",
    [
        "http://10.0.0.1:8006",
        "http://localhost:8006",  # a name may be elsewhere
        "https://127.0.0.1:8006",
        "https://hub.example",
        "127.0.0.1:8006",
        "http://user:pa55w0rd@127.0.0.1:8006",
        "http://127.0.0.1:8006/elsewhere",
        "http://127.0.0.1:port",
    ],
)
def test_another_address_than_one_of_this_machine_is_refused(monkeypatch, address):
    monkeypatch.setenv("CDH_ADDR", address)
    said = fail(OWNER, ProviderError)
    assert "with a loopback address in CDH_ADDR, got another text" in said
    assert address not in said


def test_no_proxy_is_asked(hub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        fastrack.KeyRing(OWNER).first  # noqa: B018 - it asks
    assert len(hub.asked) == 1


@each(
    "uri",
    [
        "kbs:",
        "kbs:models/key/owner",
        "kbs:///models/key",
        "kbs:///models/key/owner/more",
        "kbs://kbs.example/models/key/owner",
        "kbs:///models/../owner",
        "kbs:///models/key/..",
        "kbs:///./key/owner",
        "kbs:///models/key/owner?a=b",
        "kbs:///models/key/%6fwner",
        "kbs:///models/key/owner\n",
        "kbs:///models/key/ö",
    ],
)
def test_another_uri_is_refused_before_anything_is_asked(uri):
    with pytest.raises(FormatError, match="expected kbs:///REPOSITORY/TYPE/TAG"):
        fastrack.KeyRing(uri)


def test_names_with_dots_are_names(hub, key, text):
    hub.resources["my.models/key-1/..v1.2"] = text
    assert fastrack.KeyRing("kbs:///my.models/key-1/..v1.2").first == key


@pytest.mark.usefixtures("hub")
@pytest.mark.slow
def test_commands_take_the_source_and_tell_its_errors(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.arange(4))
    sealed = str(tmp_path / "a.safetensors")
    assert invoke(["seal", str(tmp_path / "a.npy"), sealed, "--key", OWNER]).exit_code == 0
    assert invoke(["verify", sealed, "--key", OWNER]).exit_code == 0
    done = invoke(["verify", sealed, "--key", "kbs:///models/key/absent"])
    assert done.exit_code == 5
    assert "got status 500" in done.stderr
    monkeypatch.setenv("FASTRACK_KEY_FILE", OWNER)
    assert invoke(["verify", sealed]).exit_code == 0
    assert OWNER in invoke(["doctor"]).stdout
