"""A wrapped loader gives the same batches, on the device, and else is like the loader it wraps."""

import copy
import pickle
import subprocess
import sys
import threading
import types
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import own_channels
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.loading import Numbers, Resumable, Stream, threads_left, wait_until
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, TensorDataset

import fastrack
import fastrack._training.loader
import fastrack._training.prefetch
import fastrack._transfer.api
from fastrack import Key, UnknownKeyError, wrap


@pytest.fixture(params=[0, 1, 2, 5])
def prefetch(request):
    return request.param


@pytest.fixture(autouse=True)
def _leave_no_thread():
    yield
    assert not threads_left()


def rows(loader):
    return [batch.tolist() for batch in loader]


def test_batches_are_opened_with_the_keys_that_the_data_set_was_made_with(tmp_path, monkeypatch):
    monkeypatch.delenv("FASTRACK_KEY_FILE", raising=False)
    key, other = Key.generate(), Key.generate()
    fastrack.save_file({"x": np.arange(6)}, tmp_path / "x.safetensors", key)
    data = fastrack.SealedDataset(tmp_path / "x.safetensors", keys=key)
    for given in (data, torch.utils.data.Subset(data, range(6)), data.windows("x", 1)):
        loader = DataLoader(given, batch_size=3, collate_fn=fastrack.collate)
        with fastrack.use_keys(other):
            assert [batch["x"].flatten().tolist() for batch in wrap(loader)] == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(UnknownKeyError):
            next(iter(wrap(loader, keys=other)))
    loader = DataLoader(pickle.loads(pickle.dumps(data)), collate_fn=fastrack.collate)
    with pytest.raises(UnknownKeyError):
        next(iter(wrap(loader)))


