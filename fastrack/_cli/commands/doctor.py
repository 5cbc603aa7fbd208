"""``fastrack doctor``: examine the machine, and state its protection."""

import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fastrack._cli.commands.selftest import CudaCheck, EngineCheck, check_cuda, check_engine
from fastrack._cli.console import clean, print_json, stdout
from fastrack._cli.errors import message_of, refuse_options
from fastrack._cli.machine import Cpu, CpuTee, Memory, read_cpu, read_memory, read_software, read_tee
from fastrack._cli.options import Json
from fastrack._cli.proofs import Proof, lacking_states, read_proofs
from fastrack._crypto import native
from fastrack._devices.graphics import Gpu, Graphics, read_graphics
from fastrack._keys.keyring import KEY_FILE_VARIABLE, KeyFolder, is_path, is_wrapped
from fastrack._keys.keys import Key
from fastrack._util.cpus import cpu_quota
from fastrack._util.key_text import looks_secret
from fastrack._util.shown import format_size
from fastrack.errors import FastrackError

if TYPE_CHECKING:
    from fastrack.kv._hosts import Host

_PART = re.compile(r"\.fastrack-[0-9a-f]{16}\.part")  # as `fastrack._util.atomic` names what is not complete


def doctor(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER...",
            help="Folders to look for what killed commands left, beside this one and that of temporary files.",
        ),
    ] = None,
    *,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Say of servers with KV caches what holds in them, in place of all else.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only what needs attention.")] = False,
    as_json: Json = False,
) -> None:
    """Examine this machine, and state what is protected on it and what is not."""
    refuse_options({"FOLDER": hosts and bool(folders)}, "it does not go with --hosts; leave one out")
    if hosts:
        _examine_hosts(quiet=quiet, as_json=as_json)
        return
    for folder in folders or ():
        refuse_options({"FOLDER": not folder.is_dir()}, f"expected a folder, got {str(folder)!r}")
    facts = gather(folders or ())
    statements = state(facts)
    if as_json:
        print_json(**asdict(facts), statements=[asdict(statement) for statement in statements])
    elif quiet:
        _show_lines({title: lines for title, lines in _sections(facts).items() if title in _faults(facts)}, stdout())
    else:
        show_facts(facts, statements, stdout())
    if facts.engine.problem is not None:
        raise typer.Exit(1)


def _examine_hosts(*, quiet: bool, as_json: bool) -> None:
    """Print what holds in each server that has a door for KV blocks, by its metadata: none of them is imported."""
    from fastrack.kv._hosts import HOSTS, installed, is_old

    found = {name: installed(name) for name in HOSTS}
    old = {name for name, version in found.items() if version is not None and is_old(name, version)}
    if as_json:
        facts = [
            {"name": name, "version": found[name], "refused": name in old, **host._asdict()}
            for name, host in HOSTS.items()
        ]
        print_json(hosts=facts)
    else:
        told = {name: _host_lines(host, found[name], name in old) for name, host in HOSTS.items()}
        _show_lines({name: lines for name, lines in told.items() if name in old or not quiet}, stdout())
    if old:
        raise typer.Exit(1)


