"""Roots that an owner names take the place of the vendors', and nothing else stands for them."""

import pytest

from fastrack.attest import TrustedRoots


@pytest.mark.parametrize("vendor", ["intel", "amd", "nvidia", "nvidia_rim"])
def test_no_vendor_is_trusted_by_default_where_its_roots_are_given_in_another_way(vendor):
    with pytest.raises(ValueError, match=f"expected other vendors, got {vendor}"):
        TrustedRoots(others={vendor: frozenset()})
    with pytest.raises(ValueError, match="An empty one trusts none"):
        TrustedRoots(**{vendor: None})
    assert getattr(TrustedRoots(**{vendor: frozenset()}), vendor) == frozenset()
