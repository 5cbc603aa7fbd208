"""Add to a bill of materials what a folder has besides: ``python .ci/bill.py BILL FOLDER``.

That is the compiled code of the wheels, and fastrack-bench, which is released with them.

The code is the output of compilers. No code of a C library or of zig is linked. LLVM's licence asks for no notice in
what LLVM compiles. Some functions of numba are inlined in the code, and numba's licence asks for its notice:
LICENSE-numba. The kernels for GPUs are only fastrack's own code, as NVRTC compiles it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
import uuid
import zipfile
from pathlib import Path
from typing import Any

MODULE = "fastrack/_crypto/_native.abi3.so"
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main(bill: Path, folder: Path) -> None:
    """Print the bill of materials with a component for each architecture's native extension, and for its kernels."""
    document = json.loads(bill.read_text())
    root = document["metadata"]["component"]["bom-ref"]
    wheels = sorted(folder.glob("*-abi3-*.whl"))
    added = [*map(component, wheels), *kernels(wheels[0])]  # which are the same in all wheels
    (beside,) = map(extension, folder.glob("fastrack_bench-*.whl"))
    document["components"] += [*added, beside]
    document["dependencies"] += [{"ref": each["bom-ref"]} for each in added]
    document["dependencies"] += [{"ref": beside["bom-ref"], "dependsOn": [root]}]
    (needs,) = (each for each in document["dependencies"] if each["ref"] == root)
    needs["dependsOn"] = sorted([*needs.get("dependsOn", []), *(each["bom-ref"] for each in added)])
    # What attests the bill asks for a serial number. This one is of the content, as the same content has the same bits.
    document["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True)).urn
    print(json.dumps(document, indent=2, sort_keys=True))


def component(path: Path) -> dict[str, Any]:
    """Return the description of a wheel's native extension."""
    with zipfile.ZipFile(path) as wheel:
        code = wheel.read(MODULE)
    made = made_with(code)
    return {
        "type": "file",
        "bom-ref": f"{MODULE} of {path.name}",
        "name": MODULE,
        "description": f"the native extension of {path.name}, which needs glibc only",
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(code).hexdigest()}],
        "licenses": [{"expression": "Apache-2.0 AND BSD-2-Clause"}],
        "components": [
            {
                "type": "library",
                "bom-ref": f"numba of {path.name}",
                "name": "numba",
                "version": made["numba"],
                "purl": f"pkg:pypi/numba@{made['numba']}",
                "description": "some functions of it, inlined",
                "licenses": [{"license": {"id": "BSD-2-Clause", "acknowledgement": "declared"}}],
            }
        ],
        "properties": [
            {"name": f"fastrack:build:{name}", "value": version}
            for name, version in sorted({**made, "ziglang": version_of("ziglang")}.items())
        ],
    }


def extension(path: Path) -> dict[str, Any]:
    """Return the description of the wheel of fastrack-bench, which requires fastrack-io and nothing else."""
    _, version, *_ = path.name.split("-")
    return {
        "type": "library",
        "bom-ref": path.name,
        "name": "fastrack-bench",
        "version": version,
        "purl": f"pkg:pypi/fastrack-bench@{version}",
        "description": "more commands of fastrack, released with it",
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        "licenses": [{"expression": "Apache-2.0"}],
    }


def kernels(path: Path) -> list[dict[str, Any]]:
    """Return the descriptions of the kernels that are compiled for GPUs."""
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in sorted(wheel.namelist()) if name.endswith((".cubin.xz", ".ptx.xz"))}
    return [
        {
            "type": "file",
            "bom-ref": name,
            "name": name,
            "description": "the kernels, compiled for GPUs; the same in the wheels of all architectures",
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
            "licenses": [{"expression": "Apache-2.0"}],
            "properties": [{"name": "fastrack:build:nvidia-cuda-nvrtc", "value": version_of("nvidia-cuda-nvrtc")}],
        }
        for name, data in files.items()
    ]


def made_with(code: bytes) -> dict[str, str]:
    """Return the versions that made a module, which its docstring has."""
    found = re.search(rb'\{"digests": [^\0]*\}', code)
    assert found, "expected the docstring of the module, found none"
    described = json.loads(found[0])
    return {name: described[name] for name in ("numba", "llvmlite", "llvm")}


def version_of(package: str) -> str:
    """Return the exact version of a package that the build takes."""
    for requirement in tomllib.loads(PROJECT.read_text())["build-system"]["requires"]:
        name, _, version = requirement.partition(";")[0].partition("==")
        if name == package:
            return version.strip()
    raise LookupError(f"expected {package} in build-system.requires, found none")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