class TestBatches:
    def test_come_in_order_and_as_they_were(self, prefetch):
        loader = DataLoader(Numbers(10), batch_size=3)
        assert rows(wrap(loader, prefetch=prefetch)) == rows(loader)

    def test_come_again_in_each_epoch(self, prefetch):
        wrapped = wrap(DataLoader(Numbers(5)), prefetch=prefetch)
        assert rows(wrapped) == rows(wrapped) == rows(DataLoader(Numbers(5)))

    def test_are_shuffled_as_the_loader_shuffles(self, prefetch):
        def epochs(loader):
            torch.manual_seed(1)
            iterators = [iter(loader), iter(loader)]
            noise = torch.rand(3).tolist()
            return [rows(iterator) for iterator in iterators], noise

        loader = DataLoader(Numbers(50), batch_size=5, shuffle=True, generator=torch.Generator())
        loader.generator.manual_seed(0)
        expected = rows(loader)
        loader.generator.manual_seed(0)
        assert rows(wrap(loader, prefetch=prefetch)) == expected

        fixed = DataLoader(Numbers(50), num_workers=0)
        assert epochs(wrap(fixed, prefetch=prefetch)) == epochs(fixed)  # seeds are drawn when an iteration begins

    def test_keep_their_nest(self, key, prefetch):
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        batch = {
            "list": [torch.ones(2), np.zeros(3), "text", None],
            "pair": (fastrack.seal(x, key), fastrack.seal(x, key)[[1, 0]]),
        }
        (moved,) = wrap([batch], keys=key, prefetch=prefetch)
        assert torch.equal(moved["list"][0], torch.ones(2))
        assert moved["list"][0] is not batch["list"][0]
        assert isinstance(moved["list"][1], np.ndarray)
        assert moved["list"][2:] == ["text", None]
        assert torch.equal(moved["pair"][0], torch.from_numpy(x))
        assert torch.equal(moved["pair"][1], torch.from_numpy(x[[1, 0]]))
        assert isinstance(batch["pair"][0], fastrack.SealedTensor)

    def test_need_not_be_nests_of_tensors(self, prefetch):
        assert list(wrap([1, "two", None], prefetch=prefetch)) == [1, "two", None]

    def test_are_the_callers_to_keep(self, key, prefetch):
        sealed = [fastrack.seal(np.full(100, i), key) for i in range(20)]
        kept = list(wrap(sealed, keys=key, prefetch=prefetch))
        assert [batch.unique().tolist() for batch in kept] == [[i] for i in range(20)]

    def test_may_come_from_a_generator(self, prefetch):
        wrapped = wrap((torch.tensor(i) for i in range(4)), prefetch=prefetch)
        assert wrapped
        assert rows(wrapped) == [0, 1, 2, 3]
        assert rows(wrapped) == []

    def test_may_come_from_what_has_only_items(self, prefetch):
        class Items:
            def __getitem__(self, i):
                return [torch.tensor(0), torch.tensor(1)][i]

        assert rows(wrap(Items(), prefetch=prefetch)) == [0, 1]

    def test_may_be_none_at_all(self, prefetch):
        assert list(wrap([], prefetch=prefetch)) == []

    def test_come_twice_at_once(self, prefetch):
        wrapped = wrap(DataLoader(Numbers(9), batch_size=2), prefetch=prefetch)
        assert all(torch.equal(one, other) for one, other in zip(wrapped, wrapped, strict=True))

    def test_of_a_stream_come_without_a_length(self, prefetch):
        wrapped = wrap(DataLoader(Stream(7), batch_size=2), prefetch=prefetch)
        assert rows(wrapped) == [[0, 1], [2, 3], [4, 5], [6]]
        with pytest.raises(TypeError, match="len"):
            len(wrapped)

    def test_are_as_many_ahead_as_was_asked_for(self):
        fetched, moved = [], []

        def batches():
            for i in range(20):
                fetched.append(i)
                yield i

        for prefetch in (1, 3):
            fetched.clear()
            iterator = iter(wrap(batches(), prefetch=prefetch))
            for moved in range(1, 6):
                assert next(iterator) == moved - 1
                wait_until(lambda moved=moved, prefetch=prefetch: len(fetched) >= moved + prefetch)
                assert not [0 for _ in range(20) if len(fetched) > moved + prefetch]
            iterator.close()

    def test_that_were_used_are_not_kept(self, prefetch):
        class Batch:
            alive = 0

            def __init__(self):
                Batch.alive += 1

            def __del__(self):
                Batch.alive -= 1

        most = 0
        for _ in wrap((Batch() for _ in range(50)), prefetch=prefetch):
            most = max(most, Batch.alive)
        assert most <= prefetch + 2  # one is the consumer's
        del _
        wait_until(lambda: Batch.alive == 0)

    def test_without_a_thread_are_fetched_when_asked_for(self):
        seen = []
        iterator = iter(wrap((seen.append(threading.current_thread().name) or i for i in range(3)), prefetch=0))
        assert seen == []
        assert next(iterator) == 0
        assert seen == ["MainThread"]


class TestKeys:
    def test_are_found_in_the_environment_and_read_once(self, key, tmp_path, monkeypatch, prefetch):
        wrapped = wrap(
            [torch.tensor([7]), fastrack.seal(np.arange(3), key), fastrack.seal(np.arange(2), key)], prefetch=prefetch
        )
        key.save(tmp_path / "key")
        monkeypatch.setenv("FASTRACK_KEY_FILE", str(tmp_path / "key"))
        loads = []
        load = Key.load
        monkeypatch.setattr(Key, "load", lambda path: loads.append(path) or load(path))
        for _ in range(2):
            assert rows(wrapped) == [[7], [0, 1, 2], [0, 1]]
        assert len(loads) == 1

    def test_may_be_a_path_or_come_from_a_generator(self, key, tmp_path):
        key.save(tmp_path / "key")
        sealed = [fastrack.seal(np.arange(3), key)]
        for keys in (tmp_path / "key", (k for k in [key]), [Key.generate(), key]):
            wrapped = wrap(sealed, keys=keys)
            assert rows(wrapped) == rows(wrapped) == [[0, 1, 2]]

    def test_are_missed_by_the_first_sealed_tensor(self, key, prefetch):
        iterator = iter(wrap([torch.ones(1), fastrack.seal(np.arange(3), key)], prefetch=prefetch))
        next(iterator)
        with pytest.raises(UnknownKeyError, match="FASTRACK_KEY_FILE"):
            next(iterator)

    def test_that_are_none_are_refused_early(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            wrap([], keys=tmp_path / "no key")

    def test_are_not_given_to_the_loader(self, key):
        loader = DataLoader(Numbers(3))
        before = dict(vars(loader))
        list(wrap(loader, keys=key))
        assert vars(loader) == before


class TestWrapping:
    def test_with_half_a_batch_ahead_is_refused(self):
        with pytest.raises(TypeError):
            wrap([], prefetch=1.5)

    def test_opens_no_device(self, monkeypatch):
        channels = own_channels.share(monkeypatch)
        wrapped = wrap([1], "cuda:7", prefetch=0)
        assert not channels.channels
        assert repr(wrapped) == "<WrappedLoader to cuda:7 of a list>"
        assert repr(wrap(torch.ones(1))) == "<WrappedLoader to cpu of a Tensor>"

    @pytest.mark.slow
    def test_needs_no_torch(self):
        code = "import sys; from fastrack._training.loader import wrap; assert list(wrap([1, 2])) == [1, 2]"
        subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)

    def test_starts_no_process_that_could_inherit_a_thread(self):
        before = threading.active_count()
        wrap(DataLoader(Numbers(3)))
        assert threading.active_count() == before


