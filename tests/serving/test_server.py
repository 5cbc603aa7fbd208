"""The server in examples/serving: what it answers, what it refuses, and what it does when something fails."""

import itertools
import os
import re
import shutil
import signal
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers.serving_requests import HEAD, TOKENS, WRAPPED, sealed, torch

import fastrack
from examples.serving import __main__, demo, model, sealing, supervisor, weights
from examples.serving.client import Client
from examples.serving.refusals import RefusedError, told
from fastrack import attest
from fastrack.grants import Identity, Signer

pytestmark = pytest.mark.slow

CONFIG = model.Config()


@pytest.fixture(scope="module")
def editions(tmp_path_factory):
    """Return a folder with a key, two sealed models, and a damaged one for each file of a sealed model."""
    folder = tmp_path_factory.mktemp("editions")
    key = fastrack.Key.generate()
    key.save(folder / "owner.key")
    good = [demo.Edition.make(folder / f"good-{seed}", key, CONFIG, seed) for seed in (1, 2)]
    damaged = []
    for seed, name in enumerate(sorted(path.name for path in good[0].path.iterdir()), 3):
        damaged.append(demo.Edition.make(folder / f"damaged-{seed}", key, CONFIG, seed).path)
        demo.damage(damaged[-1] / name)
    return folder, {each.id: each for each in good}, damaged


class Served:
    """A server on a link of its own, with its log and a client."""

    def __init__(self, server, link, editions, log):
        self.server, self.link, self.log = server, link, log
        self.folder, self.good, self.damaged = editions
        self.client = Client(server.url, sealing.trust_nothing)

    def point(self, path):
        demo.point(self.link, path)

    def check(self, client=None, tokens=TOKENS, edition=""):
        """Ask, and compare the answer with that of the plain model."""
        answer = (client or self.client).ask(tokens, edition)
        assert torch.equal(answer.logits, self.good[answer.edition].model(tokens))
        return answer

    def refused(self, reason):
        return self.server.metric(f'fastrack_refused_total{{reason="{reason}"}}')

    def other_client(self, number):
        """Return a client whose connection is to another worker than this one."""
        for _ in range(200):
            client = Client(self.server.url, sealing.trust_nothing)
            if client.send("/ready")[2] not in {number, ""}:
                return client
            client.close()
        raise AssertionError("all connections are to one worker")


@pytest.fixture(scope="module")
def start(editions, tmp_path_factory):
    @contextmanager
    def start(*options, workers=2):
        folder, good, _ = editions
        link = folder / f"current-{time.monotonic_ns()}"
        demo.point(link, next(iter(good.values())).path)
        log = tmp_path_factory.mktemp("log") / "log"
        options = ("--workers", str(workers), *options)
        with log.open("w") as file, demo.serving(link, folder / "owner.key", *options, log=file.fileno()) as server:
            served = Served(server, link, editions, log)
            yield served
            served.client.close()

    return start


@pytest.fixture(scope="module")
def served(start):
    with start() as served:
        yield served
    text = served.log.read_text()
    assert "Traceback" not in text
    assert "failed" not in text.replace("reload failed", "")


def test_answers_are_those_of_the_plain_model(served):
    for count in (1, 2, 100, CONFIG.length):
        answer = served.check(tokens=torch.randint(CONFIG.vocabulary, (count,)))
    served.check(edition=answer.edition)
    assert served.server.ask("/live") == (200, "live\n")
    assert served.server.ask("/ready") == (200, f"ready, edition {answer.edition}\n")


def test_refused_requests_are_counted_and_the_server_goes_on(served):
    client, served_machine = served.client, served.client.machine
    body, _, _ = sealed(served_machine)
    flipped = bytearray(body)
    flipped[200] ^= 1
    cases = [
        ("machine", sealed(Identity.generate().recipient)[0], 421),
        ("altered", bytes(flipped), 400),
        ("stale", sealed(served_machine, age=3600)[0], 403),
        ("edition", sealed(served_machine, edition="12" * 16)[0], 412),
        ("tokens", sealed(served_machine, TOKENS - 1)[0], 422),
        ("tokens", sealed(served_machine, torch.arange(CONFIG.length + 1))[0], 422),
        ("large", bytes(sealing.LIMIT + 1), 413),
        *(("malformed", body[:size], 400) for size in (0, 1, 8, HEAD, HEAD + 1, HEAD + WRAPPED, HEAD + WRAPPED + 1)),
        ("malformed", body[:-1], 400),
        ("malformed", body[HEAD:] + body[:HEAD], 400),
    ]
    for reason, request, status in cases:
        before = served.refused(reason)
        assert client.send("/ask", request)[:2] == (status, reason.encode())
        assert served.refused(reason) == before + 1
    served.check()
    assert served.server.metric('fastrack_requests_total{result="failed"}') == 0


