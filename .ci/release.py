"""Check a release: ``python .ci/release.py tag|changelog|files PROJECT ...``.

PROJECT is the name of a package: fastrack-io, with which fastrack-bench is released, or fastrack-testkit. The workflows
and `make release-check` run the same steps.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from tempfile import NamedTemporaryFile

ROOT = Path(__file__).parents[1]
SIGNERS = ".github/allowed_signers"
LINK = re.compile(r"\]\((?!https://)([^)\s]*)[^)]*\)")  # PyPI shows a relative link as one to itself
BENCH = "fastrack-bench"  # of the same version, as it uses private modules
UNRELEASED = "Until version"  # how the pages begin to say where a version is that is on no package index


class ReleaseError(Exception):
    """What is not as a release has to be."""


@dataclass(frozen=True, slots=True)
class Project:
    """A package that is released from this repository."""

    name: str
    folder: str
    tag: str  # what stands before the version

    @property
    def root(self) -> Path:
        """The folder of its pyproject.toml."""
        return ROOT / self.folder

    @property
    def version(self) -> str:
        """The version, from pyproject.toml or from the file that it names."""
        settings = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        if "version" in settings["project"]:
            return str(settings["project"]["version"])
        source = (self.root / settings["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
        return re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE)[0]

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        return f"{self.name.replace('-', '_')}-{self.version}"


PROJECTS = {
    project.name: project
    for project in (Project("fastrack-io", ".", "v"), Project("fastrack-testkit", "tests/testkit", "testkit-v"))
}


def main(arguments: list[str] | None = None) -> int:
    """Run one step, and return 1 after a line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="release.py", description="Check a release.")
    steps = parser.add_subparsers(dest="step", required=True)
    for name, summary in (
        ("tag", "the tag is signed, new, names the version, and stands on a commit of BRANCH"),
        ("changelog", "the changelog has the version, with a date; print what it says"),
        ("files", "FOLDER has the files of a release, and they are right"),
    ):
        step = steps.add_parser(name, help=summary, description=summary)
        step.add_argument("project", choices=PROJECTS)
        if name == "tag":
            step.add_argument("tag")
            step.add_argument("branch", help="by its full name, such as refs/remotes/origin/main")
            step.add_argument("--days", type=float, default=1, help="how far from now the tag's date may be")
        if name == "files":
            step.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    project = PROJECTS[options.project]
    try:
        if options.step == "tag":
            check_tag(project, options.tag, options.branch, options.days)
        elif options.step == "changelog":
            print(notes_of(project, (project.root / "CHANGELOG.md").read_text(encoding="utf-8")))
        else:
            check_files(project, options.folder)
    except ReleaseError as error:
        print(f"{project.name}: {error}", file=sys.stderr)
        return 1
    return 0


# The tag.


def check_tag(project: Project, tag: str, branch: str, days: float = 1) -> None:
    """Raise ReleaseError unless a signed tag of the version stands on the current commit, and that is merged."""
    expected, name = project.tag + project.version, f"refs/tags/{tag}"
    if tag != expected:
        raise ReleaseError(f"the tag does not name the version: expected {expected}, got {tag}")
    if not branch.startswith("refs/"):  # git prefers a tag to a branch of the same short name
        raise ReleaseError(f"the branch has no full name: expected refs/remotes/origin/main or the like, got {branch}")
    kind = git("cat-file", "-t", name)
    if kind != "tag":
        raise ReleaseError(f"the tag carries no signature: expected an annotated tag, got a {kind}. Use git tag --sign")
    commits = git("rev-parse", f"{name}^{{commit}}"), git("rev-parse", "HEAD")
    if len(set(commits)) != 1:
        raise ReleaseError(f"another commit is checked out: expected {commits[0]}, got {commits[1]}")
    check_signed_text(tag, commits[0])
    check_date(tag, days)
    git("merge-base", "--is-ancestor", "HEAD", branch, otherwise=f"the commit is not of {branch}. Merge it first")
    # Of the branch, not of the tag: who can push only a tag cannot name a key of their own.
    signers = git("show", f"{branch}:{SIGNERS}", otherwise=f"{branch} has no {SIGNERS}, so no key may sign a release")
    with NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(signers + "\n")
        file.flush()
        settings = ["-c", f"gpg.ssh.allowedSignersFile={file.name}", "-c", "gpg.minTrustLevel=fully"]
        for program in ("gpg.program", "gpg.openpgp.program", "gpg.x509.program"):  # a key ring decides nothing here
            settings += ["-c", f"{program}=false"]
        git(*settings, "verify-tag", name, otherwise=f"the tag is not signed by a key of {SIGNERS} in {branch}")
    print(f"{tag}: signed, annotated, on {commits[0]}")