class TestAttributes:
    def test_are_those_of_the_loader(self):
        loader = DataLoader(Numbers(10), batch_size=4)
        wrapped = wrap(loader)
        assert len(wrapped) == 3
        assert wrapped.batch_size == 4
        assert wrapped.dataset is loader.dataset
        assert wrapped.sampler is loader.sampler
        assert wrapped.batch_sampler is loader.batch_sampler
        assert {"batch_size", "dataset"} <= set(dir(wrapped))

    def test_are_set_on_the_loader(self):
        loader = DataLoader(Numbers(10))
        wrapped = wrap(loader)
        wrapped.timeout, wrapped.note = 3, "new"
        assert (loader.timeout, loader.note) == (3, "new")
        with pytest.raises(ValueError, match="batch_size"):
            wrapped.batch_size = 3

    def test_that_are_missing_are_missed_by_the_loader(self):
        for name in ("nonsense", "set_epoch"):
            with pytest.raises(AttributeError, match=f"'DataLoader' .* '{name}'"):
                getattr(wrap(DataLoader(Numbers(1))), name)
        with pytest.raises(AttributeError, match="__array__"):
            _ = wrap(DataLoader(Numbers(1))).__array__

    def test_are_not_looked_for_before_there_is_a_loader(self):
        empty = object.__new__(fastrack._training.loader.WrappedLoader)
        assert not hasattr(empty, "_inner")

    def test_of_a_list_tell_whether_it_is_empty(self):
        assert wrap([1])
        assert not wrap([])

    def test_for_resuming_are_there_only_if_the_loader_has_them(self):
        plain = wrap(DataLoader(Numbers(1)))
        assert not hasattr(plain, "state_dict")
        assert not hasattr(plain, "load_state_dict")
        assert "state_dict" not in dir(plain)
        assert callable(wrap(Resumable(1)).state_dict)


class TestEpochs:
    class Listener:
        def __init__(self, *batches):
            self.told = []
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

        def set_epoch(self, epoch):
            self.told.append(epoch)

    def test_are_told_to_everyone_once(self):
        parts = loader, sampler, batches, inner, data_set = [self.Listener() for _ in range(5)]
        loader.sampler, loader.batch_sampler, batches.sampler, loader.dataset = sampler, batches, inner, data_set
        wrap(loader).set_epoch(3)
        assert [part.told for part in parts] == [[3]] * 5

    def test_are_told_once_to_who_has_two_places(self):
        loader = self.Listener()
        loader.sampler = loader.batch_sampler = sampler = self.Listener()
        sampler.sampler = sampler
        loader.dataset = object()
        wrap(loader).set_epoch(1)
        assert (loader.told, sampler.told) == ([1], [1])

    def test_change_the_order_of_a_distributed_sampler(self):
        def order(loader, epoch):
            loader.set_epoch(epoch)
            return [x for batch in loader for x in batch[0].tolist()]

        data = TensorDataset(torch.arange(40))
        sampler = DistributedSampler(data, num_replicas=2, rank=0, seed=3)
        for loader in (
            DataLoader(data, sampler=sampler, batch_size=3),
            DataLoader(data, batch_sampler=BatchSampler(sampler, 3, drop_last=False)),
        ):
            wrapped = wrap(loader)
            first, second = order(wrapped, 0), order(wrapped, 1)
            assert first != second
            assert order(wrapped, 0) == first
            sampler.set_epoch(1)
            assert second == list(sampler)

    def test_are_not_told_to_who_does_not_listen(self):
        assert not hasattr(wrap(DataLoader(Numbers(3), sampler=SequentialSampler(range(3)))), "set_epoch")
        assert not hasattr(wrap([1]), "set_epoch")


