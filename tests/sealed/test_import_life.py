"""A dataset is written over days: interrupted, resumed, appended to, while its sources change. No row is lost.

A model, which is lists of rows, says what each command must do; the dataset, opened by plain unsealing, must agree.
"""

import collections
import contextlib
import itertools
import json
import linecache
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers.cases import each

import fastrack
from fastrack import FormatError, KeyRing, import_samples, load_file, unseal
from fastrack._samples import imports
from fastrack._samples.about import About
from fastrack._samples.stored import read_data_set, shards_in
from fastrack._util import atomic

INTERRUPTIONS = int(os.environ.get("FASTRACK_INTERRUPTIONS", "400"))
KILLS = int(os.environ.get("FASTRACK_KILLS", "15"))
ADVICE = re.compile(r"(Give|Append|Import|Choose|Name|Wait|Resume|Fill|Save|Leave)\b")
TRACED = (str(Path(imports.__file__).parent), str(Path(atomic.__file__)))


def write_text(path, rows):
    path.write_text("".join(f"row {row}\n" for row in rows))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps({"id": row, "text": f"row {row}"}) + "\n" for row in rows))


def write_parquet(path, rows):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"id": pa.array(rows, pa.int64())}), path)


def write_image(path, rows):
    path.write_bytes(b"GIF8" + b"".join(b" row %d" % row for row in rows))


def write_csv(path, rows):
    path.write_text("id,text\n" + "".join(f'{row},"row {row}"\n' for row in rows))


def write_array(path, rows):
    np.save(path, np.array(rows))


@dataclass
class Kind:
    suffix: str
    write: Callable
    column: str
    are_files: bool = False  # each sample is a file


KINDS = {
    "text": Kind(".txt", write_text, "text"),
    "jsonl": Kind(".jsonl", write_jsonl, "id"),
    "csv": Kind(".csv", write_csv, "id"),
    "parquet": Kind(".parquet", write_parquet, "id"),
    "images": Kind(".png", write_image, "image", are_files=True),
    "arrays": Kind(".npy", write_array, "array", are_files=True),
}


class Uninterrupted(contextlib.nullcontext):
    was = False


class Interruption:
    """Raise KeyboardInterrupt at one of the lines that write a dataset, counted from the first."""

    def __init__(self, at):
        self.at, self.lines, self.was = at, 0, False
        # One method for all frames, kept here: Python drops its own references once the method has raised, and has
        # been seen to call what lay in the place of one then.
        self.tracing = self.trace

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.tracing)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(("with ", "try:")):  # where signals do not interrupt Python
            self.lines += 1
            if self.lines == self.at:
                self.was = True
                raise KeyboardInterrupt
        return self.tracing


@dataclass
class Run:
    """The samples of a run that are stored, whether it came to its end, and whether it left out files."""

    samples: list
    is_complete: bool
    left_out: bool