def check_signed_text(tag: str, commit: str) -> None:
    """Raise ReleaseError unless what was signed names this tag and this commit, and the signature is one of SSH."""
    head, _, message = git("cat-file", "tag", f"refs/tags/{tag}").partition("\n\n")
    expected = f"object {commit}\ntype commit\ntag {tag}\ntagger "  # a signed tag can be pushed under any name
    if not head.startswith(expected) or head.count("\n") != 3:
        raise ReleaseError(
            f"the tag was signed as another one: expected {expected.split()[:6]}, got {head.split()[:6]}"
        )
    signatures = [line for line in message.splitlines() if line.startswith("-----BEGIN ")]
    if signatures != ["-----BEGIN SSH SIGNATURE-----"]:
        raise ReleaseError(f"the tag is not signed only by SSH: got {', '.join(signatures) or 'no signature'}")


def check_date(tag: str, days: float) -> None:
    """Raise ReleaseError unless the tag's own date, by which keys are judged that have an end, is near today's."""
    text = git("for-each-ref", "--format=%(taggerdate:unix)", f"refs/tags/{tag}")
    dated, now = datetime.fromtimestamp(int(text), UTC), datetime.now(UTC)
    if abs((now - dated).total_seconds()) > days * 86400:
        raise ReleaseError(f"the tag has the date {dated:%Y-%m-%d}: expected one {days:g} days from today at most")