class TestResuming:
    @each("count", range(7))
    def test_gives_exactly_the_batches_that_were_not_returned(self, prefetch, count):
        whole = rows(Resumable(6))
        wrapped = wrap(Resumable(6), prefetch=prefetch)
        iterator = iter(wrapped)
        first = [next(iterator).tolist() for _ in range(count)]
        state = wrapped.state_dict()
        assert state == {"next": count, "epoch": 0}
        iterator.close()
        for again in (wrapped, wrap(Resumable(6), prefetch=prefetch)):
            again.load_state_dict(state)
            assert first + rows(again) == whole

    def test_after_a_break_gives_the_rest(self, prefetch):
        wrapped = wrap(Resumable(6), prefetch=prefetch)
        for batch in wrapped:
            if batch[1] == 2:
                break
        assert wrapped.state_dict()["next"] == 3
        wrapped.load_state_dict(wrapped.state_dict())
        assert [number for _, number in rows(wrapped)] == [3, 4, 5]

    def test_after_an_epoch_gives_the_next(self, prefetch):
        wrapped = wrap(Resumable(3), prefetch=prefetch)
        list(wrapped)
        assert wrapped.state_dict() == {"next": 0, "epoch": 1}
        assert rows(wrapped) == [[1, 0], [1, 1], [1, 2]]

    def test_before_any_iteration_asks_the_loader(self, prefetch):
        wrapped = wrap(Resumable(3), prefetch=prefetch)
        assert wrapped.state_dict() == {"next": 0, "epoch": 0}
        wrapped.load_state_dict({"next": 2, "epoch": 5})
        assert wrapped.state_dict() == {"next": 2, "epoch": 5}
        assert rows(wrapped) == [[5, 2]]

    def test_ends_the_iteration_under_way(self, prefetch):
        wrapped = wrap(Resumable(9), prefetch=prefetch)
        iterator = iter(wrapped)
        next(iterator)
        wrapped.load_state_dict({"next": 7, "epoch": 0})
        assert list(iterator) == []
        assert rows(wrapped) == [[0, 7], [0, 8]]

    def test_uses_the_loader_on_one_thread(self):
        loader = Resumable(5)
        iterator = iter(wrap(loader))
        loader.users.clear()  # the caller began the iteration
        list(iterator)
        assert loader.users == {"fastrack-loader"}

    def test_keeps_the_state_of_before_a_batch_that_failed(self, key, prefetch):
        class Failing(Resumable):
            def _numbers(self):
                for number in super()._numbers():
                    yield fastrack.seal(number.numpy(), Key.generate()) if number[1] == 3 else number

        wrapped = wrap(Failing(6), keys=key, prefetch=prefetch)
        with pytest.raises(UnknownKeyError):
            list(wrapped)
        assert wrapped.state_dict()["next"] == 3


class TestPickling:
    @each("copier", [pickle.dumps, copy.copy, copy.deepcopy])
    def test_is_refused(self, key, copier, prefetch):
        wrapped = wrap(DataLoader(Numbers(3)), keys=key, prefetch=prefetch)
        with pytest.raises(TypeError, match="wrapped loader"):
            copier(wrapped)
        with pytest.raises(TypeError, match="iterator"):
            copier(iter(wrapped))


