import fnmatch
import json
import re
import runpy
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.cases import each
from helpers.commands import application, whole
from helpers.pages import blocks_of
from helpers.tampering import flip_byte

import fastrack
import fastrack.attest
import fastrack.distributed
import fastrack.grants
import fastrack.transformers
from fastrack._crypto import derivation
from fastrack._sealed import contexts, scales
from fastrack.format import chunk_count, message_size

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not (DOCS / "index.md").exists(), reason="the tests run without the documentation")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def find(pattern, name):
    return re.findall(pattern, read(name), re.MULTILINE)


def sections(pattern, text):
    """Return the titles and texts of a page's sections."""
    parts = re.split(pattern, text, flags=re.MULTILINE)[1:]
    return zip(parts[::2], parts[1::2], strict=True)


def programs_of(name):
    return [block.text for block in blocks_of(read(name)) if block.language == "python"]


# The format.


@pytest.fixture
def open_sealed():
    _, program = programs_of("docs/format.md")
    assert "fastrack" not in re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)
    assert len([line for line in program.splitlines() if line.strip()]) <= 26  # as it promises
    space = {}
    exec(program, space)
    return space["open_sealed"]


@pytest.mark.parametrize("bits", [128, 256])
@pytest.mark.parametrize("rows", [0, 1, 64, 1797])  # 64 rows fill a chunk
def test_a_sealed_file_opens_without_fastrack(open_sealed, tmp_path, bits, rows):
    key = fastrack.Key.generate(bits)
    array = np.random.default_rng(0).random((rows, 64), dtype=np.float32)
    path = tmp_path / "sealed.safetensors"
    fastrack.save_file({'naïve "\n\x7f/名': array, "other": array}, path, key=key)
    opened = open_sealed(path, 'naïve "\n\x7f/名', bytes(key.material()))
    assert opened.dtype == array.dtype
    assert np.array_equal(opened, array)


def test_the_program_without_fastrack_opens_shards_of_data_sets_which_have_no_guard(open_sealed, tmp_path):
    key, path = fastrack.Key.generate(), tmp_path / "data" / "shard-000000.safetensors"
    fastrack.import_samples([{"w": each} for each in range(5000)], path.parent, key)
    assert np.array_equal(open_sealed(path, "w", bytes(key.material())), np.arange(5000))


def test_the_program_without_fastrack_refuses_an_altered_file(open_sealed, tmp_path):
    from cryptography.exceptions import InvalidTag

    key = fastrack.Key.generate()
    path = tmp_path / "sealed.safetensors"
    fastrack.save_file({"x": np.arange(10)}, path, key=key)
    flip_byte(path)
    with pytest.raises(InvalidTag):
        open_sealed(path, "x", bytes(key.material()))


def test_the_examples_of_a_context_and_a_derivation_are_what_the_code_makes():
    lines = find(r"^fastrack/tensor@1␀.*$", "docs/format.md")
    claim = contexts.MessageContext("images", "F32", (1797, 64), bytes(range(16)).hex())
    scale = scales.Scale((1, 4096), "F32", "w_scale", (4096, 1))
    quantised = contexts.MessageContext("w", "F8_E4M3", (4096, 4096), claim.file, "tensor", scale)
    assert [line.replace("␀", "\0").encode() for line in lines] == [claim.encode(), quantised.encode()]
    made = derivation.derive(bytes(range(32)), bytes(range(24)), claim.encode())
    named = dict(find(r"^\| (key|base nonce|commitment|key id) \| `([0-9a-f]+)` \|$", "docs/format.md"))
    assert named == {
        "key": bytes(made.key).hex(),
        "base nonce": bytes(made.nonce).hex(),
        "commitment": made.commitment.hex(),
        "key id": fastrack.Key(bytes(range(32))).id,
    }


def test_the_example_of_a_key_file_loads(tmp_path):
    (text,) = find(r"^# fastrack key, .*\nfastrack-key-1:.*\n", "docs/format.md")
    path = tmp_path / "a.key"
    path.write_text(text)
    path.chmod(0o600)
    assert fastrack.Key.load(path) == fastrack.Key(bytes(range(32)))


def test_the_table_of_sizes_is_right():
    rows = [list(map(int, row)) for row in find(r"^\| (\d+) \| (\d+) \| (\d+) \|$", "docs/format.md")]
    assert rows
    for plain, chunks, message in rows:
        assert (chunk_count(plain), message_size(plain)) == (chunks, message)