def git(*arguments: str, otherwise: str = "") -> str:
    """Return what git prints, or raise ReleaseError with what git says, or with a sentence of one's own."""
    command = ["git", "-C", str(ROOT), "--no-replace-objects", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise ReleaseError(otherwise or done.stderr.strip())
    return done.stdout.strip()


# The changelog.


def notes_of(project: Project, changelog: str) -> str:
    """Return what a changelog says of the version, or raise ReleaseError unless it says something, and has a date."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    found = [index for index, title in enumerate(titles) if title.startswith(f"[{project.version}]")]
    if len(found) != 1:
        raise ReleaseError(
            f"the changelog has {len(found) or 'no'} sections of this version: expected one, "
            f"## [{project.version}] with a date, got {', '.join(titles) or 'none'}. Rename Unreleased"
        )
    title, notes = titles[found[0]], sections[found[0]].partition("\n")[2].strip()
    dated = re.fullmatch(rf"\[{re.escape(project.version)}\] - (\d{{4}}-\d\d-\d\d)", title)
    try:
        day = date.fromisoformat(dated[1] if dated else "")
    except ValueError:
        raise ReleaseError(f"the version has no date: expected YYYY-MM-DD, got ## {title}") from None
    if day > datetime.now(UTC).date():
        raise ReleaseError(f"the version has a date in the future: ## {title}")
    if not notes:
        raise ReleaseError(f"the section of this version is empty: ## {title}")
    refuse_relative_links("the section of this version", notes)
    return notes


# The files.


def check_files(project: Project, folder: Path) -> None:
    """Raise ReleaseError unless a folder has the files of a release, and their hashes, metadata and bill are right."""
    found = {path.name for path in folder.iterdir()}
    expected = names_of(project)
    if found != expected:
        raise ReleaseError(
            f"{folder} has other files than a release: {', '.join(sorted(expected - found)) or 'none'} missing, "
            f"{', '.join(sorted(found - expected)) or 'none'} additional"
        )
    check_hashes(folder)
    for path in sorted(folder.glob("*.whl")) + sorted(folder.glob("*.tar.gz")):
        check_metadata(project, path)
    for path in sorted(folder.glob("*.whl")):
        check_record(path)
    for path in folder.glob("*.cdx.json"):
        check_bill(project, path)
    print(f"{folder}: {len(found)} files of {project.stem}")


def names_of(project: Project) -> set[str]:
    """Return the names of the files of a release."""
    if project.name == "fastrack-testkit":
        return {f"{project.stem}-py3-none-any.whl", f"{project.stem}.tar.gz", "SHA256SUMS"}
    machines = (f"cp311-abi3-manylinux_2_28_{architecture}" for architecture in ("x86_64", "aarch64"))
    wheels = {f"{project.stem}-{tag}.whl" for tag in (*machines, "py3-none-any")}
    bench = f"{BENCH.replace('-', '_')}-{project.version}"
    wheels |= {f"{bench}-py3-none-any.whl", f"{bench}.tar.gz"}
    return wheels | {f"{project.stem}.tar.gz", f"{project.stem}.cdx.json", "SHA256SUMS"}


def check_hashes(folder: Path) -> None:
    """Raise ReleaseError unless SHA256SUMS has the hash of each other file, and of no more."""
    lines = (folder / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if len(listed) != len(lines):
        raise ReleaseError("SHA256SUMS lists a file twice")
    files = {path.name: path for path in folder.iterdir() if path.name != "SHA256SUMS"}
    if set(listed) != set(files):
        raise ReleaseError(f"SHA256SUMS lists other files: {', '.join(sorted(set(listed) ^ set(files)))}")
    for name, path in files.items():
        if hashlib.sha256(path.read_bytes()).hexdigest() != listed[name]:
            raise ReleaseError(f"{name} is not the file of SHA256SUMS")


def check_metadata(project: Project, path: Path) -> None:
    """Raise ReleaseError unless a wheel or a source archive is of the project, and the links it shows are absolute."""
    data = metadata_of(path)
    found, name = (data["Name"], data["Version"]), path.name.partition("-")[0].replace("_", "-")
    if found != (name, project.version):
        raise ReleaseError(f"{path.name} is of another project or version: {found[0]} {found[1]}")
    needs = data.get_all("Requires-Dist", [])
    if name == BENCH and needs != [f"{project.name}=={project.version}"]:
        raise ReleaseError(
            f"{path.name} needs {', '.join(needs) or 'nothing'}: expected {project.name} of this version"
        )
    description = str(data.get_payload())
    refuse_relative_links(f"the description of {path.name}", description)
    if UNRELEASED in description:
        raise ReleaseError(f"the description of {path.name} says {UNRELEASED!r}. Correct how README says to install it")


def refuse_relative_links(what: str, text: str) -> None:
    """Raise ReleaseError if a text for another host than the repository's has relative links."""
    relative = sorted(set(LINK.findall(text)))
    if relative:
        raise ReleaseError(f"{what} has relative links: {', '.join(relative[:5])}")


def metadata_of(path: Path) -> Message:
    """Return the metadata of a wheel or a source archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
            return BytesParser().parsebytes(wheel.read(name))
    with tarfile.open(path) as archive:
        file = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        return BytesParser().parsebytes(file.read())


def check_record(path: Path) -> None:
    """Raise ReleaseError unless a wheel has the files of its RECORD with their hashes and sizes, each once."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        (record,) = (name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
        rows = list(csv.reader(wheel.read(record).decode().splitlines()))
        unequal = differences(names, [row[0] for row in rows])
        if unequal:
            raise ReleaseError(f"{path.name} and its RECORD have other files: {', '.join(unequal)}")
        for name, digest, size in rows:
            data = wheel.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if (digest, size) != (f"sha256={expected}", str(len(data))) and name != record:
                raise ReleaseError(f"{path.name} has a file that is not that of its RECORD: {name}")


def differences(*lists: Iterable[str]) -> list[str]:
    """Return the names that are not once in each list."""
    counts = [Counter(names) for names in lists]
    return sorted(name for name in set().union(*counts) if [count[name] for count in counts] != [1] * len(counts))


def check_bill(project: Project, path: Path) -> None:
    """Raise ReleaseError unless a bill of materials is valid by CycloneDX's own schema, and is of the version."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    problem = JsonStrictValidator(SchemaVersion.from_version(document["specVersion"])).validate_str(text)
    if problem is not None:
        raise ReleaseError(f"{path.name} is no valid bill of materials: {problem.data.message}")
    if "serialNumber" not in document:
        raise ReleaseError(f"{path.name} has no serial number, without which nothing attests it")
    described = document["metadata"]["component"]
    if (described["name"], described["version"]) != (project.name, project.version):
        raise ReleaseError(f"{path.name} is of another project: {described['name']} {described['version']}")


if __name__ == "__main__":
    sys.exit(main())
