import pytest

from fastrack._crypto.message_keys import MessageKeys


@pytest.fixture
def derived_keys(monkeypatch):
    """Collect the keys of the messages of every call."""
    made, original = [], MessageKeys.__init__

    def init(keys, count):
        original(keys, count)
        made.append(keys)

    monkeypatch.setattr(MessageKeys, "__init__", init)
    return made