# Manifests.


@pytest.fixture
def reader():
    program, _ = programs_of("docs/format.md")
    assert "fastrack" not in re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)
    assert len([line for line in program.splitlines() if line.strip()]) < 40  # as it promises
    space = {}
    exec(program, space)
    return space["read_manifest"], space["check_file"]


@pytest.mark.parametrize("algorithm", ["Ed25519", "ML-DSA-65"])
def test_a_manifest_is_verified_without_fastrack(reader, tmp_path, algorithm):
    from cryptography.exceptions import InvalidSignature

    read_manifest, check_file = reader
    owner, key = fastrack.grants.Signer.generate(algorithm, name="owner"), fastrack.Key.generate()
    earlier = fastrack.seal(np.arange(3), key, name="earlier")
    tensors = {"naïve 名": np.ones((3, 4)), "open": np.arange(5), "earlier": earlier}
    fastrack.save_file(tensors, tmp_path / "a.safetensors", key, plain=["open"])
    (tmp_path / "config.json").write_text("{}")
    manifest = fastrack.publish(tmp_path, signer=owner)
    found = read_manifest(tmp_path / "fastrack.manifest", str(owner.verifier))
    assert (found["lineage"], found["version"]) == (manifest.lineage, 1)
    assert sorted(found["files"]) == ["a.safetensors", "config.json"]
    for name, entry in found["files"].items():
        check_file(tmp_path / name, entry)
    with pytest.raises(InvalidSignature):
        read_manifest(tmp_path / "fastrack.manifest", str(fastrack.grants.Signer.generate(algorithm).verifier))
    fastrack.save_file(tensors, tmp_path / "a.safetensors", key, plain=["open"])
    (tmp_path / "config.json").write_text("[]")
    for name, entry in found["files"].items():
        with pytest.raises(AssertionError, match=name):
            check_file(tmp_path / name, entry)


def test_the_example_of_a_log_entry_is_what_the_code_makes(tmp_path):
    (tmp_path / "a").write_text("")
    manifest = fastrack.publish(tmp_path / "a", signer=fastrack.grants.Signer.generate())
    (example,) = re.findall(
        r"^```text\n(fastrack/manifest@1\n.*?)```$", read("docs/format.md"), re.MULTILINE | re.DOTALL
    )
    digits = [re.sub(r"[0-9a-f]", "0", line) for line in example.splitlines()[1:]]
    assert [re.sub(r"[0-9a-f]", "0", line) for line in manifest.log_entry.decode().splitlines()[1:]] == digits


# Names, commands and figures.


@pytest.mark.repository
def test_the_api_page_of_each_package_has_its_public_names_and_no_others():
    for package in (
        fastrack,
        fastrack.attest,
        fastrack.distributed,
        fastrack.format,
        fastrack.grants,
        fastrack.tour,
        fastrack.transformers,
    ):
        page = f"docs/{package.__name__.replace('.', '-').replace('fastrack', 'api')}.md"
        named = find(rf"^\.\. (?:auto\w+|py:data):: {package.__name__}\.(\w+)(?:\(\))?$", page)
        described = set(package.__all__)
        if package is fastrack.attest:  # an error of fastrack's, and bytes
            described -= {"AttestationError", *fnmatch.filter(package.__all__, "*_ROOTS")}
        assert sorted(named) == sorted(described), package
    of_ray = find(r"^\.\. auto\w+:: fastrack\.ray\.(\w+)$", "docs/api-ray.md")
    assert f"__all__ = {json.dumps(sorted(of_ray))}" in read("fastrack/ray/__init__.py")  # whose import needs Ray


@pytest.mark.repository
def test_attributes_that_are_described_as_one_keep_their_names():
    pytest.importorskip("sphinx")
    lines = [
        ":ivar tcb_info, qe_identity: The member, byte for byte.",
        ":vartype tcb_info, qe_identity: bytes",
        "a, b: c",
    ]
    runpy.run_path(str(DOCS / "conf.py"))["join_names"](None, "class", "", None, None, lines)
    fields = [line.split(":")[1].split() for line in lines[:2]]
    assert [len(field) for field in fields] == [2, 2]  # with a third, Sphinx takes the second for a type
    assert fields[0][1] == fields[1][1]
    assert lines[0].endswith(": The member, byte for byte.")
    assert lines[2] == "a, b: c"