class TestForks:
    def test_a_wrapper_works_in_a_child(self, key, prefetch):
        wrapped = wrap([fastrack.seal(np.arange(3), key)] * 4, keys=key, prefetch=prefetch)
        assert in_forked_child(lambda: rows(wrapped)) == [[0, 1, 2]] * 4

    def test_one_that_is_in_use_works_in_a_child(self, prefetch):
        wrapped = wrap(DataLoader(Numbers(6)), prefetch=prefetch)
        iterator = iter(wrapped)
        first = next(iterator).tolist()
        assert in_forked_child(lambda: rows(wrapped)) == [first, *rows(iterator)]

    def test_one_that_is_made_in_a_child_works_there(self, prefetch):
        made = in_forked_child(lambda: rows(wrap(DataLoader(Numbers(3)), prefetch=prefetch)))
        assert made == [[[0, 0]], [[1, 0]], [[2, 0]]]

    def test_one_whose_loader_is_just_fetching_works_in_a_child(self):
        inside, may_go = threading.Event(), threading.Event()

        class Slow:
            def __iter__(self):
                if threading.current_thread() is thread_of_parent:
                    inside.set()
                    assert may_go.wait(30)
                return iter([1, 2])

        wrapped = wrap(Slow(), prefetch=0)
        thread_of_parent = threading.Thread(target=lambda: list(wrapped))
        thread_of_parent.start()
        assert inside.wait(30)
        assert in_forked_child(lambda: list(wrapped)) == [1, 2]
        may_go.set()
        thread_of_parent.join()

    def test_an_iteration_goes_on_in_a_child_whatever_the_parents_threads_fetch(self):
        wrapped = wrap([1, 2, 3], prefetch=0)
        iterator = iter(wrapped)
        assert next(iterator) == 1
        with wrapped._lock.own:  # as a thread that the child lacks
            assert in_forked_child(lambda: list(iterator), seconds=20) == [2, 3]

    def test_an_iteration_stays_with_its_parent(self):
        iterator = iter(wrap(range(10)))
        next(iterator)

        def go_on():
            try:
                next(iterator)
            except fastrack.ClosedError as error:
                return str(error), list(iterator)

        message, rest = in_forked_child(go_on)
        assert "belongs to the parent process" in message
        assert rest == []
        assert list(iterator) == list(range(1, 10))


class TestStreams:
    """The stream of torch that a GPU's batches are moved on."""

    @pytest.fixture
    def torch_with_streams(self, monkeypatch):
        """A torch of streams that are words, and what was moved on which."""
        here = threading.local()

        @contextmanager
        def stream(one):
            before, here.stream = getattr(here, "stream", None), one
            yield
            here.stream = before

        class Tensor:
            is_cuda, device, recorded = True, "cuda:1", None

            def record_stream(self, one):
                self.recorded = one

        cuda = types.SimpleNamespace(
            is_available=lambda: True,
            current_stream=lambda device: (device, getattr(here, "stream", None)),
            stream=stream,
            Stream=lambda index: f"side of {index}",
        )
        torch = types.ModuleType("torch")
        torch.cuda, torch.Tensor = cuda, Tensor
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "cupy", None)
        seen = []

        def to_device(batch, *_, **__):
            seen.append(getattr(here, "stream", None))
            return {"x": Tensor(), "n": batch}

        monkeypatch.setattr(fastrack._training.prefetch, "to_device", to_device)
        return cuda, seen

    def test_is_one_of_their_own_and_they_are_handed_over_to_the_consumers(self, torch_with_streams):
        cuda, seen = torch_with_streams
        wrapped = wrap([1, 2], "cuda:1")
        with cuda.stream("training"):
            batches = list(wrapped)
        assert seen == ["side of 1"] * 2
        assert [batch["n"] for batch in batches] == [1, 2]
        assert [batch["x"].recorded for batch in batches] == [("cuda:1", "training")] * 2

    def test_is_the_consumers_without_prefetch(self, torch_with_streams):
        cuda, seen = torch_with_streams
        with cuda.stream("training"):
            (batch,) = wrap([1], "cuda:1", prefetch=0)
        assert seen == ["training"]
        assert batch["x"].recorded is None

    def test_is_left_alone_without_a_gpu(self, torch_with_streams):
        cuda, seen = torch_with_streams
        for device, is_available in (("cuda", lambda: False), ("cpu", None)):
            cuda.is_available = is_available
            assert [batch["n"] for batch in wrap([1], device)] == [1]
        assert seen == [None, None]


