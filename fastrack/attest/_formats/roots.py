"""The trusted roots of evidence, as SHA-256 fingerprints of certificates.

Each verifier accepts other roots by `roots=`, for tests and private PKIs.
"""

from collections.abc import Collection
from typing import Final, TypeAlias

Roots: TypeAlias = Collection[str]
"""The type of ``roots=``: SHA-256 fingerprints of root certificates, as 64 lower-case hexadecimal digits each."""

INTEL_ROOTS: Final = frozenset({"44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3"})
"""Intel SGX Root CA: https://certificates.trustedservices.intel.com/IntelSGXRootCA.der, valid from 2018 to 2049."""

AMD_ROOTS: Final = frozenset(
    {
        "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd",  # ARK-Milan, 2020 to 2045
        "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1",  # ARK-Genoa, 2022 to 2047
        "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a",  # ARK-Turin, 2023 to 2048
    }
)
"""AMD root keys (ARK) by product: https://kdsintf.amd.com/vcek/v1/PRODUCT/cert_chain, AMD 57230 section 4."""

NVIDIA_ROOTS: Final = frozenset({"102bf659d5419614c9d8e6aecebc80454eb26b1df6a769ac720b9a690b167b48"})
"""NVIDIA Device Identity CA, the last certificate of every chain that a GPU or NVSwitch hands out; 2021 to 9999."""

NVIDIA_RIM_ROOTS: Final = frozenset({"12977b5115acb0381179279fffeb5a8c4d264971ebb32298023a465fa41df5d1"})
"""NVIDIA CoRIM signing Root CA, the last certificate in every reference manifest of NVIDIA's service; 2023 to 2053."""
