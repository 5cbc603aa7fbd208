"""The checks of a release: its tag, its changelog, its files."""

import base64
import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from helpers.cases import each

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="the tests run outside a checkout"),
]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def release(monkeypatch, tmp_path):
    """Return the script of a repository that has version 1.2.0."""
    monkeypatch.setitem(sys.modules, "release", None)  # and is taken out again after the test
    module = load("release")
    monkeypatch.setattr(module, "ROOT", tmp_path / "repository")
    (tmp_path / "repository/package").mkdir(parents=True)
    (tmp_path / "repository/pyproject.toml").write_text(
        '[project]\n[tool.hatch.version]\npath = "package/_version.py"\n'
    )
    (tmp_path / "repository/package/_version.py").write_text('"""The version."""\n\n__version__ = "1.2.0"\n')
    return module


@pytest.fixture
def project(release):
    return release.PROJECTS["fastrack-io"]


def test_the_version_is_that_of_this_package():
    import fastrack

    release = load("release")
    assert release.PROJECTS["fastrack-io"].version == fastrack.__version__
    assert release.PROJECTS["fastrack-io"].stem == f"fastrack_io-{fastrack.__version__}"


# The tag.


MAIN = "refs/heads/main"


class Repository:
    """A repository with a commit, and keys that sign."""

    def __init__(self, folder):
        self.folder = folder
        self.keys = folder.parent

    def git(self, *arguments, **more):
        name = ("-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "gpg.format=ssh")
        command = ["git", "-C", self.folder, *name, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, **more).stdout.strip()

    def commit(self, **files):
        for name, text in files.items():
            path = self.folder / {"signers": ".github/allowed_signers"}.get(name, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "x")

    def key(self, name):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", self.keys / name]
        subprocess.run(command, check=True)
        return f"someone@example.org {(self.keys / f'{name}.pub').read_text()}"

    def sign(self, tag, key="mine", commit="HEAD", **more):
        self.git("-c", f"user.signingKey={self.keys / key}", "tag", "--sign", "--message", tag, tag, commit, **more)


@pytest.fixture
def repository(release):
    if not shutil.which("git") or not shutil.which("ssh-keygen"):
        pytest.skip("needs git and OpenSSH")
    made = Repository(release.ROOT)
    made.git("init", "--quiet", "--initial-branch", "main")
    made.commit(signers=made.key("mine"))
    return made


def test_a_signed_tag_of_the_version_is_taken(release, project, repository, capsys):
    repository.sign("v1.2.0")
    release.check_tag(project, "v1.2.0", MAIN)
    assert capsys.readouterr().out.startswith("v1.2.0: signed, annotated, on ")


def refused(release, project, tag="v1.2.0", branch=MAIN):
    with pytest.raises(release.ReleaseError) as caught:
        release.check_tag(project, tag, branch)
    return str(caught.value)


def test_a_tag_of_another_version_is_refused(release, project, repository):
    repository.sign("v1.3.0")
    assert refused(release, project, "v1.3.0") == "the tag does not name the version: expected v1.2.0, got v1.3.0"


def test_a_tag_without_a_signature_is_refused(release, project, repository):
    repository.git("tag", "v1.2.0")
    assert refused(release, project).endswith("expected an annotated tag, got a commit. Use git tag --sign")
    repository.git("tag", "--delete", "v1.2.0")
    repository.git("tag", "--annotate", "--message", "x", "v1.2.0")
    assert refused(release, project) == "the tag is not signed only by SSH: got no signature"


def test_a_tag_that_another_key_signed_is_refused(release, project, repository):
    repository.key("other")
    repository.sign("v1.2.0", "other")
    assert "not signed by a key" in refused(release, project)


def test_the_tagged_commit_cannot_name_its_own_key(release, project, repository):
    repository.git("checkout", "--quiet", "-b", "aside")
    repository.commit(signers=repository.key("other"))
    repository.sign("v1.2.0", "other")
    assert refused(release, project) == "the commit is not of refs/heads/main. Merge it first"


def test_a_key_that_main_names_no_more_signs_nothing(release, project, repository):
    repository.sign("v1.2.0")
    repository.commit(signers=repository.key("other"))
    repository.git("checkout", "--quiet", "HEAD~")
    assert "not signed by a key" in refused(release, project)


def test_a_tag_of_another_commit_is_refused(release, project, repository):
    repository.sign("v1.2.0")
    repository.commit(more="x")
    assert refused(release, project).startswith("another commit is checked out: ")


def test_without_a_key_of_a_maintainer_nothing_is_released(release, project, repository):
    (repository.folder / ".github/allowed_signers").unlink()
    repository.commit()
    repository.sign("v1.2.0")
    assert refused(release, project) == "refs/heads/main has no .github/allowed_signers, so no key may sign a release"


def test_a_branch_by_its_short_name_is_refused_as_a_tag_may_have_that_name(release, project, repository):
    repository.git("checkout", "--quiet", "-b", "aside")
    repository.commit(signers=repository.key("other"))
    repository.git("tag", "main")
    repository.sign("v1.2.0", "other")
    said = "the branch has no full name: expected refs/remotes/origin/main or the like, got main"
    assert refused(release, project, branch="main") == said
    assert refused(release, project) == "the commit is not of refs/heads/main. Merge it first"


def test_the_tag_is_verified_and_no_branch_of_its_name(release, project, repository):
    repository.key("other")
    repository.sign("v1.2.0", "other")
    repository.sign("signed")
    repository.git("update-ref", "refs/v1.2.0", "refs/tags/signed")  # which git finds first
    repository.git("symbolic-ref", "v1.2.0", "refs/tags/signed")
    assert "not signed by a key" in refused(release, project)


def test_a_signed_tag_that_was_pushed_under_another_name_is_refused(release, project, repository):
    repository.sign("v1.1.0")
    repository.git("update-ref", "refs/tags/v1.2.0", "refs/tags/v1.1.0")
    said = refused(release, project)
    assert said.startswith("the tag was signed as another one: expected ")
    assert said.endswith("'tag', 'v1.1.0']")


def test_a_signed_tag_of_a_tag_is_refused(release, project, repository):
    repository.git("tag", "--annotate", "--message", "x", "inner")
    repository.sign("v1.2.0", commit="inner")
    assert refused(release, project).startswith("the tag was signed as another one: expected ")


def test_a_tag_that_says_more_than_tags_do_is_refused(release, project, repository):
    repository.sign("v1.2.0")
    text = repository.git("cat-file", "tag", "v1.2.0").replace("\n\n", "\ngpgsig-sha256 x\n\n", 1)
    made = repository.git("hash-object", "-t", "tag", "-w", "--literally", "--stdin", input=text)
    repository.git("update-ref", "refs/tags/v1.2.0", made)
    assert refused(release, project).startswith("the tag was signed as another one: expected ")


def test_a_tag_that_stands_for_another_object_is_refused(release, project, repository):
    repository.key("other")
    repository.sign("v1.2.0", "other")
    false = repository.git("rev-parse", "refs/tags/v1.2.0")
    repository.git("tag", "--delete", "v1.2.0")
    repository.sign("v1.2.0")
    repository.git("update-ref", f"refs/replace/{false}", "refs/tags/v1.2.0")
    repository.git("update-ref", "refs/tags/v1.2.0", false)
    assert "not signed by a key" in refused(release, project)


@each(
    ("date", "reason"),
    [("2026-01-02T00:00:00Z", "has the date 2026-01-02"), ("2098-01-02T00:00:00Z", "has the date 2098")],
)
def test_a_tag_with_the_date_of_another_day_is_refused(release, repository, monkeypatch, capsys, date, reason):
    monkeypatch.setenv("GIT_COMMITTER_DATE", date)
    repository.sign("v1.2.0")
    assert release.main(["tag", "fastrack-io", "v1.2.0", MAIN]) == 1
    assert reason in capsys.readouterr().err
    assert release.main(["tag", "fastrack-io", "v1.2.0", MAIN, "--days", "50000"]) == 0
    repository.git("tag", "--delete", "v1.2.0")


def test_a_key_that_has_ended_signs_nothing_and_no_date_helps(release, repository, monkeypatch):
    ended = f'someone@example.org valid-before="20260101Z" {repository.key("old").partition(" ")[2]}'
    repository.commit(signers=ended)
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2025-12-31T00:00:00Z")
    repository.sign("v1.2.0", "old")
    assert release.main(["tag", "fastrack-io", "v1.2.0", MAIN]) == 1
    monkeypatch.delenv("GIT_COMMITTER_DATE")
    repository.git("tag", "--delete", "v1.2.0")
    repository.sign("v1.2.0", "old")
    assert release.main(["tag", "fastrack-io", "v1.2.0", MAIN]) == 1


@each("begin", ["PGP SIGNATURE", "PGP MESSAGE", "SIGNED MESSAGE"])
def test_a_signature_that_is_not_of_ssh_is_refused(release, project, repository, begin, monkeypatch, tmp_path):
    program = tmp_path / "gpg"  # a key ring that trusts everybody
    program.write_text(
        '#!/bin/sh\ncat > /dev/null\nprintf "\\n[GNUPG:] GOODSIG 0123456789ABCDEF x\\n[GNUPG:] TRUST_ULTIMATE 0\\n"\n'
    )
    program.chmod(0o700)
    for name in ("gpg.program", "gpg.x509.program"):
        repository.git("config", name, str(program))
    commit = repository.git("rev-parse", "HEAD")
    text = f"object {commit}\ntype commit\ntag v1.2.0\ntagger x <x@example.org> {int(time.time())} +0000\n\nx\n"
    text += f"-----BEGIN {begin}-----\n\nx\n-----END {begin}-----\n"
    made = repository.git("hash-object", "-t", "tag", "-w", "--stdin", input=text)
    repository.git("update-ref", "refs/tags/v1.2.0", made)
    repository.git("verify-tag", "refs/tags/v1.2.0")
    assert refused(release, project) == f"the tag is not signed only by SSH: got -----BEGIN {begin}-----"
    monkeypatch.setattr(release, "check_signed_text", lambda *_: None)
    assert "not signed by a key" in refused(release, project)  # as no key ring is asked


# The changelog.


def test_the_notes_are_what_the_changelog_says_of_the_version(release, project):
    text = "## [Unreleased]\n\n## [1.2.0] - 2026-11-01\n\n### Added\n\n- A thing.\n\n## [1.1.0] - 2026-01-01\n"
    assert release.notes_of(project, text) == "### Added\n\n- A thing."


@each(
    ("title", "reason"),
    [
        ("[Unreleased]", "expected one, ## [1.2.0] with a date, got [Unreleased]. Rename Unreleased"),
        ("[1.2.0]", "the version has no date: expected YYYY-MM-DD, got ## [1.2.0]"),
        ("[1.2.0] - soon", "expected YYYY-MM-DD, got ## [1.2.0] - soon"),
        ("[1.2.0] - 2026-02-30", "expected YYYY-MM-DD"),
        ("[1.2.01] - 2026-02-03", "expected one, ## [1.2.0] with a date"),
        ("[1.2.0] x - 2026-02-03", "expected YYYY-MM-DD"),
        ("[1.2.0] - 2026-02-03 or so", "expected YYYY-MM-DD"),
        ("[1.2.0] - 20260203", "expected YYYY-MM-DD"),
        ("[1.2.0] - 2026-02-03\n\n- More.\n\n## [1.2.0] - 2026-02-04", "the changelog has 2 sections of this version"),
        (f"[1.2.0] - {datetime.now(UTC).date() + timedelta(days=2)}", "the version has a date in the future"),
        (
            "[1.2.0] - 2026-02-03\n\n[keys](docs/keys.md)",
            "the section of this version has relative links: docs/keys.md",
        ),
    ],
)
def test_a_changelog_without_the_version_and_its_date_is_refused(release, project, title, reason):
    with pytest.raises(release.ReleaseError) as caught:
        release.notes_of(project, f"# Changelog\n\n## {title}\n\n- A thing.\n")
    assert reason in str(caught.value)


def test_a_section_that_says_nothing_is_refused(release, project):
    with pytest.raises(release.ReleaseError, match="is empty"):
        release.notes_of(project, "## [1.2.0] - 2026-11-01\n\n## [1.1.0] - 2026-01-01\n\n- A thing.\n")


# The files.

METADATA = "Metadata-Version: 2.4\nName: fastrack-io\nVersion: 1.2.0\n\n# fastrack\n\n[pages](https://fastrack-io.github.io/fastrack/)\n"
OF_BENCH = METADATA.replace("fastrack-io", "fastrack-bench", 1).replace(
    "1.2.0", "1.2.0\nRequires-Dist: fastrack-io==1.2.0"
)
BILL = (
    '{"$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6",'
    ' "serialNumber": "urn:uuid:c3ce1d4c-4a7c-5d53-9d0a-5a6f8f1c2b3d",'
    ' "metadata": {"component": {"type": "library", "name": "fastrack-io", "version": "1.2.0"}}}'
)


INFO = "fastrack_io-1.2.0.dist-info"


def record_of(wheel):
    """Return the RECORD of what a wheel has."""
    rows = []
    for name in wheel.namelist():
        data = wheel.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    return "".join(rows) + f"{INFO}/RECORD,,\n"


def write_files(folder, names, metadata=METADATA, bill=BILL, of_bench=OF_BENCH):
    for name in names:
        told = of_bench if name.startswith("fastrack_bench") else metadata
        if name.endswith(".whl"):
            with zipfile.ZipFile(folder / name, "w") as wheel:
                wheel.writestr(f"{INFO}/METADATA", told)
                wheel.writestr("fastrack/x.py", b"x = 1\n")
                wheel.writestr(f"{INFO}/RECORD", record_of(wheel))
        elif name.endswith(".tar.gz"):
            with tarfile.open(folder / name, "w:gz") as archive:
                entry = tarfile.TarInfo(f"{name.removesuffix('.tar.gz')}/PKG-INFO")
                entry.size = len(told)
                archive.addfile(entry, io.BytesIO(told.encode()))
        elif name.endswith(".json"):
            (folder / name).write_text(bill)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("fastrack_*"))}
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in hashes.items()))
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "dist").mkdir()
    return tmp_path / "dist"


