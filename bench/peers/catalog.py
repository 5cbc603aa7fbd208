"""The peers, in the order of the tables."""

from bench.peers.age import Age
from bench.peers.cobblestone import Cobblestone
from bench.peers.cryptotensors import Cryptotensors
from bench.peers.fastrack import Fastrack, FastrackInto, FastrackUnsynced
from bench.peers.fernet import Fernet
from bench.peers.kserve import KServe
from bench.peers.litdata import Litdata
from bench.peers.numpy import Numpy
from bench.peers.safetensors import Safetensors, SafetensorsClone, SafetensorsMapped
from bench.peers.streamers import Obstore, RunAi
from bench.peers.tensorizer import Tensorizer
from bench.peers.tink import Tink

PEERS = {
    "fastrack": Fastrack,
    "fastrack-unsynced": FastrackUnsynced,
    "fastrack-out": FastrackInto,
    "tensorizer": Tensorizer,
    "litdata": Litdata,
    "cryptotensors": Cryptotensors,
    "kserve": KServe,
    "age": Age,
    "tink": Tink,
    "cobblestone": Cobblestone,
    "fernet": Fernet,
    "safetensors": Safetensors,
    "safetensors-copied": SafetensorsClone,
    "safetensors-mapped": SafetensorsMapped,
    "runai": RunAi,
    "obstore": Obstore,
    "numpy": Numpy,
}
MEASURE = "fastrack"  # the reference of the comparison
