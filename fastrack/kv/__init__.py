"""KV caches whose blocks cannot be swapped: sealed blocks for vLLM, LMCache and SGLang.

Servers swap blocks of their KV caches to host memory, disks and shared stores, and take what comes back for what they
stored. Here each block is a message that opens as the block of its tokens, model, layout, rank and tenant, and as
nothing else. What does not open is a miss: the server computes it anew.

`BlockSealer` seals blocks in memory, `BlockFolder` keeps them in files. The doors of the servers are modules that
import their server: ``fastrack.kv.vllm`` (a connector), ``fastrack.kv.vllm_tier`` (a tier of its offloading),
``fastrack.kv.lmcache`` (an L2 adapter, and a serde) and ``fastrack.kv.sglang`` (a storage backend of HiCache).
"""

from fastrack._util.public import published as _published
from fastrack.kv._folder import BlockFolder
from fastrack.kv._sealer import BlockContext, BlockSealer

__all__ = ["BlockContext", "BlockFolder", "BlockSealer"]

for _name in __all__:
    globals()[_name] = _published(globals()[_name], __name__)