def _host_lines(host: "Host", version: str | None, is_old: bool) -> list[tuple[str, str]]:
    if version is None:
        return [("version", f"not installed; {host.least} or later has doors")]
    if is_old:
        return [("version", f"{version}, which its doors refuse: {host.reason}. Update it to {host.least} or later")]
    return [
        ("version", f"{version}; {host.least} or later is needed"),
        ("on the GPU", f"sealed KV blocks: {host.on_gpu}"),
        ("tiers", host.tiers),
        ("confidential", host.confidential),
    ]


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The key file that the environment names, if any: the id of its key, or the reason why it is unusable.

    `path` is also None if the variable holds what looks like a key.
    """

    path: str | None = None
    key_id: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Observations on the machine. None of them is attested: its operator can fake all of them."""

    software: dict[str, str | None]
    cpu: Cpu
    cpu_quota: float | None  # CPUs that control groups give to this process; None if they set no quota
    memory: Memory
    code: dict[str, str | None]
    engine: EngineCheck
    tee: CpuTee
    graphics: Graphics
    cuda: CudaCheck | None  # None if no GPU was seen
    proofs: tuple[Proof, ...]
    key_file: KeyFile
    left_over: tuple[str, ...]  # files and folders that killed commands did not complete


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement on something that is protected on this machine, or is not."""

    protected: bool
    text: str


def gather(folders: Iterable[Path] = ()) -> Facts:
    """Return all observations. `folders` are looked through as well for what commands left."""
    graphics, tee = read_graphics(), read_tee()
    return Facts(
        software=read_software(),
        cpu=read_cpu(),
        cpu_quota=cpu_quota(),
        memory=read_memory(),
        code=read_machine_code(),
        engine=check_engine(),
        tee=tee,
        graphics=graphics,
        cuda=check_cuda() if graphics.gpus else None,
        proofs=read_proofs(tee, graphics),
        key_file=read_key_file(),
        left_over=tuple(find_left_over((Path(), Path(tempfile.gettempdir()), *folders))),
    )


def find_left_over(folders: Iterable[Path]) -> list[str]:
    """Return the paths of files and folders right in these folders that have the name of what is not complete."""
    found: list[str] = []
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        with suppress(OSError):  # a folder that may not be read
            found += sorted(str(path) for path in folder.iterdir() if _PART.fullmatch(path.name))
    return found


def read_machine_code() -> dict[str, str | None]:
    """Return the file and the origin of the engines' native extension, or the reason why it is absent and advice."""
    module = native.load()
    made = {} if module is None else native.module_facts(module)
    made_by = f"numba {made['numba']}, LLVM {made['llvm']}" if made else None
    return {"path": getattr(module, "__file__", None), "made_by": made_by, "problem": native.problem()}


def read_key_file() -> KeyFile:
    """Load the key file that the environment names, and wipe its key.

    From a folder, the sealing key is loaded. Providers are not asked, even for a wrapped key file, and no descriptor
    is read.
    """
    path = os.environ.get(KEY_FILE_VARIABLE)
    if not path:
        return KeyFile()
    try:
        if not is_path(path):
            return KeyFile(path)
        file = Path(path).expanduser()
        if is_wrapped(file):
            from fastrack.providers import WrappedKey

            return KeyFile(path, WrappedKey.load(file).key_id)
        key = KeyFolder(file).get_sealing_key() if file.is_dir() else Key.load(file)
    except (FastrackError, OSError) as error:
        return KeyFile(None if looks_secret(path) else path, problem=message_of(error))
    key.wipe()
    return KeyFile(path, key.id)


def state(facts: Facts) -> list[Statement]:
    """Return the statements that follow from the facts, protection first."""
    both = ((True, _PROTECTED), (False, (*_about_host(facts.tee), *_about_gpus(facts), *_ALWAYS)))
    return [Statement(protected, text) for protected, texts in both for text in texts]


_PROTECTED = (
    "A sealed tensor is encrypted and authenticated, stored and in transfer: it is readable with its key only.",
    "No byte is released before its chunk was authenticated.",
)
_ALWAYS = (
    "Names, dtypes, shapes and sizes are visible in the file; the parts that are read, and when, to the host.",
    "An older version of a whole file is accepted as genuine: compare the file id that `fastrack verify` prints.",
)


def _about_host(tee: CpuTee) -> list[str]:
    operator = "No sign of a CPU TEE: the operator of this machine can read that memory."
    if tee.kind is not None:
        operator = (
            f"Signs of {tee.kind} ({', '.join(tee.seen)}) may mean that its operator cannot read that memory. This was "
            "seen, not attested: check an attestation report before a key comes here."
        )
    memory = "Device cpu: an opened tensor lies in the memory of this machine, and so does the key while it is in use."
    return [memory, operator]


def _about_gpus(facts: Facts) -> list[str]:
    if facts.cuda is None:
        return ["No GPU was seen: everything is opened on the host."]
    if facts.cuda.usable:
        text = "an opened tensor lies in the memory of the GPU, and the owner's key in that of this machine."
    else:
        text = f"{facts.cuda.problem}. Everything is opened on the host, whatever the GPU protects."
    return [_about_mode(facts.graphics), f"Device cuda: {text}"]


