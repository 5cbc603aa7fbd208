"""Describe a kind of CPU evidence to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from fastrack._documents.fields import Fields
from fastrack._documents.toml import Table
from fastrack._util.gate import most_bytes
from fastrack._util.regular_file import open_regular
from fastrack.attest._cpu.tdx_collateral import TdxCollateral
from fastrack.attest._errors import CollateralFileError
from fastrack.attest._formats.roots import Roots
from fastrack.attest._policy_common import Judge, Line
from fastrack.errors import AttestationError, DeviceError, FormatError

LARGEST = most_bytes("collateral")  # or of a report


class Verified(Protocol):
    """The claims of verified evidence."""

    @property
    def report_data(self) -> bytes:
        """64 bytes that the guest chose."""

    @property
    def valid_until(self) -> datetime:
        """The first time that a document behind the claims expires."""


E = TypeVar("E")
V = TypeVar("V", bound=Verified)
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class CpuKind(Generic[E, V, P]):
    """A kind of evidence of CPUs.

    name : in the member "type" of an offer, in the section ``[cpu.NAME]`` of a policy, and in commands' output
    title : of the evidence in errors; document : its name in `fastrack doctor`; platform : the CPU's own name
    provider : the Linux driver of the evidence, by its name in configfs-tsm, in /dev, and as a kernel module
    vendor : the member of `TrustedRoots`, or of its `others`, with root fingerprints; roots : the default
    """

    name: str
    title: str
    document: str
    platform: str
    provider: str
    vendor: str
    roots: Roots
    evidence: type[E]
    verified: type[V]
    fields: Fields
    """The fields of its members in an offer, but "type"."""
    optional: tuple[str, ...]
    """The names of members that are absent where the evidence has None."""
    collect: Callable[[bytes, bytes], E]
    """Make evidence of the report that the kernel gave, and of what the host handed out with it, which may be empty."""
    report_data: Callable[[E], bytes]
    """Return the 64 bytes that the guest chose, of evidence that is only parsed."""
    bare: Callable[[E], E]
    """Leave out the machine's collateral, of which an owner with their own takes nothing."""
    complete: Callable[[E, TdxCollateral | Path], E]
    """Take the owner's collateral, or what a folder of it has, in place of the machine's."""
    verify: Callable[[E, datetime, Roots], V]
    """Verify the evidence."""
    read_policy: Callable[[Table], P]
    """Read the section of a policy."""
    check: Callable[[P, V, Judge], None]
    """Raise `AttestationError` unless a section accepts what was verified."""
    draft: Callable[[V], Iterable[Line]]
    """Draft the section of a policy that accepts what was verified, and nothing else."""
    draft_claims: Callable[[E], Iterable[Line]]
    """Draft what evidence claims that is only parsed."""
    describe: Callable[[V], dict[str, object]]
    """Return the main claims as text and numbers, none of which is a secret."""
    flag: str = ""
    """The flag that the CPU has in a guest, by its name in /proc/cpuinfo, if there is one."""


def cpu_error(wanted: str, found: str, advice: str) -> DeviceError:
    """Make the error for evidence or collateral that the machine lacks."""
    return DeviceError(f"collecting evidence of the CPU failed: expected {wanted}, got {found}. {advice}")


def read_collateral(path: Path, limit: int = LARGEST) -> bytes | None:
    """Return the content of a collateral file; None if it does not exist."""
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    if len(data) > limit:
        raise CollateralFileError(f"reading {path} failed: expected at most {limit} bytes, got more. Remove it.")
    return bytes(data)


@contextmanager
def own_file(path: Path) -> Iterator[None]:
    """Tell errors in a file of collateral, with its name, from those in what a machine sent."""
    try:
        yield
    except (FormatError, AttestationError) as error:
        raise CollateralFileError(f"reading {path} failed: {error} Fetch it again, or remove it.") from None