def test_a_replayed_request_is_refused_by_every_worker(served):
    before = served.refused("replayed")
    body, head, key = sealed(served.client.machine)
    status, answer, number = served.client.send("/ask", body)
    assert status == 200
    assert sealing.open_answer(answer, head, key)[0].shape == (CONFIG.vocabulary,)
    assert served.client.send("/ask", body) == (409, b"replayed", number)
    other = served.other_client(number)
    status, answer, another = other.send("/ask", body)
    assert (status, answer) == (409, b"replayed")
    assert another != number
    other.close()
    assert served.refused("replayed") == before + 2


def test_a_request_whose_client_breaks_off_is_counted(served):
    before = served.refused("broken")
    parts = urlsplit(served.server.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(b"POST /ask HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + bytes(10))
    served.server.wait(lambda: served.refused("broken") == before + 1, 10)
    served.check()


def test_offers_are_for_challenges_alone(served):
    assert served.client.send("/offer", b"{}\n")[0] == 400
    assert served.client.send("/offer", bytes(2000))[0] == 413
    challenge = attest.Challenge.generate(now=sealing.datetime.now(sealing.UTC))
    status, offer, _ = served.client.send("/offer", challenge.to_bytes())
    assert status == 200
    assert sealing.trust_nothing(offer, challenge)[0] == served.client.machine


def test_the_metrics_are_in_the_format_of_prometheus(served):
    served.check()
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"\})? [0-9.e+-]+')
    lines = served.server.metrics()
    assert not [line for line in lines if not line.startswith("# TYPE ") and not sample.fullmatch(line)]
    count = served.server.metric("fastrack_answer_seconds_count")
    assert 0 < count <= served.server.metric('fastrack_requests_total{result="answered"}')


def test_a_reload_reaches_all_workers_and_a_damaged_folder_none(served):
    first, second = served.good.values()
    workers = [served.client, served.other_client(served.client.send("/ready")[2])]
    for edition in (second, first):
        served.point(edition.path)
        served.server.reload("ok")
        assert {served.check(client).edition for client in workers} == {edition.id}
        for damaged in served.damaged:
            served.point(damaged)
            served.server.reload("refused")
            assert {served.check(client).edition for client in workers} == {edition.id}
    served.point(served.folder / "absent")
    served.server.reload("failed")
    served.check()
    workers[1].close()
    assert models_mapped(served.server) == 2  # each worker has the model in use, and no other
    text = served.log.read_text()
    assert "AuthenticationError" in text
    assert "what was in use stays" in text


def test_nobody_can_change_or_cut_the_weights_in_use(served):
    files = list(Path(f"/proc/{served.server.process.pid}/fd").iterdir())
    (memory,) = [file for file in files if str(file.readlink()).startswith("/memfd:model")]
    descriptor = os.open(memory, os.O_RDWR)
    for change in (lambda: os.pwrite(descriptor, b"x", 0), lambda: os.ftruncate(descriptor, 10)):
        with pytest.raises(PermissionError):
            change()
    os.close(descriptor)
    served.check()


@pytest.mark.nightly
def test_a_worker_that_does_not_take_over_a_model_is_replaced(start):
    with start() as served:
        served.check()
        victim, _ = children_of(served.server.process.pid)
        os.kill(victim, signal.SIGSTOP)
        served.server.client.close()  # which may be one to it
        served.point(list(served.good.values())[1].path)
        served.server.client = served.other_client("")
        served.server.reload("ok")
        assert not Path(f"/proc/{victim}").exists()
        assert "does not take over the model" in served.log.read_text()
        served.server.wait(lambda: models_mapped(served.server) == 2, 10)


def test_a_killed_worker_is_started_again_and_workers_end_with_their_supervisor(start):
    with start() as served:
        served.point(list(served.good.values())[1].path)
        served.server.reload("ok")
        victims = children_of(served.server.process.pid)
        for count, pid in enumerate(victims, 1):
            os.kill(pid, signal.SIGKILL)
            served.server.wait(lambda count=count: served.server.metric("fastrack_worker_restarts_total") == count, 10)
            served.server.wait(lambda: all_ready(served.server), 10)
            client = Client(served.server.url, sealing.trust_nothing)
            assert served.check(client).edition == list(served.good)[1]
            client.close()
        assert "ended by SIGKILL" in served.log.read_text()
        served.server.wait(lambda: models_mapped(served.server) == 2, 10)

        workers = children_of(served.server.process.pid)
        served.server.process.kill()  # a killed supervisor tells its workers nothing: they notice, and end
        served.server.process.wait()
        end = time.monotonic() + 15
        while any(map(is_running, workers)):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_an_older_edition_is_refused_by_an_anchor(editions, tmp_path):
    folder, good, _ = editions
    owner, paths = Signer.generate(), [tmp_path / "first", tmp_path / "second"]
    for path, edition in zip(paths, good.values(), strict=True):
        shutil.copytree(edition.path, path)
    fastrack.publish(paths[0], signer=owner)
    shutil.copy(paths[0] / "fastrack.manifest", paths[1])
    fastrack.publish(paths[1], signer=owner)
    anchor, keys = tmp_path / "model.anchor", fastrack.KeyRing(folder / "owner.key")
    fastrack.Anchor.create(anchor, owner=owner.verifier)
    memory = os.memfd_create("model")
    assert weights.open_model(paths[1], keys, memory, anchor=anchor) == list(good)[1]
    with pytest.raises(fastrack.RollbackError):
        weights.open_model(paths[0], keys, memory, anchor=anchor)
    os.close(memory)


def write_model(folder, config):
    """Write a folder with the weights of the server's own model, and with a configuration."""
    model.make_model(folder, CONFIG, 1)
    (folder / "config.json").write_text(config)


@pytest.mark.parametrize(
    ("config", "cause", "expected"),
    [
        ('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}', "architecture", "transformers"),
        ('{"hidden_size": 64}', "architecture", "model_type"),
        ("[1]", "architecture", "model_type"),
        ("{", "architecture", "JSONDecodeError in raw_decode"),
        (None, "incomplete", "with config.json, got none"),
        ('{"vocabulary": 256, "length": 128, "width": 64, "layers": 3, "heads": 4}', "incomplete", "blocks.2"),
    ],
)
def test_a_folder_without_a_model_is_refused_for_its_reason(editions, tmp_path, config, cause, expected):
    write_model(tmp_path / "plain", config or "")
    if config is None:
        (tmp_path / "plain" / "config.json").unlink()
    fastrack.seal_folder(tmp_path / "plain", tmp_path / "sealed", fastrack.Key.load(editions[0] / "owner.key"))
    assert said_of(tmp_path / "sealed", editions[0] / "owner.key", cause, expected)


def test_a_missing_or_other_key_and_a_missing_folder_are_named(editions, tmp_path):
    folder, good, _ = editions
    fastrack.Key.generate().save(tmp_path / "other.key")
    path = next(iter(good.values())).path
    assert said_of(path, tmp_path / "other.key", "key", "is needed but was not given")
    assert said_of(path, tmp_path / "none.key", "key", "No such file")
    assert said_of(tmp_path / "none", folder / "owner.key", "damaged", "No such file")


def said_of(path, key, cause, expected):
    """Return what the log is told of a folder, once it was compared."""
    memory = os.memfd_create("model")
    with pytest.raises(Exception, match=re.escape(expected)) as caught:
        weights.open_model(path, str(key), memory)
    os.close(memory)
    assert supervisor.cause_of(caught.value) == cause
    text = told(caught.value)
    assert "\n" not in text
    assert "KeyError" not in text.replace("UnknownKeyError", "")
    return text


def test_a_log_has_no_text_of_errors_that_others_raise():
    with pytest.raises(KeyError) as caught:
        {}["a value"]
    assert re.fullmatch(r"KeyError in test_\w+ \(test_server\.py, line \d+\)", told(caught.value))


def test_a_server_without_a_model_lives_and_is_not_ready(editions, tmp_path, monkeypatch, capsys):
    folder, good, damaged = editions
    link = tmp_path / "current"
    link.symlink_to(damaged[0])
    with demo.serving(link, folder / "owner.key", "--workers", "1", "--watch", "0.1", is_ready=False) as server:
        client = Client(server.url, sealing.trust_nothing)
        server.wait(lambda: server.ask("/ready") == (503, "waiting for a model (damaged)\n"))
        server.wait(lambda: server.metric('fastrack_reloads_total{result="refused"}') == 1)
        assert server.ask("/live")[0] == 200
        for asked in (TOKENS, "a text"):
            with pytest.raises(RefusedError, match=r"\(damaged\): the server has no model, .*: see its log$"):
                client.ask(asked)
        monkeypatch.setattr("sys.argv", ["serving", "ask", server.url, "17", "--development"])
        assert __main__.main() == 1
        assert re.fullmatch(r"ask: asking failed: [^\n]* refusal \(damaged\)[^\n]*\n", capsys.readouterr().err)
        fresh = tmp_path / "fresh"
        fresh.symlink_to(next(iter(good.values())).path)
        fresh.replace(link)  # seen without a signal
        server.wait(lambda: server.ask("/ready")[0] == 200)
        assert client.ask(TOKENS).edition in good
        with pytest.raises(RefusedError, match="has no tokenizer"):
            client.ask("a text")
        client.close()


def test_reloads_under_load_give_no_wrong_answer_and_drop_no_request(served):
    reload_under_load(served, 2)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_200_reloads_under_load_give_no_wrong_answer_and_drop_no_request(start):
    with start(workers=4) as served:
        reload_under_load(served, 100)
        assert served.server.metric('fastrack_requests_total{result="refused"}') == 0


def reload_under_load(served, turns):
    """Reload a good folder and a damaged one in turn while clients ask, and look at each answer."""
    asked = [torch.randint(CONFIG.vocabulary, (count,)) for count in (1, 3, 20, 60, 128)]
    expected = {edition.id: [edition.model(tokens) for tokens in asked] for edition in served.good.values()}
    answers, faults, is_over = [], [], threading.Event()
    before = served.server.metric('fastrack_requests_total{result="answered"}')

    def ask(number):
        client = Client(served.server.url, sealing.trust_nothing)
        for turn in itertools.count(number):
            if is_over.is_set():
                break
            place = turn % len(asked)
            try:
                logits, edition, worker = ask_once(client, asked[place])
                answers.append((edition, worker))
                if not torch.equal(logits, expected[edition][place]):
                    faults.append(f"a wrong answer of {edition}")
            except Exception as error:  # noqa: BLE001 - a request that was dropped, for any reason
                faults.append(repr(error))
        client.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    list(map(threading.Thread.start, threads))
    try:
        for turn in range(turns):
            served.point(list(served.good.values())[(turn + 1) % 2].path)
            served.server.reload("ok")
            served.point(served.damaged[turn % len(served.damaged)])
            served.server.reload("refused")
            if turn == turns // 10:
                early = memory_of(served.server)
    finally:
        is_over.set()
        list(map(threading.Thread.join, threads))
    late = memory_of(served.server)
    print(f"{len(answers)} answers, {len(faults)} faults")  # noqa: T201 - the figure of docs/serving-reference.md
    assert faults == []
    assert {edition for edition, _ in answers} == set(served.good)
    assert len({number for _, number in answers}) > 1
    assert len(answers) == served.server.metric('fastrack_requests_total{result="answered"}') - before
    assert served.server.metric('fastrack_requests_total{result="failed"}') == 0
    assert models_mapped(served.server) == len(children_of(served.server.process.pid))
    assert late < 1.1 * early


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_four_workers_take_little_more_memory_than_one(tmp_path):
    key = fastrack.Key.generate()
    key.save(tmp_path / "owner.key")
    edition = demo.Edition.make(tmp_path / "large", key, model.Config(width=1024, layers=22, heads=16), 1)
    size = sum(tensor.nbytes for tensor in edition.model.state_dict().values())
    assert size >= 1 << 30
    wanted, found = edition.model(TOKENS), {}
    for workers in (1, 4):
        with demo.serving(edition.path, tmp_path / "owner.key", "--workers", str(workers)) as server:
            for turn in ("fresh", "reloaded"):
                server.wait(lambda: all_ready(server))
                asked = set()
                while len(asked) < workers:  # each has touched all weights
                    client = Client(server.url, sealing.trust_nothing)
                    answer = client.ask(TOKENS)
                    assert torch.equal(answer.logits, wanted)
                    asked.add(answer.worker)
                    client.close()
                found[workers, turn] = memory_of(server)
                if turn == "fresh":
                    server.reload("ok")
            assert models_mapped(server) == workers
    print(found)  # noqa: T201 - likewise
    for turn in ("fresh", "reloaded"):
        assert found[4, turn] <= 1.2 * found[1, turn]


def ask_once(client, tokens):
    """Ask as `Client.ask` does, which asks again where a connection has ended."""
    body, head, key = sealed(client.machine, tokens)
    status, answer, number = client.send("/ask", body)
    assert status == 200, answer
    return *sealing.open_answer(answer, head, key), number


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def all_ready(server):
    lines = [line for line in server.metrics() if line.startswith("fastrack_worker_generation")]
    return len({line.split()[1] for line in lines} | {"0"}) == 2 and server.ask("/ready")[0] == 200


def models_mapped(server):
    """Return how many maps of models the processes of a server have."""
    pids = [server.process.pid, *children_of(server.process.pid)]
    return sum(Path(f"/proc/{pid}/maps").read_text().count("/memfd:model") for pid in pids)


def memory_of(server):
    """Return the bytes of a server's processes, of which shared ones count once (PSS)."""
    pids = [server.process.pid, *children_of(server.process.pid)]
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(1024 * int(re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)[1]) for text in texts)
