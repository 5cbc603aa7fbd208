"""The log of a command on standard error."""

import logging

import pytest
from helpers.tampering import flip_byte

VERIFY = "verify sealed.safetensors --key owner.key"


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("line", [f"{VERIFY} -v", f"{VERIFY} --verbose", f"-v {VERIFY}", f"-v {VERIFY} -vv"])
def test_a_command_says_what_it_does(cli, line):
    plain, verbose = cli(VERIFY), cli(line)
    assert plain.stderr == ""
    assert verbose.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    said = verbose.stderr.splitlines()
    assert said[0].startswith("debug: fastrack ")
    assert said.count("debug: verifying sealed.safetensors") == 1
    assert [line for line in said if line.startswith("debug: engine ")]


@pytest.mark.usefixtures("sealed")
def test_an_error_says_where_it_arose(cli, folder):
    flip_byte(folder / "sealed.safetensors")
    for line in ("unseal sealed.safetensors new.npz --key owner.key", "verify no.safetensors --key owner.key"):
        short, long = cli.error(line), cli.error(f"{line} -v")
        assert long.endswith(short)
        assert "_cli/errors.py:" in long
        assert "raised in" not in short
    document = cli(f"{line} --json -v", status=1)
    assert document.stdout.startswith("{")


@pytest.mark.usefixtures("sealed")
def test_what_others_said_is_not_in_the_log(cli, monkeypatch):
    def fail(*_, **__):
        raise OSError("asking the store failed") from OSError("https://store/name?signature=secret")

    monkeypatch.setattr("fastrack._cli.commands.verify.open_ring", fail)
    said = cli.error(f"{VERIFY} -v")
    assert said.count("debug: OSError, raised in\n") == 2
    assert "secret" not in said


@pytest.mark.usefixtures("sealed")
def test_what_others_said_is_not_in_the_traceback_of_a_log_that_fails(cli, monkeypatch):
    class Failing(logging.Handler):
        def emit(self, record):
            try:
                self.missing(record)
            except AttributeError:
                self.handleError(record)

    def fail(*_, **__):
        raise OSError("asking the store failed") from OSError("https://store/name?signature=secret")

    monkeypatch.setattr("fastrack._cli.commands.verify.open_ring", fail)
    monkeypatch.setattr(logging.getLogger("fastrack"), "handlers", [Failing()])
    said = cli.error(f"{VERIFY} -v")
    assert "AttributeError" in said
    assert "secret" not in said


@pytest.mark.usefixtures("key")
@pytest.mark.slow
def test_a_key_or_a_password_in_the_place_of_a_file_is_not_in_the_log(cli):
    secret = "0123456789abcdef" * 4
    for source in (secret, f"https://user:{secret}@127.0.0.1:9/x", f"https://127.0.0.1:9/x?X-Amz-Signature={secret}"):
        result = cli(f"verify {source} --key owner.key -v", status="any")
        assert result.exit_code
        assert secret not in result.output, source


@pytest.mark.usefixtures("sealed")
def test_the_log_of_the_program_that_calls_it_is_as_it_was(cli):
    log = logging.getLogger("fastrack")
    before = log.level, list(log.handlers)
    cli(f"{VERIFY} -v")
    cli.error(f"{VERIFY} -v --file-id 00")
    assert (log.level, list(log.handlers)) == before