def test_a_loader_whose_state_cannot_be_read_is_iterated_all_the_same():
    class Loader:
        def __iter__(self):
            return iter([np.arange(3), np.arange(4)])

        def state_dict(self):
            raise AttributeError("there is no 'dl_state_dict'")

    wrapped = fastrack.wrap(Loader())
    assert [batch.tolist() for batch in wrapped] == [[0, 1, 2], [0, 1, 2, 3]]
    with pytest.raises(AttributeError, match="dl_state_dict"):
        wrapped.state_dict()


class TestSeveralProcesses:
    @pytest.fixture(autouse=True)
    def _two(self, monkeypatch):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)

    @each(
        "options",
        [
            {},
            {"shuffle": True},
            {"batch_sampler": BatchSampler(SequentialSampler(range(8)), 2, False)},
            {"batch_size": None},
        ],
    )
    def test_do_not_get_all_samples_each(self, options):
        with pytest.raises(ValueError, match=r"2 processes .*Sampler"):
            wrap(DataLoader(range(8), **options))

    def test_that_meet_after_the_loader_was_wrapped_do_not_either(self, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: False)
            wrapped = wrap(DataLoader(range(8)))
            assert len(list(wrapped)) == 8
        with pytest.raises(ValueError, match="its share"):
            iter(wrapped)

    @pytest.mark.parametrize("batched", [False, True])
    def test_share_what_a_distributed_sampler_shares_out(self, batched):
        data = TensorDataset(torch.arange(8))
        sampler = DistributedSampler(data, shuffle=False)
        batches = {"batch_sampler": BatchSampler(sampler, 2, False)}
        loader = DataLoader(data, **(batches if batched else {"sampler": sampler, "batch_size": 2}))
        assert [batch[0].tolist() for batch in wrap(loader)] == [[0, 2], [4, 6]]

    def test_may_use_any_other_iterable(self):
        class Own(torch.utils.data.Sampler):
            def __iter__(self):
                return iter([1])

        for loader in ([torch.ones(1)], DataLoader(Stream(3), batch_size=None), DataLoader(range(8), sampler=Own())):
            assert list(wrap(loader))

    def test_may_use_a_loader_that_accelerate_prepared(self):
        from accelerate.data_loader import BatchSamplerShard, DataLoaderShard

        batches = BatchSampler(SequentialSampler(range(8)), 2, False)
        loader = DataLoaderShard(range(8), batch_sampler=BatchSamplerShard(batches, 2, 0))
        assert [batch.tolist() for batch in wrap(loader)] == [[0, 1], [4, 5]]


def test_what_would_pass_untouched_and_was_hardly_meant_to_is_refused():
    for given, told in (
        (Path("x"), "load_file"),
        ("x.safetensors", "load_file"),
        (torch.nn.Linear(2, 2), "Linear.*load_model"),
    ):
        with pytest.raises(TypeError, match=told):
            fastrack.to_device(given)
        assert fastrack.to_device([given]) == [given]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_transformed_on_the_device_in_the_thread_that_asks(prefetch, key):
    sealed = fastrack.seal(np.arange(12), key)
    threads = set()

    def double(batch):
        threads.add(threading.current_thread())
        return {"doubled": batch["x"] * 2}

    batches = [{"x": sealed[row : row + 3]} for row in range(0, 12, 3)]
    loader = wrap(batches, keys=key, prefetch=prefetch, transform=double)
    assert torch.cat([batch["doubled"] for batch in loader]).tolist() == list(range(0, 24, 2))
    assert threads == {threading.current_thread()}
    assert len(loader) == 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_a_transform_is_raised_in_place_of_its_batch(prefetch, key):
    sealed = fastrack.seal(np.arange(12), key)
    batches = wrap(
        [sealed[row] for row in range(12)], keys=key, prefetch=prefetch, transform=lambda x: 6 // (x - 2).item()
    )
    iterator = iter(batches)
    assert [next(iterator), next(iterator)] == [-3, -6]
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
