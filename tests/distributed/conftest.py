import pytest
import torch.distributed as dist

from fastrack import Key
from fastrack.distributed import init_process_group


@pytest.fixture
def alone():
    """Form a sealed default process group of only this process."""
    init_process_group(Key.from_bytes(bytes(range(32))), store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()