class World:
    """A source that changes, a dataset of it, and a model of the dataset: a name and a row for each sample."""

    def __init__(self, folder, key, rng, kind):
        self.folder, self.key, self.rng, self.kind = folder, key, rng, kind
        self.target = folder / "set"
        self.files = {}  # the source: rows by name
        self.runs = []  # the model of the dataset
        self.begun_with = ({}, False)  # the source of the last run, and whether it left out what was there
        self.renamed = set()
        self.rows = 0
        self.cache = {}
        self.lines = 600  # of a command, about
        self.counts = collections.Counter()
        for _ in range(rng.randint(1, 3)):
            self.files[self.new_name()] = self.new_rows()

    # The source.

    def new_rows(self):
        count = 1 if self.kind.are_files else self.rng.choice([0, 1, 2, 5, 9])
        self.rows += count
        return list(range(self.rows - count, self.rows))

    def new_name(self):
        return f"{self.rng.choice('abcdefgh')}{self.rng.randrange(10**6)}{self.kind.suffix}"

    def change(self):
        """Change the source as people do. A file is renamed or changed: with both, it is a new file."""
        names = sorted(self.files.keys() - self.renamed) or [None]
        name, other, last = self.rng.choice(names), self.rng.choice(names), names[-1]
        rows = self.files.get(name)
        change = self.rng.choice(
            ["grow", "grow last", "add", "add", "remove", "cut", "edit", "reorder", "swap", "rename"]
        )
        if change in {"rename", "swap"} and not (rows and self.is_as_known(name) and self.is_as_known(other)):
            return  # changed, and then renamed, it is a new file
        if change == "add" or not rows:
            self.files[self.new_name()] = self.new_rows()
        elif change == "remove":
            del self.files[name]
        elif change == "rename":
            new = self.new_name()
            self.files[new] = self.files.pop(name)
            self.renamed.add(new)
        elif change == "swap":
            self.files[name], self.files[other] = self.files[other], self.files[name]
            self.renamed.update((name, other))
        elif change == "edit":
            self.rows += 1
            self.files[name] = [*rows[:-1], self.rows - 1]
        elif not self.kind.are_files:
            grown = {"grow": (name, rows + self.new_rows()), "grow last": (last, self.files[last] + self.new_rows())}
            shuffled = {"reorder": (name, self.rng.sample(rows, len(rows))), "cut": (name, rows[: len(rows) // 2])}
            self.files.update([(grown | shuffled)[change]])

    def is_as_known(self, name):
        """Return whether a file is as the dataset has it, or as an interrupted run was given it, or new."""
        known = [*by_file(self.has()).values(), *([rows] for rows in self.begun_with[0].values())]
        rows = self.files[name]
        return all(groups == [rows] for groups in known if set(rows).intersection(*groups[:1]))

    def place(self, files):
        source = self.folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        for name, rows in files.items():
            self.kind.write(source / name, rows)
        return source

    # The dataset.

    def stored(self):
        """Return the names and rows of the dataset, by plain unsealing of its tensors."""
        found = []
        for path in shards_in(self.target) if self.target.exists() else []:
            status = path.stat()
            at = (path.name, status.st_ino, status.st_mtime_ns, status.st_size)
            if at not in self.cache:
                self.cache[at] = self.samples_of(path)
            found += self.cache[at]
        return found

    def samples_of(self, path):
        with load_file(path) as file:
            tensors = {name: unseal(file[name], self.key, framework="numpy") for name in file}
        columns = dict(tensors)
        for name in [name for name in tensors if name.endswith(".records")]:
            ends = tensors[name.replace(".records", ".offsets")]
            cut = [tensors[name][start:stop].tobytes() for start, stop in itertools.pairwise(ends)]
            columns[name.removesuffix(".records")] = cut
        rows = [int(row.split()[-1]) if isinstance(row, bytes) else row.item() for row in columns[self.kind.column]]
        names = [name.decode() for name in columns.get("path", ())]
        if not self.kind.are_files:
            about = json.loads(tensors["fastrack.about"].tobytes())
            names = [name for name, count in about["files"] for _ in range(count)]
        return list(zip(names, rows, strict=True))

    # The model.

    def has(self, runs=None):
        return [sample for run in (self.runs if runs is None else runs) for sample in run.samples]

    def expect(self, mode, skips, files):
        """Return the runs before, and the samples of the run of a command; None if it must be refused."""
        samples = [(name, row) for name in sorted(files) for row in files[name]]
        is_complete = not self.runs or self.runs[-1].is_complete
        if mode == "append" and not skips and files.keys() & {name for name, _ in self.has()}:
            return None
        if not samples or (mode == "new" and self.runs) or (mode == "append" and not (self.runs and is_complete)):
            return None
        before = self.runs[:-1] if mode == "resume" else self.runs
        if mode == "resume" and self.runs:
            skips = skips or self.runs[-1].left_out
            last = {name for name, _ in self.runs[-1].samples}
            if not skips and is_complete and (files.keys() - last) & {name for name, _ in self.has(before)}:
                return None
        self.leaves_out = skips
        if skips:
            there = by_file(self.has(before))
            given = {name: [] for name in files if name in there} | by_file(samples)
            gone = [groups for name, groups in there.items() if name not in given]
            for name, groups in given.items():
                if there.get(name, groups) != groups or (name not in there and groups in gone):
                    return None
            samples = [(name, row) for name, row in samples if name not in there]
        if mode == "resume" and self.runs:
            stored = self.runs[-1].samples
            if samples[: len(stored)] != stored or (not is_complete and len(samples) == len(stored)):
                return None
        return before, samples

    # Commands.

    def command(self, mode, skips, files, interruption):
        """Run a command, which may be interrupted, and hold the dataset against the model."""
        source, expected, was = self.place(files), self.expect(mode, skips, files), self.has()
        options = {"resume": mode == "resume", "append": mode == "append", "skip_existing": skips, "shard_size": 40}
        error = None
        try:
            with interruption:
                import_samples(source, self.target, self.key, **options)
        except (ValueError, OSError, KeyboardInterrupt) as raised:
            error = raised
        told = (self.kind.suffix, mode, skips, files, self.runs, error)
        stored = self.stored()
        is_complete = not stored or read_data_set(self.target, KeyRing(self.key)).is_complete
        assert stored[: len(was)] == was, told  # nothing is ever lost
        assert len({row for _, row in stored}) == len(stored), told  # or twice
        if interruption.was and error is not None:
            self.counts["interrupted"] += 1
            if stored == was:
                assert is_complete == (not self.runs or self.runs[-1].is_complete), told
                return
            assert expected is not None, told
            before, samples = expected
            self.runs = [*before, Run(stored[len(self.has(before)) :], is_complete, self.leaves_out)]
            assert self.runs[-1].samples == samples[: len(self.runs[-1].samples)], told
            assert is_complete == (len(self.runs[-1].samples) == len(samples)), told
            self.begun_with = (files, skips)
        elif error is not None:
            self.counts["refused"] += 1
            assert expected is None, told
            assert stored == was, told
            assert ADVICE.search(str(error)), told
        else:
            self.counts["done"] += 1
            assert expected is not None, told
            before, samples = expected
            if samples and (stored != was or not self.runs[-1].is_complete):  # else no shard was written
                self.runs = [*before, Run(samples, True, self.leaves_out)]
            assert is_complete, told
            assert stored == self.has(), told
            assert {row for rows in files.values() for row in rows} <= {row for _, row in stored}, told

    def step(self, interruption):
        """Change the source, and give a command, which may be the wrong one."""
        for _ in range(self.rng.choice([0, 0, 1, 1, 2])):
            self.change()
        mode = self.rng.choice(["new", "append", "append", "resume", "resume"] if self.runs else ["new", "resume"])
        skips = mode != "new" and bool(self.runs) and self.rng.random() < 0.6
        files = dict(self.files)
        if mode != "new" and not skips:  # what is given without --skip-existing is asked for
            rows = {row for _, row in self.has()}
            own = {name for name, _ in self.runs[-1].samples} if mode == "resume" and self.runs else set()
            files = {name: given for name, given in files.items() if name in own or rows.isdisjoint(given)}
        if files:
            self.command(mode, skips, files, interruption)

    def mend(self):
        """Give the last run the source that it had, as the errors advise: it ends."""
        if self.runs and not self.runs[-1].is_complete:
            files, skips = self.begun_with
            self.command("resume", skips, files, Uninterrupted())
            assert self.runs[-1].is_complete


def by_file(samples):
    """Return the rows of each file, divided where those of another file come between."""
    found = {}
    for name, same in itertools.groupby(samples, lambda sample: sample[0]):
        found.setdefault(name, []).append([row for _, row in same])
    return found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_row_is_lost_or_twice_however_often_an_import_is_interrupted(tmp_path, key):
    counts, seed = collections.Counter(), 0
    while counts["interrupted"] < INTERRUPTIONS:
        rng = random.Random(seed)
        world = World(tmp_path / str(seed), key, rng, KINDS[list(KINDS)[seed % len(KINDS)]])
        world.folder.mkdir()
        for _ in range(12):
            is_interrupted = rng.random() < 0.7
            world.step(Interruption(rng.randrange(1, 900)) if is_interrupted else Uninterrupted())
            if rng.random() < 0.3:
                world.mend()
        world.mend()
        counts += world.counts
        shutil.rmtree(world.folder)
        seed += 1
    assert min(counts["done"], counts["refused"]) > INTERRUPTIONS / 10


def import_by(folder, key, **options):
    import_samples(folder / "source", folder / "set", key, shard_size=40, **options)


def start(*arguments, **options):
    """Start an import in a process of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads about
        process = multiprocessing.get_context("fork").Process(target=import_by, args=arguments, kwargs=options)
        process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("least", [4, pytest.param(KILLS, marks=pytest.mark.nightly)])
def test_no_row_is_lost_or_twice_however_often_a_process_is_killed(tmp_path, key, least):
    rng, kills, runs = random.Random(0), 0, 0
    world = World(tmp_path, key, rng, KINDS["jsonl"])
    world.files.clear()  # the names of those that are added are in the order in which they are added
    while kills < least:
        for _ in range(3):
            many = list(range(-20 * runs, -20 * runs - 20, -1))
            world.files[f"{len(world.files):06}.jsonl"] = world.new_rows() + many
            runs += 1
        world.place(world.files)
        options = {"append": True, "skip_existing": True} if world.target.exists() else {}
        for attempt in itertools.count():
            process = start(tmp_path, key, **options)
            time.sleep(rng.uniform(0.01, 0.08) * (1 + attempt / 4))  # on a busy machine nothing is stored by then
            process.kill()
            process.join()
            has = world.stored()
            kills += process.exitcode == -signal.SIGKILL
            assert has == [(name, row) for name in sorted(world.files) for row in world.files[name]][: len(has)]
            assert len(list(world.target.glob("*"))) == len(shards_in(world.target)) if has else True
            if not has:
                continue
            if read_data_set(world.target, KeyRing(key)).is_complete:
                if len(has) == sum(map(len, world.files.values())):
                    break
                options = {"append": True, "skip_existing": True}
            else:
                with pytest.raises(FileExistsError, match="interrupted"):
                    import_by(tmp_path, key, append=True)
                options = {"resume": True}


def test_of_two_imports_at_once_one_is_refused_and_none_is_mixed_in(tmp_path, key, monkeypatch):
    (tmp_path / "a.txt").write_text("a\n" * 30)
    sync = os.fsync
    for number, appends in enumerate([False, True, True], 1):
        (tmp_path / f"b{number}.txt").write_text("b\n" * 30)

        def import_another(descriptor, appends=appends, number=number):
            monkeypatch.setattr(os, "fsync", sync)
            import_samples(tmp_path / f"b{number}.txt", tmp_path / "set", key, append=appends, shard_size=90)
            return sync(descriptor)

        monkeypatch.setattr(os, "fsync", import_another)  # before the first shard gets its name
        with pytest.raises(FileExistsError, match="another program writes"):
            import_samples(tmp_path / "a.txt", tmp_path / "set", key, append=appends, shard_size=90)
        data = fastrack.SealedDataset(tmp_path / "set", keys=key, transform=lambda sample: bytes(sample["text"]))
        assert list(data) == [b"b"] * 30 * number
        assert read_data_set(tmp_path / "set", KeyRing(key)).is_complete


@pytest.mark.slow
def test_of_two_processes_that_import_at_once_one_ends_and_rows_are_not_mixed(tmp_path, key):
    for number in range(5):
        folder = tmp_path / str(number)
        (folder / "source").mkdir(parents=True)
        (folder / "source" / "a.txt").write_text("".join(f"row {row}\n" for row in range(300)))
        processes = [start(folder, key) for _ in range(3)]
        for process in processes:
            process.join()
        found = read_data_set(folder / "set", KeyRing(key))
        world = World(folder, key, random.Random(0), KINDS["text"])
        assert [row for _, row in world.stored()] == list(range(found.samples))
        if not found.is_complete:
            import_by(folder, key, resume=True)
        assert [row for _, row in world.stored()] == list(range(300))
        assert sum(process.exitcode == 0 for process in processes) <= 1


def test_a_class_keeps_its_label_when_images_are_appended(tmp_path, key):
    def folder_of(name, *classes):
        for label in classes:
            (tmp_path / name / label).mkdir(parents=True)
            write_image(tmp_path / name / label / f"{name}.png", [1])
        return tmp_path / name

    import_samples(folder_of("first", "cats", "dogs"), tmp_path / "set", key)
    import_samples(folder_of("second", "cats", "dogs", "eels"), tmp_path / "set", key, append=True)
    for number, classes in enumerate((["dogs"], ["cats", "dogs", "frogs"])):
        with pytest.raises(ValueError, match=r"append=: expected the class .* with all classes, and skip_existing="):
            import_samples(folder_of(str(number), *classes), tmp_path / "set", key, append=True)
    source = folder_of("second", "ants", "bees")
    for skips in (True, False):
        name = "skip_existing" if skips else "append"
        with pytest.raises(ValueError, match=rf"{name}=: .* sort after 'eels', .* got 'ants'. Rename its folder, or"):
            import_samples(source, tmp_path / "set", key, append=True, skip_existing=skips)
    data = fastrack.SealedDataset(tmp_path / "set", keys=key, transform=lambda sample: int(sample["label"]))
    assert list(data) == [0, 1, 0, 1, 2]


@pytest.mark.filterwarnings("ignore:.* do not say their order:UserWarning")
def test_a_data_set_of_version_0_1_is_resumed_and_appended_to(tmp_path, key):
    source, more = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_jsonl(source, range(4))
    write_jsonl(more, range(4, 6))
    text = np.frombuffer(b"row 0row 1row 2", np.uint8)
    old = {"id": np.arange(3), "text.records": text, "text.offsets": np.arange(0, 16, 5)}
    for mode in ("resume", "append"):
        folder = tmp_path / mode
        folder.mkdir()
        fastrack.save_file(old, folder / "shard-000000.safetensors", key)
        with pytest.raises(FileExistsError, match="resume="):
            import_samples(source, folder, key)
        with pytest.raises(ValueError, match="skip_existing="):
            import_samples(source, folder, key, append=True, skip_existing=True)
        with pytest.raises(ValueError, match="resume="):
            import_samples(more, folder, key, resume=True)
        if mode == "resume":
            assert import_samples(source, folder, key, resume=True) == 4
            assert read_data_set(folder, KeyRing(key)).run == 0
        count = import_samples(more, folder, key, append=True)
        data = fastrack.SealedDataset(folder, keys=key, transform=lambda sample: int(sample["id"]))
        assert list(data) == [*range(count - 2), 4, 5]
        found = read_data_set(folder, KeyRing(key))
        assert (found.columns["text"].type, found.run, found.is_complete) == ("text", count - 2, True)


@each("kind", [*KINDS])
def test_a_file_is_not_appended_twice(tmp_path, key, kind):
    name = f"a{KINDS[kind].suffix}"
    for folder, row in ("first", 1), ("second", 2):
        (tmp_path / folder).mkdir()
        KINDS[kind].write(tmp_path / folder / name, [row])
    import_samples(tmp_path / "first", tmp_path / "set", key)
    for folder in ("first", "second"):
        with pytest.raises(ValueError, match=rf"append=: expected new files, got '{name}', .* skip_existing="):
            import_samples(tmp_path / folder, tmp_path / "set", key, append=True)
    assert read_data_set(tmp_path / "set", KeyRing(key)).samples == 1
    assert import_samples(tmp_path / "first", tmp_path / "set", key, append=True, skip_existing=True) == 1


@each("kind", [*KINDS])
def test_of_a_file_that_older_sets_have_twice_the_error_says_so(tmp_path, key, kind, monkeypatch):
    name = f"a{KINDS[kind].suffix}"
    (tmp_path / "source").mkdir()
    KINDS[kind].write(tmp_path / "source" / name, [1])
    import_samples(tmp_path / "source", tmp_path / "set", key)
    monkeypatch.setattr(imports.Import, "_require_new_files", lambda *_: None)
    import_samples(tmp_path / "source", tmp_path / "set", key, append=True)
    with pytest.raises(ValueError, match=rf"expected '{name}' once .* got it 2 times"):
        import_samples(tmp_path / "source", tmp_path / "set", key, append=True, skip_existing=True)


@each("suffix", [".csv", ".jsonl"])
def test_appended_values_get_the_types_that_the_data_set_has_if_they_can(tmp_path, key, suffix):
    def source(number, *rows):
        path = tmp_path / f"{number}{suffix}"
        csv = "".join(f"{size},{name}\n" for size, name in rows)
        lines = "".join(json.dumps({"size": size, "name": name}) + "\n" for size, name in rows)
        path.write_text(f"size,name\n{csv}" if suffix == ".csv" else lines)
        return path

    numbers = (7, 8) if suffix == ".csv" else ("7", "8")
    import_samples(source(1, (1.5, "seven")), tmp_path / "set", key)
    import_samples(source(2, *((2, number) for number in numbers)), tmp_path / "set", key, append=True)
    data = fastrack.SealedDataset(
        tmp_path / "set", keys=key, transform=lambda sample: (float(sample["size"]), sample["name"])
    )
    assert list(data) == [(1.5, b"seven"), (2.0, b"7"), (2.0, b"8")]
    for row in [("many", "seven"), (2**53 + 1, "seven")]:
        with pytest.raises(FormatError, match="size"):
            import_samples(source(3, row), tmp_path / "set", key, append=True)


def test_a_shard_of_a_later_version_asks_for_an_update_and_not_for_another_copy(tmp_path):
    content = json.dumps({"version": 2, "anything": []}).encode()
    with pytest.raises(FormatError, match="Update fastrack"):
        About.decode(content, tmp_path)
    with pytest.raises(FormatError, match="Get it again"):
        About.decode(content.replace(b"2", b"1"), tmp_path)