@pytest.mark.repository
def test_the_api_page_names_what_a_channel_counts():
    from dataclasses import fields

    from fastrack._files.verify import TensorCheck
    from fastrack._transfer.stats import Stats

    page = read("docs/api.md")
    assert not [field.name for kind in (Stats, TensorCheck) for field in fields(kind) if f"`{field.name}`" not in page]


@pytest.mark.repository
def test_the_command_line_page_has_the_commands_and_their_options_and_no_others():
    import typer

    page = {
        name: (
            re.findall(r"^\| `(--[\w-]+)", text, re.MULTILINE),
            re.findall(rf"^fastrack {name}(.*)$", text, re.MULTILINE),
        )
        for name, text in sections(r"^## (\w+)$", read("docs/cli.md"))
    }
    known = {}
    for name, command in typer.main.get_command(application()).commands.items():
        params = whole(command).params
        options = [found.opts[0] for found in params if found.param_type_name == "option" and found.expose_value]
        taken = [found.metavar for found in params if found.param_type_name == "argument"]
        known[name] = (options, ["".join(f" {word}" for word in taken)])
    assert page == known
    assert list(page) == list(known)


@pytest.mark.repository
def test_the_page_on_qualification_has_its_rows():
    from fastrack_bench.qualification.rows import ROWS

    rows = [f"{number} | {name}" for number, (name, _) in enumerate(ROWS, 1)]
    assert find(r"^\| (\d+ \| .*?) \|", "docs/_qualified.md") == rows


@pytest.mark.repository
def test_the_errors_are_drawn_as_in_the_code():
    import fastrack.errors

    source = Path(fastrack.errors.__file__).read_text(encoding="utf-8")
    tree = re.findall(r"^# (FastrackError|[├└]──.*)$", source, re.MULTILINE)
    assert len(tree) > 1
    assert "\n".join(tree) in read("docs/api.md")


@pytest.mark.repository
def test_ci_the_page_on_releasing_and_the_workflow_run_the_same_commands():
    commands = find(r"^ *(?:with_index )?(make (?!install)[\w-]+)$", ".ci/run")
    assert find(r"^\| `(make [\w-]+)` \|", "docs/dev/releasing.md") == commands
    workflow = read(".github/workflows/ci.yml")
    (targets,) = re.findall(r"target: \[(.*)\]", workflow)
    assert ["make check", *(f"make {name}" for name in targets.split(", "))] == commands
    assert "make check" in workflow


@pytest.mark.repository
def test_every_target_that_is_described_exists():
    targets = set(find(r"^([\w-]+):.*## ", "Makefile"))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"`make ([\w-]+)", page.read_text(encoding="utf-8"))}
    assert named
    assert named <= targets