def _about_mode(graphics: Graphics) -> str:
    mode = graphics.confidential
    if mode.enabled is None:
        return "The driver did not report confidential mode: assume that the host can read GPU memory."
    if mode.devtools:
        return "Dev-tools mode is on: debugging tools can read GPU memory, so nothing on the GPU is protected."
    if not mode.enabled and mode.encrypts_copies:
        return (
            "The driver reports protected PCIe, for the link to the GPUs. This was not attested: check an "
            "attestation report before you rely on it."
        )
    if not mode.enabled:
        alone = mode.multi_gpu not in {None, "none"}
        besides = f" ({mode.multi_gpu} does not protect copies between host and GPU)" if alone else ""
        return f"Confidential mode is off: GPU memory is not protected from its host{besides}."
    if mode.environment != "production":
        return f"Confidential mode is on in a {mode.environment} environment, which protects nothing."
    return (
        "The driver reports confidential mode. This was not attested: check an attestation report before a key "
        "comes here."
    )


def show_facts(facts: Facts, statements: list[Statement], console: Console) -> None:
    """Print the facts and the statements."""
    _show_lines(_sections(facts), console)
    for title, protected in (("What is protected here", True), ("What is not", False)):
        console.print(title, style="bold")
        table = Table.grid(padding=(0, 1), pad_edge=True)
        for statement in statements:
            if statement.protected is protected:
                table.add_row("-", clean(statement.text))
        console.print(table, soft_wrap=False)
        console.print()


def _show_lines(sections: dict[str, list[tuple[str, str]]], console: Console) -> None:
    """Print sections of labels and values, in lines that end between words. A longer word has a line of its own."""
    for title, lines in sections.items():
        console.print(title, style="bold")
        for label, value in lines:
            start, width = f"  {label:<13} ", max(console.width, 2 * _INDENT)
            for line in wrap(clean(value), width, initial_indent=start, subsequent_indent=" " * _INDENT, **_AT_SPACES):
                console.print(line)
        console.print()


_INDENT = 16
_AT_SPACES: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def _faults(facts: Facts) -> set[str]:
    """Return the titles of the sections that need attention."""
    faults = {
        "Engine": facts.engine.problem or facts.engine.fault,
        "Native extension": facts.code["problem"],
        "Key file": facts.key_file.problem,
        "Left over": facts.left_over,
    }
    return {title for title, fault in faults.items() if fault}


def _sections(facts: Facts) -> dict[str, list[tuple[str, str]]]:
    cpu, memory = facts.cpu, facts.memory
    present = [name for name, is_present in cpu.features.items() if is_present]
    lacking = [name for name, is_present in cpu.features.items() if not is_present]
    quota = "" if facts.cpu_quota is None else f", by a quota of {facts.cpu_quota:g} of the control group"
    return {
        "Software": [(name, version or "not installed") for name, version in facts.software.items()],
        "Machine": [
            ("CPU", f"{cpu.model} ({cpu.architecture}), {cpu.threads} usable{quota}"),
            ("features", f"{' '.join(present) or 'unknown'}{f'; without {chr(32).join(lacking)}' if lacking else ''}"),
            (
                "memory",
                f"{_maybe_size(memory.available)} free of {_maybe_size(memory.total)}, pages of {memory.page} bytes",
            ),
            ("huge pages", memory.huge_pages or "unknown"),
            (
                "CPU TEE",
                f"signs of {facts.tee.kind}: {', '.join(facts.tee.seen)}" if facts.tee.kind else "no sign of one",
            ),
        ],
        "Engine": _engine_lines(facts.engine),
        "Native extension": _code_lines(facts.code),
        "GPU": _gpu_lines(facts.graphics, facts.cuda),
        "Attestation": [(proof.part, str(proof)) for proof in facts.proofs],
        "Key file": _key_lines(facts.key_file),
        "Left over": _left_lines(facts.left_over),
    }


def _engine_lines(engine: EngineCheck) -> list[tuple[str, str]]:
    available = f"(available: {', '.join(engine.available)})"
    if engine.engine is None:
        return [("AES-GCM", f"none {available}"), ("self-test", f"FAILED: {engine.problem}")]
    if engine.problem is None:
        verdict = f"ok against OpenSSL; one thread seals {engine.seal_gbps:.2f} and opens {engine.open_gbps:.2f} GB/s"
    else:
        verdict = f"FAILED: {engine.problem}; do not use it, and report this"
    chosen = "the environment, with FASTRACK_ENGINE" if engine.forced else "fastrack; FASTRACK_ENGINE is not set"
    lines = [
        ("AES-GCM", f"{engine.engine}, {engine.threads} threads {available}"),
        ("chosen by", chosen),
        ("self-test", verdict),
    ]
    return lines if engine.fault is None else [*lines, ("passed over", engine.fault)]