def problem_of(release, project, folder):
    with pytest.raises(release.ReleaseError) as caught:
        release.check_files(project, folder)
    return str(caught.value)


def test_the_files_of_a_release_are_taken(release, project, folder, capsys):
    pytest.importorskip("cyclonedx.validation.json")
    release.check_files(project, write_files(folder, release.names_of(project)))
    assert capsys.readouterr().out == f"{folder}: 8 files of fastrack_io-1.2.0\n"


def test_a_missing_and_an_additional_file_are_named(release, project, folder):
    names = release.names_of(project) - {"fastrack_io-1.2.0.cdx.json"} | {"fastrack_io-1.2.0.zip"}
    (folder / "fastrack_io-1.2.0.zip").write_bytes(b"")
    said = problem_of(release, project, write_files(folder, names))
    assert said.endswith("fastrack_io-1.2.0.cdx.json missing, fastrack_io-1.2.0.zip additional")
    said = problem_of(release, project, write_files(folder, release.names_of(project)))
    assert said.endswith("none missing, fastrack_io-1.2.0.zip additional")


def test_a_file_that_was_exchanged_is_named(release, project, folder):
    write_files(folder, release.names_of(project))
    (folder / "fastrack_io-1.2.0.cdx.json").write_text("{}")
    assert problem_of(release, project, folder) == "fastrack_io-1.2.0.cdx.json is not the file of SHA256SUMS"


