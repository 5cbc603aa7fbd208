"""Keys from a Key Broker Service (KBS) of Confidential Containers, by the Confidential Data Hub of its guests.

The hub proves to the KBS what runs in the guest. Its REST server (``api-server-rest`` of
https://github.com/confidential-containers/guest-components) answers on loopback.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

from fastrack._keys.grants import PAYLOAD_TYPE, open_with_environment
from fastrack._keys.keys import Key
from fastrack._net.service import Service
from fastrack._util.shown import shown
from fastrack.errors import FormatError, ProviderError, UnknownKeyError

ADDRESS_VARIABLE = "CDH_ADDR"  # as KServe names it
SECONDS = 60.0  # for an answer: the server waits 50 for the hub, and then tells more than that time is over
_DEFAULT = "http://127.0.0.1:8006"
_NAME = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9_.-]+"
_URI = re.compile(rf"kbs://(/{_NAME}/{_NAME}/{_NAME})")
_LIMIT = 64 << 10  # bytes: grants for some forty recipients
_RAW = 32  # bytes of a key that is no file
# router.rs of api-server-rest has the statuses. The hub has one for all its failures, so no cause is guessed.
_BY_STATUS = {
    403: "The hub answers only its own guest: ask from inside the pod",
    404: f"Start api-server-rest with --features resource or all, or correct {ADDRESS_VARIABLE}",
    500: "This is its status for a resource that the KBS lacks or refuses to this machine, and for a KBS that it does "
    "not reach: the logs of the hub and of the KBS say which",
}


class KbsResource:
    """A key provider with one key: that in a resource of the KBS, which the hub gets anew at each request."""

    def __init__(self, uri: str) -> None:
        match = _URI.fullmatch(uri)
        if match is None:
            raise FormatError(
                f"opening a source of keys failed: expected kbs:///REPOSITORY/TYPE/TAG, got {shown(uri)}. The hub "
                "knows the address of the KBS"
            )
        self._uri = uri
        self._path = f"/cdh/resource{match[1]}"

    def get_key(self, key_id: str) -> Key:
        """Return the key if it has this id.

        Raise UnknownKeyError if it has another id. Raise the errors of `get_sealing_key`.
        """
        key = self.get_sealing_key()
        if key.id != key_id:
            raise UnknownKeyError(
                f"key {key_id} is needed but was not given (given: {key.id}, in {self._uri}); add it to keys="
            )
        return key

    def get_sealing_key(self) -> Key:
        """Return the key.

        Raise ProviderError if the hub does not give the resource. Raise FormatError if that holds no key. Raise the
        errors of grants.
        """
        content = self._get()
        try:
            if len(content) == _RAW:
                return Key.from_bytes(content)
            if PAYLOAD_TYPE.encode() not in content:
                return Key.from_text(content.decode(errors="replace"))
        except FormatError as error:
            expected = f"a key file, grants or {_RAW} random bytes as the resource"
            raise FormatError(f"{self._uri}: expected {expected}, got {len(content)} bytes: {error}") from None
        return open_with_environment(self._uri, content).first

    def _get(self) -> bytes:
        """Return the content of the resource."""
        service = self._service()
        try:
            answer = service.exchange(self._path, limit=_LIMIT, end=time.monotonic() + SECONDS)
        except TimeoutError:
            got, advice = f"none in {SECONDS:g} s", "See the logs of the hub and of the KBS, and try again"
        except OSError as error:
            got = f"{type(error).__name__} at {service.address.netloc}"
            advice = f"Start api-server-rest in this guest, or correct {ADDRESS_VARIABLE}"
            if error.errno is None:  # of the answer, not of the connection
                got, advice = "a part, or none in HTTP", f"Try again, or correct {ADDRESS_VARIABLE}"
        else:
            if answer.status == 200 and len(answer.body) <= _LIMIT:
                return answer.body
            got, advice = f"status {answer.status}", _BY_STATUS.get(answer.status, f"Correct {ADDRESS_VARIABLE}")
            if answer.status == 200:
                got, advice = f"more than {_LIMIT} bytes", "Name the resource of a key"
            elif 300 <= answer.status < 400:
                got += ", a redirect, which is not followed"
        # Outside of the handlers: the error of an answer that was cut has a part of the key.
        raise self._failure(f"expected the resource, got {got}. {advice}")

    def _service(self) -> Service:
        with suppress(ValueError):
            service = Service(os.environ.get(ADDRESS_VARIABLE) or _DEFAULT, "the hub", "naming a hub")
            if service.address.scheme == "http":  # which is allowed for a loopback address only
                return service
        raise self._failure(
            f"expected http://ADDRESS:PORT with a loopback address in {ADDRESS_VARIABLE}, got another text, by which "
            "the key might leave the machine. Correct or unset it"
        )

    def _failure(self, reason: str) -> ProviderError:
        return ProviderError(f"asking the Confidential Data Hub for {self._uri} failed: {reason}")

    def __repr__(self) -> str:
        return f"<KbsResource {self._uri}>"