def _code_lines(code: dict[str, str | None]) -> list[tuple[str, str]]:
    if code["problem"] is not None:
        return [("state", f"none: {code['problem']}")]
    file = code["path"] or "none: compiled in this process, as FASTRACK_ENGINE asks"
    return [("file", file), ("made by", code["made_by"] or "unknown")]


def _gpu_lines(graphics: Graphics, cuda: CudaCheck | None) -> list[tuple[str, str]]:
    if graphics.absent is not None:
        return [("driver", graphics.absent)]
    gpus = enumerate(graphics.gpus)
    lines = [("driver", graphics.driver or "unknown version"), *((f"GPU {n}", _describe_gpu(gpu)) for n, gpu in gpus)]
    if cuda is not None:
        lines.append(("self-test", "ok against the host" if cuda.usable else f"not usable: {cuda.problem}"))
        lines += [("kernels", f"compiled by {cuda.kernels}")] if cuda.kernels else []
        lines += _transfer_lines(cuda)
    mode = graphics.confidential
    lines.append(("confidential", _word(mode.enabled, "on", "off")))
    if mode.environment is not None:
        lines += [("environment", mode.environment), ("dev tools", _word(mode.devtools, "on", "off"))]
    if mode.enabled:
        lines += ({"ready": _word(mode.ready, "yes", "no")} | lacking_states(graphics)).items()
    if mode.multi_gpu is not None:
        lines.append(("multi-GPU", mode.multi_gpu))
    return lines + [("no answer", problem) for problem in graphics.problems]


def _transfer_lines(cuda: CudaCheck) -> list[tuple[str, str]]:
    from fastrack._devices.cuda.streams import CONNECTIONS, LANES, count_lanes

    lines = []
    if cuda.copies is not None:
        for label, way in (("copies up", cuda.copies.uploads), ("copies down", cuda.copies.downloads)):
            told = "64 KiB: page-locked memory {0:.1f}, pageable {2:.1f} GB/s; 4 MiB: {1:.1f}, {3:.1f} GB/s"
            lines.append((label, told.format(*way.page_locked, *way.pageable)))
    if count_lanes() < LANES:
        told = f"{CONNECTIONS}={os.environ[CONNECTIONS]} leaves transfers {count_lanes()} of {LANES} lanes"
        lines.append(("connections", f"{told}: a busy stream may delay others. Raise it unless a framework needs it"))
    return lines


def _describe_gpu(gpu: Gpu) -> str:
    told = f"{gpu.name or 'unknown'}, {_maybe_size(gpu.memory)}"
    node = gpu.numa_node
    if node is None:
        return told
    advice = f"numactl --cpunodebind={node} --membind={node}"
    far = f"; all CPUs of this process are of others. Start it with `{advice}`"
    return f"{told}, at NUMA node {node}{far if gpu.is_near is False else ''}"


def _key_lines(key_file: KeyFile) -> list[tuple[str, str]]:
    if key_file.path is None and key_file.problem is None:
        return [("variable", "FASTRACK_KEY_FILE is not set; commands take --key")]
    if key_file.key_id is None and key_file.problem is None:
        return [("source", f"{key_file.path}, which was not asked")]
    return [("path", key_file.path or "not shown"), ("key", key_file.key_id or f"cannot be used: {key_file.problem}")]


def _left_lines(paths: Sequence[str]) -> list[tuple[str, str]]:
    if not paths:
        return [("unfinished", "nothing seen, here and in the folder of temporary files")]
    advice = (
        "A command was killed before these were complete, or still writes them. What `unseal` left is plaintext. See "
        "that no fastrack runs there, then remove each with `rm -r`"
    )
    return [*(("unfinished", shlex.quote(path)) for path in paths), ("advice", advice)]


def _maybe_size(count: int | None) -> str:
    return "unknown" if count is None else format_size(count)


def _word(answer: Any, yes: str, no: str) -> str:
    return "unknown" if answer is None else yes if answer else no