def test_a_file_that_is_listed_twice_is_refused(release, project, folder):
    write_files(folder, release.names_of(project))
    text = (folder / "SHA256SUMS").read_text()
    name = text.splitlines()[0].partition("  ")[2]
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n{text}")
    assert problem_of(release, project, folder) == "SHA256SUMS lists a file twice"


@each(
    ("alter", "reason"),
    [
        (lambda wheel, record: wheel.writestr("fastrack/y.py", b""), "its RECORD have other files: fastrack/y.py"),
        (lambda wheel, record: wheel.writestr("fastrack/x.py", b"x = 2\n"), "other files: fastrack/x.py"),
        (lambda wheel, record: record.replace("fastrack/x.py", "fastrack/z.py"), "fastrack/x.py, fastrack/z.py"),
        (lambda wheel, record: record + "fastrack/x.py,,\n", "its RECORD have other files: fastrack/x.py"),
        (lambda wheel, record: record.replace(",6\n", ",7\n"), "is not that of its RECORD: fastrack/x.py"),
        (lambda wheel, record: record.replace("METADATA,sha256=", "METADATA,sha256=0"), f"RECORD: {INFO}/METADATA"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_wheel_that_is_not_its_record_is_refused(release, tmp_path, alter, reason):
    path = tmp_path / "fastrack_io-1.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{INFO}/METADATA", METADATA)
        wheel.writestr("fastrack/x.py", b"x = 1\n")
        record = record_of(wheel)
        wheel.writestr(f"{INFO}/RECORD", altered if isinstance(altered := alter(wheel, record), str) else record)
    with pytest.raises(release.ReleaseError) as caught:
        release.check_record(path)
    assert reason in str(caught.value)


def test_a_release_has_wheels_that_are_their_records(release, project, folder, monkeypatch):
    asked = []
    monkeypatch.setattr(release, "check_record", lambda path: asked.append(path.name))
    pytest.importorskip("cyclonedx.validation.json")
    release.check_files(project, write_files(folder, release.names_of(project)))
    assert set(asked) == {name for name in release.names_of(project) if name.endswith(".whl")}


def test_a_file_without_a_hash_is_named(release, project, folder):
    write_files(folder, release.names_of(project))
    lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(lines[1:]))
    assert problem_of(release, project, folder) == f"SHA256SUMS lists other files: {lines[0].split()[1]}"


@each(
    ("old", "new", "reason"),
    [
        ("1.2.0", "1.2.1", "is of another project or version: fastrack-io 1.2.1"),
        ("fastrack-io\n", "fastrack\n", "is of another project or version: fastrack 1.2.0"),
        ("https://fastrack-io.github.io/fastrack/", "docs/keys.md", " has relative links: docs/keys.md"),
        (
            "# fastrack\n",
            "# fastrack\n\nUntil version 1.2 is on PyPI\n",
            "says 'Until version'. Correct how README says",
        ),
    ],
)
def test_metadata_of_another_release_are_refused(release, project, folder, old, new, reason):
    write_files(folder, release.names_of(project), metadata=METADATA.replace(old, new))
    assert reason in problem_of(release, project, folder)


@each(
    ("old", "new", "reason"),
    [
        ("Name: fastrack-bench", "Name: fastrack-io", "is of another project or version: fastrack-io 1.2.0"),
        ("io==1.2.0", "io>=1.2.0", "needs fastrack-io>=1.2.0: expected fastrack-io of this version"),
        ("Requires-Dist: fastrack-io==1.2.0\n", "", "needs nothing: expected fastrack-io of this version"),
    ],
)
def test_fastrack_bench_is_released_for_this_version_only(release, project, folder, old, new, reason):
    write_files(folder, release.names_of(project), of_bench=OF_BENCH.replace(old, new))
    assert reason in problem_of(release, project, folder)


@each(
    ("old", "new", "reason"),
    [
        ('"type": "library"', '"type": "thing"', "is no valid bill of materials: 'thing' is not one of"),
        ('"serialNumber"', '"$schema"', "has no serial number, without which nothing attests it"),
        ('"1.2.0"', '"1.2.1"', "is of another project: fastrack-io 1.2.1"),
    ],
)
def test_a_bill_that_is_not_valid_or_of_another_version_is_refused(release, project, folder, old, new, reason):
    pytest.importorskip("cyclonedx.validation.json")
    write_files(folder, release.names_of(project), bill=BILL.replace(old, new))
    assert reason in problem_of(release, project, folder)


def test_a_step_that_fails_says_why_and_ends_with_1(release, folder, capsys):
    assert release.main(["files", "fastrack-io", str(folder)]) == 1
    assert capsys.readouterr().err.startswith(f"fastrack-io: {folder} has other files than a release: ")


# The site.


def test_the_site_has_a_list_of_its_pages_and_a_page_for_those_that_are_not_there(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("index.html", "search.html", "dev/state.html"):
        (tmp_path / name).write_text("x")
    load("site").main(tmp_path, "https://example.org/here/")
    listed = (tmp_path / "sitemap.xml").read_text()
    assert "<loc>https://example.org/here/dev/state.html</loc>" in listed
    assert "search" not in listed
    assert 'href="https://example.org/here/"' in (tmp_path / "404.html").read_text()
