"""Stand in for maturin, so that pip loads a source archive without Rust: the metadata that pip asks for is in it."""

import re
import shutil
from pathlib import Path


def prepare_metadata_for_build_wheel(folder, _settings=None):
    """Copy the archive's metadata into a folder, and return its name."""
    fields = dict(re.findall(r"^(Name|Version): (.*)$", Path("PKG-INFO").read_text(), re.MULTILINE))
    made = Path(folder, f"{fields['Name']}-{fields['Version']}.dist-info")
    made.mkdir()
    shutil.copy("PKG-INFO", made / "METADATA")
    return made.name
