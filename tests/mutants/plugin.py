"""Plugin of pytest: the kernels are those of the folder that FASTRACK_KERNELS names."""

import os
from pathlib import Path

from helpers import kernel_host

# Before any test module takes it from there.
kernel_host.SOURCE = Path(os.environ["FASTRACK_KERNELS"]) / kernel_host.SOURCE.name
