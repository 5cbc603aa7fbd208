"""The exit status of each kind of error."""

import pytest
from helpers.tampering import flip_byte

import fastrack.errors
from fastrack import Key
from fastrack._cli.errors import KINDS, status_of

TAKEN = {0, 1, 2, 3, 130, 141, 143}
STATUSES = {
    "FastrackError": 1,
    "ClosedError": 1,
    "AuthenticationError": 4,
    "RollbackError": 4,
    "SignatureError": 4,
    "AttestationError": 4,
    "UnknownKeyError": 5,
    "KeyPermissionError": 5,
    "GrantError": 5,
    "ProviderError": 5,
    "FormatError": 6,
    "DeviceError": 7,
    "LeaseError": 8,
}
CASES = {  # of a command, with "altered" for a file with a flipped bit
    "verify altered --key owner.key": "authentication",
    "unseal altered new.npz --key owner.key": "authentication",
    "verify sealed.safetensors --key owner.key --file-id 00000000000000000000000000000000": "authentication",
    "verify sealed.safetensors --key other.key": "key",
    "verify sealed.safetensors --key missing.key": "key",
    "verify sealed.safetensors --key plain.npz": "key",
    "verify sealed.safetensors --key open.key": "key",
    "seal plain.npz new.safetensors --to missing.pub --sign owner.key": "key",
    "key missing.key": "key",
    "verify missing --key owner.key": "input",
    "verify plain.npz --key owner.key": "input",
    "seal missing.npy new.safetensors --key owner.key": "input",
    "seal plain.npz missing/new.safetensors --key owner.key": "input",
    "seal plain.npz sealed.safetensors --key owner.key": None,  # the target exists
    "verify altered altered2 --key owner.key": "authentication",
    "verify altered missing --key owner.key": None,  # of two kinds
}


def test_each_public_error_has_the_status_of_its_kind():
    for name in fastrack.errors.__all__:
        assert status_of([getattr(fastrack.errors, name)("x")]) == STATUSES[name], name


def test_a_new_error_has_the_status_of_its_base():
    class Late(fastrack.GrantError):
        pass

    assert status_of([Late("x")]) == KINDS["key"][0]


def test_numbers_are_of_one_kind_each():
    numbers = [status for status, _ in KINDS.values()]
    assert len({*numbers}) == len(numbers)
    assert not TAKEN & {*numbers}
    assert all(3 < number < 64 for number in numbers)  # below those of sysexits.h, of shells and of signals


@pytest.mark.usefixtures("sealed")
def test_commands_end_with_the_status_of_the_kind_of_their_error(cli, folder):
    for name in ("other", "open"):
        Key.generate().save(f"{name}.key")
    (folder / "open.key").chmod(0o644)
    for name in ("altered", "altered2"):
        (folder / name).write_bytes((folder / "sealed.safetensors").read_bytes())
        flip_byte(folder / name)
    for line, kind in CASES.items():
        status = 1 if kind is None else KINDS[kind][0]
        result = cli(line, status="any")
        assert (line, result.exit_code) == (line, status)
        result = cli(f"{line} --json", status="any")
        assert (line, result.exit_code) == (line, status)
        assert f'"kind": "{kind}"' in result.stdout or kind is None, line


@pytest.mark.usefixtures("sealed")
def test_a_device_that_is_not_capable_has_a_status_of_its_own(cli, monkeypatch):
    def fail(_):
        raise fastrack.DeviceError("expected an engine that this machine can run, got none")

    monkeypatch.setattr("fastrack._cli.run.load_engine", fail)
    line = "verify sealed.safetensors --key owner.key"
    assert cli.json(line, status=KINDS["device"][0])["error"]["kind"] == "device"


def test_help_tells_each_status(cli):
    said = cli("help status").stdout
    for kind, (status, _) in KINDS.items():
        assert f"  {status}    {kind}: " in said