@pytest.mark.repository
def test_make_lists_what_a_newcomer_needs_and_the_others_on_demand():
    first, others = (
        subprocess.run(
            ["make", "--no-print-directory", name], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in ("help", "help-all")
    )
    *listed, last = re.findall(r"^make ([\w-]+)", first, re.MULTILINE)
    assert (len(listed), last) == (8, "help-all")
    named = {*listed, *re.findall(r"^make ([\w-]+)", others, re.MULTILINE)}
    assert named == set(find(r"^([\w-]+):.*## ", "Makefile"))
    assert all(len(line) <= 80 for line in (first + others).splitlines())


@pytest.mark.repository
def test_the_figures_in_the_readme_are_those_of_the_documentation():
    quoted = find(r"^\| .* \| [\d.]+ \| [\d.]+ \|.*\|$", "README.md")
    assert quoted
    assert set(quoted) <= set(read("docs/_figures.md").splitlines())


@pytest.mark.repository
def test_the_epochs_in_the_readme_are_those_of_the_same_run():
    (run,) = find(r"from (\S+)\. -->$", "docs/_figures.md")
    promised = json.loads(read(f"bench/results/{run}.json"))["promised"]
    measured = {f"{row['value']:.2f}" for row in promised if "epoch" in row["name"]}
    assert set(find(r"\b(\d+\.\d+) times", "README.md")) == measured


# Links.


def places_of(page):
    """Return the names of a page's headings, as GitHub and MyST make them, and its targets."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#{1,4} (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title)).lower().replace(" ", "-") for title in titles
    } | set(re.findall(r"^\((.*)\)=$", text, re.MULTILINE))


@pytest.mark.repository
@each(
    "path",
    [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *(ROOT / "kernels").glob("*.md")],
    ids=lambda path: path.name,
)
def test_relative_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for link, place in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if "://" not in link:
            target = path.parent / link if link else path
            assert target.exists(), link
            assert not place or target.suffix != ".md" or place in places_of(target.read_text(encoding="utf-8")), place


@pytest.mark.repository
def test_notes_are_in_a_form_that_hosts_of_repositories_show_too():
    assert [path.name for path in DOCS.rglob("*.md") if ":::" in path.read_text(encoding="utf-8")] == []


@pytest.mark.repository
def test_every_page_is_in_the_contents():
    trees = re.findall(r"```\{toctree\}(.*?)```", read("docs/index.md"), re.DOTALL)
    listed = re.findall(r"^[\w/-]+$", "\n".join(trees), re.MULTILINE)
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("[!_]*.md")}
    assert sorted(listed) == sorted(pages - {"index"})


# Pages of version 0.2, whose addresses are in messages, on other sites and in old releases.
PUBLISHED = re.findall(
    r"\S+",
    "api attacks attestation attestation-setup benchmarks changelog cli collectives costs data distributed format "
    "glossary gpu how-it-works index keys manifests models offload plan preemption protect quickstart remote serving "
    "threat-model tour tour-holders training",
)


@pytest.mark.repository
def test_an_address_that_a_page_had_leads_somewhere():
    moved = dict(re.findall(r'"([\w-]+)": "([\w-]+)"', find(r"^MOVED = {(.*)}$", "docs/conf.py")[0]))
    pages = {path.stem for path in DOCS.glob("[!_]*.md")}
    assert [name for name in PUBLISHED if name not in pages | moved.keys()] == []
    assert [old for old, page in moved.items() if old in pages or page not in pages] == []


@pytest.mark.repository
def test_lines_of_code_fit_a_page():
    long = []
    for path in DOCS.rglob("*.md"):
        # Of the format the programs promise to be short.
        text = "" if path.name == "format.md" else path.read_text(encoding="utf-8")
        for code in re.findall(r"^```(?:python|sh|toml|ini|json|yaml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            lines = [line for line in code.splitlines() if len(line) > 88]
            long += [(path.name, line) for line in lines if max(map(len, line.split())) < 60]  # except a digest
    assert long == []


@pytest.mark.repository
def test_no_comment_and_no_quoted_text_of_a_command_is_continued_by_a_backslash():
    """The shell would run the next line of the comment, and leave the backslash in the text."""
    wrong = []
    for path in DOCS.rglob("*.md"):
        for code in re.findall(r"^ *```sh\n(.*?)^ *```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            wrong += [(path.name, line) for line in re.findall(r"^ *#.*\\$", code, re.MULTILINE)]
            commands = re.sub(r"^ *#.*$", "", code, flags=re.MULTILINE)
            wrong += [(path.name, text) for text in re.findall(r"'[^']*'", commands) if "\\\n" in text]
    assert wrong == []


# What is looked up, or read by auditors, whole. README.md and all other pages of docs are guides.
NOT_GUIDES = {
    "api",
    "attacks",
    "changelog",
    "cli",
    "format",
    "glossary",
    "serving-reference",
    "threat-model",
    "tour-reference",
}
MOST_WORDS = 32000


def is_reference(name):
    return name in NOT_GUIDES or name.startswith(("api-", "door-"))


@pytest.mark.repository
def test_the_guides_have_no_more_words_than_a_reader_needs():
    guides = [ROOT / "README.md", *(path for path in DOCS.glob("[!_]*.md") if not is_reference(path.stem))]
    words = {path.name: len(path.read_text(encoding="utf-8").replace(" \\\n", " ").split()) for path in guides}
    assert sum(words.values()) <= MOST_WORDS, dict(sorted(words.items(), key=lambda each: each[1]))


@pytest.mark.repository
def test_the_page_on_architecture_names_every_package_and_no_file_that_is_not_there():
    page, package = read("docs/dev/architecture.md"), ROOT / "fastrack"
    assert len(page.splitlines()) <= 130
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {path.parent.name for path in package.glob("*/__init__.py")}
    files = {
        name.removesuffix(".py") for name in re.findall(r"`((?:_\w+|attest|distributed|providers)/[\w/.]+)`", page)
    }
    assert [name for name in files if not [*package.glob(f"{name}.py"), *package.glob(f"{name}/__init__.py")]] == []
