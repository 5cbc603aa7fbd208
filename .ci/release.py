"""Check a release: ``python .ci/release.py tag|changelog|files PROJECT ...``.

PROJECT is the name of a package: fastrack-io, or fastrack-testkit. The workflows and `make release-check` run the same
steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from datetime import date
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from tempfile import NamedTemporaryFile

ROOT = Path(__file__).parents[1]
SIGNERS = ".github/allowed_signers"
LINK = re.compile(rb"\]\((?!https://)([^)\s]*)\)")  # PyPI shows a relative link as one to itself


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
        ("tag", "the tag is signed, names the version, and stands on a commit of BRANCH"),
        ("changelog", "the changelog has the version, with a date; print what it says"),
        ("files", "FOLDER has the files of a release, and they are right"),
    ):
        step = steps.add_parser(name, help=summary, description=summary)
        step.add_argument("project", choices=PROJECTS)
        if name == "tag":
            step.add_argument("tag")
            step.add_argument("branch")
        if name == "files":
            step.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    project = PROJECTS[options.project]
    try:
        if options.step == "tag":
            check_tag(project, options.tag, options.branch)
        elif options.step == "changelog":
            print(notes_of(project, (project.root / "CHANGELOG.md").read_text(encoding="utf-8")))
        else:
            check_files(project, options.folder)
    except ReleaseError as error:
        print(f"{project.name}: {error}", file=sys.stderr)
        return 1
    return 0


# The tag.


def check_tag(project: Project, tag: str, branch: str) -> None:
    """Raise ReleaseError unless a signed tag of the version stands on the current commit, and that is merged."""
    expected = project.tag + project.version
    if tag != expected:
        raise ReleaseError(f"the tag does not name the version: expected {expected}, got {tag}")
    kind = git("cat-file", "-t", f"refs/tags/{tag}")
    if kind != "tag":
        raise ReleaseError(f"the tag carries no signature: expected an annotated tag, got a {kind}. Use git tag --sign")
    commits = git("rev-parse", f"refs/tags/{tag}^{{commit}}"), git("rev-parse", "HEAD")
    if len(set(commits)) != 1:
        raise ReleaseError(f"another commit is checked out: expected {commits[0]}, got {commits[1]}")
    git("merge-base", "--is-ancestor", "HEAD", branch, otherwise=f"the commit is not of {branch}. Merge it first")
    # Of the branch, not of the tag: who can push a tag alone cannot name a key of their own.
    signers = git("show", f"{branch}:{SIGNERS}", otherwise=f"{branch} has no {SIGNERS}, so no key may sign a release")
    with NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(signers + "\n")
        file.flush()
        settings = ("-c", f"gpg.ssh.allowedSignersFile={file.name}", "-c", "gpg.minTrustLevel=fully")
        git(*settings, "verify-tag", tag, otherwise=f"the tag is not signed by a key of {SIGNERS} in {branch}")
    print(f"{tag}: signed, annotated, on {commits[0]}")


def git(*arguments: str, otherwise: str = "") -> str:
    """Return what git prints, or raise ReleaseError with what git says, or with a sentence of one's own."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)  # noqa: S603, S607
    if done.returncode:
        raise ReleaseError(otherwise or done.stderr.strip())
    return done.stdout.strip()


# The changelog.


def notes_of(project: Project, changelog: str) -> str:
    """Return what a changelog says of the version, or raise ReleaseError unless it says something, and has a date."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    titles = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in sections}
    title = next((each for each in titles if each.startswith(f"[{project.version}]")), None)
    if title is None:
        raise ReleaseError(
            f"the changelog has no section of this version: expected ## [{project.version}] with a date, "
            f"got {', '.join(titles) or 'none'}. Rename Unreleased"
        )
    try:
        date.fromisoformat(title.partition(" - ")[2])
    except ValueError:
        raise ReleaseError(f"the version has no date: expected YYYY-MM-DD, got ## {title}") from None
    if not titles[title]:
        raise ReleaseError(f"the section of this version is empty: ## {title}")
    return titles[title]


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
    for path in folder.glob("*.cdx.json"):
        check_bill(project, path)
    print(f"{folder}: {len(found)} files of {project.stem}")


def names_of(project: Project) -> set[str]:
    """Return the names of the files of a release."""
    if project.name == "fastrack-testkit":
        return {f"{project.stem}-py3-none-any.whl", f"{project.stem}.tar.gz", "SHA256SUMS"}
    machines = (f"cp311-abi3-manylinux_2_28_{architecture}" for architecture in ("x86_64", "aarch64"))
    wheels = {f"{project.stem}-{tag}.whl" for tag in (*machines, "py3-none-any")}
    return wheels | {f"{project.stem}.tar.gz", f"{project.stem}.cdx.json", "SHA256SUMS"}


def check_hashes(folder: Path) -> None:
    """Raise ReleaseError unless SHA256SUMS has the hash of each other file, and of no more."""
    listed = {}
    for line in (folder / "SHA256SUMS").read_text(encoding="ascii").splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    files = {path.name: path for path in folder.iterdir() if path.name != "SHA256SUMS"}
    if set(listed) != set(files):
        raise ReleaseError(f"SHA256SUMS lists other files: {', '.join(sorted(set(listed) ^ set(files)))}")
    for name, path in files.items():
        if hashlib.sha256(path.read_bytes()).hexdigest() != listed[name]:
            raise ReleaseError(f"{name} is not the file of SHA256SUMS")


def check_metadata(project: Project, path: Path) -> None:
    """Raise ReleaseError unless a wheel or a source archive is of the project, and the links it shows are absolute."""
    data = metadata_of(path)
    found = (data["Name"], data["Version"])
    if found != (project.name, project.version):
        raise ReleaseError(f"{path.name} is of another project or version: {found[0]} {found[1]}")
    text = str(data.get_payload()).encode()
    relative = sorted({link.decode() for link in LINK.findall(text)})
    if relative:
        raise ReleaseError(f"{path.name} has a description with relative links: {', '.join(relative[:5])}")


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
