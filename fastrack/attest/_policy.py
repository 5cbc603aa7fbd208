"""Judge what evidence has proved: which machines are given the key."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self, cast

from fastrack._documents.fields import integer
from fastrack._documents.toml import Table
from fastrack._util.public import public
from fastrack._util.rights import open_own
from fastrack.attest._cpu.snp_kind import SnpPolicy
from fastrack.attest._cpu.tdx_kind import TdxPolicy
from fastrack.attest._errors import require_time_zone
from fastrack.attest._gpus.evidence import VerifiedGpuReport
from fastrack.attest._gpus.rim_match import MatchedGpuReport
from fastrack.attest._kinds import CPU_KINDS, VerifiedCpu, kind_of_verified
from fastrack.attest._policy_common import Judge
from fastrack.attest._policy_gpu import GpuPolicy, check_gpus, read_gpu
from fastrack.errors import AttestationError, FormatError

_VERSION = 1
_LARGEST = 1 << 20  # bytes of a policy file


@public
@dataclass(frozen=True, slots=True)
class Policy:
    r"""The proofs that a machine must have given before it is given a key. Read from TOML by `from_toml`.

    Attributes
    ----------
    tdx, snp, gpu : TdxPolicy, SnpPolicy and GpuPolicy, or None
        What is asked of machines with Intel TDX and AMD SEV-SNP, and of GPUs and NVSwitches; None if none are accepted.
    others : mapping of str to object
        The sections of other kinds of CPUs, by their names.

    Examples
    --------
    >>> from fastrack import attest
    >>> policy = attest.Policy.from_toml('''
    ... version = 1
    ... [cpu.tdx]
    ... mrtd = ["00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"]
    ... rtmr1 = ["ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100"]
    ... rtmr2 = "any"
    ... tcb_status = ["UpToDate", "SWHardeningNeeded"]
    ... max_collateral_age_days = 30
    ... ''')
    >>> policy.tdx.max_collateral_age.days, policy.tdx.allow_debug, policy.snp
    (30, False, None)
    >>> attest.Policy.from_toml("version = 1\n[gpu]\ncont = 8")
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the policy failed: expected one of the keys ... as gpu.cont, got ...
    """

    tdx: TdxPolicy | None = None
    snp: SnpPolicy | None = None
    gpu: GpuPolicy | None = None
    others: Mapping[str, object] = field(default_factory=dict, hash=False)

    @classmethod
    def from_toml(cls, source: str | os.PathLike[str]) -> Self:
        """Read a policy.

        Parameters
        ----------
        source : str or path-like
            TOML if it is text; the path of a file of it if it is a path, such as `pathlib.Path`.

        Raises
        ------
        FormatError
            If a key is unknown, missing, or has another type than it should; the message has its name, and the lines
            to add for those that say which software is given the key.
        KeyPermissionError
            If another user owns the file, may write to it, or may replace it.
        OSError
            If it cannot be read.
        """
        if isinstance(source, str) and source.endswith(".toml") and "\n" not in source:
            raise FormatError(f"reading the policy failed: expected TOML, got a path. Pass pathlib.Path({source!r}).")
        table = Table.parse(source if isinstance(source, str) else read_policy_text(source), "policy")
        if table.read("version", integer(0)) != _VERSION:
            raise table.refusal("version", _VERSION, "another or none")
        cpus: dict[str, Any] = {}
        if cpu := table.table("cpu"):
            for name, kind in CPU_KINDS.items():
                if section := cpu.table(name):
                    cpus[name] = kind.read_policy(section)
                    section.done()
            cpu.done()
        gpu = read_gpu(section) if (section := table.table("gpu")) else None
        table.done()
        return cls(tdx=cpus.pop("tdx", None), snp=cpus.pop("snp", None), gpu=gpu, others=cpus)

    def check_cpu(self, verified: VerifiedCpu, *, now: datetime) -> None:
        """Require that a verified CPU is one that this policy accepts.

        Parameters
        ----------
        verified : VerifiedTdxQuote or VerifiedSnpReport
            What `verify_tdx_quote` or `verify_snp_report` returned.
        now : datetime.datetime
            The time, with a time zone; for the age of collateral and revocation lists.

        Raises
        ------
        AttestationError
            If it is not; the error has the field, its value, and those that are allowed.
        TypeError, ValueError
            If it is of another type, such as a quote that was only parsed; or `now` has no time zone.
        """
        require_time_zone(now)
        self._judge_cpu(verified, now, None)

    def check_gpus(self, devices: Iterable[VerifiedGpuReport | MatchedGpuReport], *, now: datetime) -> None:
        """Require that verified GPUs and NVSwitches are ones that this policy accepts, and that none is there twice.

        It raises the same errors as `check_cpu`.

        Parameters
        ----------
        devices : iterable of MatchedGpuReport or VerifiedGpuReport
            All devices of the machine, each by what `match_measurements` or `verify_gpu_report` returned; the latter
            only suffices where the policy has ``require_manifests = false``.
        """
        require_time_zone(now)
        self._judge_gpus(list(devices), now, None)

    def find_mismatches(
        self, cpu: VerifiedCpu, devices: Iterable[VerifiedGpuReport | MatchedGpuReport] = (), *, now: datetime
    ) -> tuple[AttestationError, ...]:
        """Return all that this policy does not accept, to show it; none if `check_cpu` and `check_gpus` accept both.

        Parameters
        ----------
        cpu, devices, now
            As in `check_cpu` and `check_gpus`.

        Returns
        -------
        tuple of AttestationError
            An error for each field, in the order in which they are judged.
        """
        require_time_zone(now)
        found: list[AttestationError] = []
        self._judge_cpu(cpu, now, found)
        self._judge_gpus(list(devices), now, found)
        return tuple(found)

    def _judge_cpu(self, verified: VerifiedCpu, now: datetime, survey: list[AttestationError] | None) -> None:
        kind = kind_of_verified(verified)
        section = {**self.others, "tdx": self.tdx, "snp": self.snp}.get(kind.name)
        judge = Judge(kind.title, f"cpu.{kind.name}", now, survey)
        if _has_section(section, judge):
            kind.check(section, verified, judge)

    def _judge_gpus(
        self,
        devices: list[VerifiedGpuReport | MatchedGpuReport],
        now: datetime,
        survey: list[AttestationError] | None,
    ) -> None:
        judge = Judge("GPU evidence", "gpu", now, survey)
        if (devices or self.gpu) and _has_section(self.gpu, judge):
            check_gpus(cast(GpuPolicy, self.gpu), devices, judge)


def _has_section(section: object, judge: Judge) -> bool:
    """Require that a policy has a section. In a survey, return whether it has."""
    if section is None:
        wanted = f"a kind that the policy accepts, which has no [{judge.section}]"
        judge.refuse("kind", wanted, judge.evidence, None)
    return section is not None


def read_policy_text(path: os.PathLike[str]) -> str:
    """Return the text of a policy, from a file that only its owner may write to."""
    with open_own(path) as file:
        data = file.read(_LARGEST + 1)
    with suppress(ValueError):
        if len(data) <= _LARGEST:
            return data.decode()
    raise FormatError(
        f"reading the policy {path} failed: expected up to {_LARGEST} bytes of UTF-8, got others. Correct it."
    )
