"""``fastrack import``: samples of other formats, as a user imports them."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from shlex import quote

import numpy as np
import pytest
from helpers.cases import each

import fastrack
from fastrack import SealedDataset, import_samples


@pytest.fixture
def lines(folder):
    (folder / "lines.txt").write_text("".join(f"line {index}\n" for index in range(3000)))
    return "lines.txt"


def texts(folder, key, column="text"):
    return list(SealedDataset(folder, keys=key, transform=lambda sample: sample[column].decode()))


@pytest.mark.slow
def test_lines_are_imported_and_read(cli, key, lines):
    said = cli(f"import {lines} out {key}").stdout
    assert said.startswith("out: 3000 samples sealed")
    assert texts("out", "owner.key") == [f"line {index}" for index in range(3000)]
    assert cli(f"verify out/shard-000000.safetensors {key}")


def test_the_report_is_a_document(cli, key, lines):
    (cli.folder / "more.txt").write_text("one more")
    report = cli.json(f"import {lines} more.txt out {key}")
    assert (report["sources"], report["folder"], report["samples"]) == ([lines, "more.txt"], "out", 3001)
    assert report["key_id"]


@each(("name", "content"), [("a.bin", b"x"), ("a.jsonl", b"{"), ("a.tar", b"x" * 600), ("a\x1b[1m.txt.gz", b"")])
def test_what_cannot_be_imported_is_one_line(cli, key, name, content):
    (cli.folder / name).write_bytes(content)
    error = cli.error(f"import '{name}' out {key}")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "\x1b" not in error


def test_one_path_is_bad_usage(cli, key, lines):
    cli(f"import {lines} {key}", status=2)
    assert "No such file" in cli.error(f"import none.txt out {key}")


@pytest.mark.slow
def test_an_interrupted_import_keeps_its_shards(cli, key, folder):
    (folder / "big.txt").write_bytes((b"x" * 1000 + b"\n") * 60_000)
    command = [sys.executable, "-m", "fastrack", "import", "big.txt", "out", *key.split(), "--shard-size", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while not list(folder.glob("out/shard-00000[3-9]*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 130
    assert "--resume" in error
    assert cli.json(f"import big.txt out {key} --resume")["samples"] == 60_000


def test_the_report_has_six_lines_of_80_columns(cli, key, folder):
    (folder / "my.csv").write_text("id,name,price,born\n1,Ann,2.5,2001-01-01\n2,Bo,,2002-02-02\n")
    lines = cli(f"import my.csv ds {key}").stdout.splitlines()
    assert re.sub(r"\d+\.\d s", "0.1 s", lines[0]) == "ds: 2 samples sealed, of 1 file (59 B of values read); 0.1 s"
    assert lines[1] == "columns: id (integers), name (text), price (numbers or null), born (text)"
    assert lines[2].startswith("key: ")
    assert lines[3:] == ["Next: fastrack inspect ds", '      in Python: fastrack.SealedDataset("ds", keys="owner.key")']
    assert max(map(len, lines)) <= 80


def test_the_report_names_columns_and_classes(cli, key, folder):
    names = [f"measurement_{number}" for number in range(15)]
    (folder / "wide.csv").write_text(f"{','.join(names)}\n{','.join(['1'] * 14)},a\n")
    said = cli(f"import wide.csv wide {key}").stdout.splitlines()
    lines = said[1 : next(index for index, line in enumerate(said) if line.startswith("key: "))]
    assert max(map(len, lines)) <= 80
    assert all(line.startswith(" " * len("columns: ")) for line in lines[1:])
    listed = " ".join(" ".join(lines).split())
    assert all(f"{name} (integers)" in listed for name in names[:12])
    assert listed.endswith(", and 3 more: 2 of integers, 1 of text")
    for count, end in ((3, ", 2 c02"), (40, ", ... 32 more")):
        for number in range(count):
            (folder / f"images{count}" / f"c{number:02}").mkdir(parents=True)
            np.save(folder / f"images{count}" / f"c{number:02}" / "x.npy", np.zeros(2))
        [line] = [line for line in cli(f"import images{count} ds{count} {key}").stdout.splitlines() if "labels" in line]
        assert len(line) <= 80
        assert line.startswith("labels: 0 c00, 1 c01")
        assert line.endswith(end)


def test_columns_that_became_text_by_a_cell_are_told(cli, key, folder):
    rows = "".join(f"{row},{row}.5,00{row},word {row},{row if row != 90 else 'secret'}\n" for row in range(1, 200))
    (folder / "my.csv").write_text("id,size,code,note,age\n" + rows.replace("3,3.5,", "3,n/a,", 1))
    why = "is no number. If it is a null, name it in"
    told = [f"{name} is text, as line {line} of my.csv {why}" for name, line in (("size", 4), ("age", 91))]
    lines = cli(f"import my.csv ds {key}").stdout.splitlines()
    assert lines[2:4] == [f"note: {note} --null" for note in told]
    assert cli.json(f"import my.csv again {key}")["notes"] == [f"{note} nulls=" for note in told]


def test_nulls_and_types_of_columns_are_given(cli, key, folder):
    (folder / "my.csv").write_text("id,a=b,size,flag\n007,1,n/a,TRUE\n008,null,2.5,-\n")
    options = "--null n/a,null --null=- --type a=b=float --type flag=bool --type id=int"
    lines = cli(f"import my.csv ds {key} {options}").stdout.splitlines()
    shown = "columns: id (integers), a=b (numbers or null), size (numbers or null),"
    assert lines[1:3] == [shown, "         flag (yes or no or null)"]
    lines = cli(
        f"import my.csv other --dry-run --null n/a,null --type a=b=float --type id=int {key}"
    ).stdout.splitlines()
    again = f"fastrack import my.csv other {key} --null n/a,null --type a=b=float --type id=int"
    assert lines[-1] == f"Nothing was written. Next: {again}"


@each(
    ("options", "error"),
    [
        ("--type size", "expected name=type, got 'size'"),
        ("--type size=money", "expected bool, float, int or text for 'size', got 'money'"),
        ("--type sise=float", "--type: the source has no column 'sise'; it has 'id', 'size'. Did you mean 'size'?"),
        ("--type size=float", "line 2: column 'size': expected a number, as --type says, got another cell. Name it in"),
        ("--type id=int,size=float", "expected one name=type, got 'id=int,size=float'. Repeat --type"),
    ],
)
def test_a_type_that_is_none_or_does_not_fit_is_refused_in_words(cli, key, folder, options, error):
    (folder / "my.csv").write_text("id,size\n1,n/a\n")
    assert error in " ".join(
        cli(f"import my.csv ds {key} {options}", status=2 if "name" in error or "bool" in error else 1).output.split()
    )
    assert not (folder / "ds").exists()


def test_files_that_are_there_are_left_out_and_told(cli, key, folder):
    (folder / "days").mkdir()
    for day in range(12):
        (folder / "days" / f"day-{day:02}.txt").write_text(f"day {day}\n")
    cli(f"import days ds {key}")
    (folder / "days" / "day-12.txt").write_text("day 12\n")
    (folder / "days" / ".hidden").write_text("")
    said = cli(f"import days ds --append --skip-existing {key}").stdout.splitlines()
    assert said[0].startswith("ds: 1 sample added, of 13 files (")
    assert ", 13 in all; " in said[0]
    assert said[2] == "skipped: 12 stored already (day-00.txt, ...), 1 hidden (.hidden)"
    assert max(map(len, said)) <= 80
    report = cli.json(f"import days ds --append --skip-existing {key}")
    assert (report["samples"], report["added"], report["files"]) == (13, 0, 13)
    assert report["skipped"][0] == {"file": "day-00.txt", "reason": "stored already"}
    assert {"file": ".hidden", "reason": "hidden"} in report["skipped"]
    (folder / "days" / "day-03.txt").write_text("another day\n")
    assert "'day-03.txt'" in cli.error(f"import days ds --append --skip-existing {key}")
    assert texts("ds", "owner.key") == [f"day {day}" for day in range(13)]


@pytest.mark.slow
def test_a_dry_run_needs_no_key_and_writes_nothing(cli, folder, lines):
    (folder / "bad.jsonl").write_text('{"a": 1}\n{"": 1}\n')
    said = cli(f"import {lines} out --dry-run").stdout
    assert said.startswith("out: 3000 samples to seal, of 1 file (")
    assert said.endswith(f"Nothing was written. Next: fastrack import {lines} out\n")
    assert "line 2" in cli.error("import bad.jsonl out --dry-run")
    assert cli.json(f"import {lines} out --dry-run")["dry_run"] is True
    assert not (folder / "out").exists()
    cli("keygen owner.key")
    cli(f"import {lines} out --key owner.key")
    assert "already" in cli.error(f"import {lines} out --dry-run --key owner.key")
    (folder / lines).rename(folder / "more.txt")
    said = cli("import more.txt out --dry-run --append --key owner.key").stdout
    assert said.startswith("out: 3000 samples to add, of 1 file (")
    assert len(texts("out", "owner.key")) == 3000


def test_columns_are_chosen(cli, key, folder):
    (folder / "my.csv").write_text("id,name,price\n1,Ann,2.5\n")
    report = cli.json(f"import my.csv ds --columns price,id {key}")
    assert [column["name"] for column in report["columns"]] == ["price", "id"]
    assert "'nmae'" in cli.error(f"import my.csv other --columns nmae {key}")
    cli(f"import my.csv other --columns id, {key}", status=2)


def test_a_column_whose_name_has_a_comma_is_chosen_in_quotes(cli, key, folder):
    (folder / "my.csv").write_text('id,"weight, kg",price\n1,70,2.5\n')
    report = cli.json(f"""import my.csv ds --columns '"weight, kg",id,price' {key}""")
    assert [column["name"] for column in report["columns"]] == ["weight, kg", "id", "price"]
    said = cli(f"""import my.csv again --dry-run --columns '"weight, kg"' {key}""").stdout
    assert """--columns '"weight, kg"'""" in said
    cli(f"""unseal ds out.csv --columns '"weight, kg"' {key}""")
    assert (folder / "out.csv").read_text() == '"weight, kg"\n70\n'
    for wrong in ('"weight, kg', '"id" price', "id\nprice"):
        for command in ("import my.csv other", "unseal ds other.csv"):
            said = cli(f"{command} --columns {quote(wrong)} {key}", status=2).stderr
            assert "expected names as in a line of CSV" in " ".join(said.split())


def test_without_a_key_an_error_says_how_to_make_and_name_one(cli, lines, monkeypatch):
    monkeypatch.delenv("FASTRACK_KEY_FILE", raising=False)
    error = cli.error(f"import {lines} out")
    assert "`fastrack keygen owner.key`" in error
    assert "--key owner.key" in error
    assert error.count("\n") == 1
    assert cli.names() == [lines]


def test_options_that_do_not_go_together_are_bad_usage(cli, key, lines):
    for options in ("--resume --append", "--skip-existing"):
        cli(f"import {lines} out {options} {key}", status=2)
    assert "no dataset" in cli.error(f"import {lines} out --append {key}")


def test_quiet_prints_what_was_left_out_unasked_and_nothing_else(cli, key, folder, lines):
    assert cli(f"import {lines} out --quiet {key}").output == ""
    (folder / "texts").mkdir()
    for name in ("a.txt", ".b.txt"):
        (folder / "texts" / name).write_text("a line\n")
    assert cli(f"import texts of-texts --quiet {key}").output == "skipped: 1 hidden (.b.txt)\n"
    assert cli(f"import texts of-texts --append --skip-existing --quiet {key}").output.count("stored already") == 0


def test_a_failure_says_how_far_it_came_and_the_command_that_goes_on(cli, key, folder, limited):
    (folder / "some data").mkdir()
    for name in "abc":
        (folder / "some data" / f"{name}.txt").write_text(f"{name}\n" * 2000)
    (folder / "some data" / "c.txt").write_bytes(b"\0\n")
    options = f"--skip-existing --append {key}"
    limited(import_mib=1 << 10)
    error = cli.error(f"import 'some data' ds --shard-size 4 {key}")
    assert re.search(r"c.txt, line 1: .*\nnote: ds has \d{4} samples now; stopped in c.txt, file 3 of 3\n", error)
    command = f"fastrack import 'some data' ds {key} --shard-size 4 --resume"
    assert error.endswith(f"note: to go on: {command}\n")
    assert "resume" in cli.error(f"import 'some data' ds {options}")
    (folder / "some data" / "c.txt").write_text("c\n")
    assert cli.json(command.removeprefix("fastrack "))["samples"] == 4001


@pytest.mark.slow
def test_a_terminated_import_says_how_to_go_on(key, folder):
    (folder / "big.txt").write_bytes((b"x" * 1000 + b"\n") * 60_000)
    command = [sys.executable, "-m", "fastrack", "import", "big.txt", "out", *key.split(), "--shard-size", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while not list(folder.glob("out/shard-00000[3-9]*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate()
    assert process.returncode == 143
    assert "stopped in big.txt, file 1 of 1" in error
    assert error.endswith(f"; to go on: fastrack import big.txt out {key} --shard-size 1 --resume\n")
    assert error.count("\n") == 1


@each("limit", [None, "4"])
def test_an_import_that_is_interrupted_before_a_shard_says_that_nothing_is_kept(cli, key, lines, monkeypatch, limit):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)  # before the first file gets its name
    options = f"{key} --shard-size {limit}" if limit else key
    error = cli(f"import {lines} out {options}", status=130).output
    more = "" if limit else "; --shard-size 32 would keep more"
    stopped = "; stopped in lines.txt, file 1 of 1"
    assert error == f"error: interrupted: nothing was stored{stopped}; the same command begins again{more}\n"
    assert not (cli.folder / "out").exists()


def test_an_import_that_is_interrupted_at_the_first_look_says_how_to_go_on(cli, key, folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    (folder / "my.csv").write_text("id\n1\n")
    monkeypatch.setattr("fastrack._samples.csv.cell_types.TextCells.judge", interrupt)
    error = cli(f"import my.csv out {key}", status=130).output
    stopped = "; stopped in my.csv, file 1 of 1"
    assert error == f"error: interrupted: nothing was stored{stopped}; the same command begins again\n"


def test_errors_name_parameters_in_python_and_options_on_the_command_line(cli, key, lines, folder):
    (folder / "my.csv").write_text("id\n1\n")
    options = {"--resume": {"resume": True}, "": {}, "--append": {"append": True}, "--columns x": {"columns": ["x"]}}
    (folder / "other").mkdir()
    (folder / "other" / lines).write_text("other\n")
    import_samples(lines, "out", "owner.key")
    for given, parameters in options.items():
        source = "my.csv" if parameters.get("columns") else f"other/{lines}" if "--resume" in given else lines
        folder = "new" if parameters.get("columns") else "out"
        with pytest.raises((OSError, ValueError)) as info:
            import_samples(source, folder, "owner.key", **parameters)
        error = cli.error(f"import {source} {folder} {key} {given}")
        assert "=" in str(info.value)
        assert "--" not in str(info.value)
        assert "Errno" not in str(info.value)
        assert "--" in error
        assert "=" not in error


@pytest.mark.slow
def test_a_table_that_pandas_wrote_trains_a_model_with_what_the_readme_says(cli, key):
    torch = pytest.importorskip("torch")
    chance, names = np.random.default_rng(0), ["José Müller", 'Zoë "Å" Ångström', "Łukasz, the old", "李雷"]
    age, income = chance.integers(18, 90, 2000), chance.normal(40, 12, 2000).round(2)
    with (cli.folder / "nasty.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["", "customer", "name", "joined", "age", "income", "spent"])
        for n, (years, earned) in enumerate(zip(age.tolist(), income.tolist(), strict=True)):
            day = "" if n % 13 == 0 else f"20{10 + n % 15}-0{1 + n % 9}-1{n % 10}"
            held = ["" if n % 50 == 7 else years, "N/A" if n % 40 == 3 else earned]
            rows.writerow([n, 10**19 + n, names[n % 4], day, *held, round(earned / 2 + years / 10, 2)])
    said = cli(f"import nasty.csv ds {key} --null N/A").stdout
    for column in ("index (integers)", "customer (text)", "age (integers or null)", "income (numbers or null)"):
        assert column in " ".join(said.split())
    columns = ["age", "age.valid", "income", "income.valid", "spent"]
    loader = torch.utils.data.DataLoader(
        SealedDataset("ds", columns=columns, keys="owner.key"), batch_size=100, collate_fn=fastrack.collate
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=2e-4), []
    for _ in range(5):
        for batch in fastrack.wrap(loader, "cpu"):
            known = batch["age.valid"] & batch["income.valid"]
            x = torch.stack([batch["age"], batch["income"]], dim=1)[known]
            loss = torch.nn.functional.mse_loss(model(x)[:, 0], batch["spent"][known])
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
    assert texts("ds", "owner.key", "name")[:4] == names
