from __future__ import annotations

import platform

import pytest
from helpers import kernel_host
from helpers.kernel_host import SOURCE, Host, Library
from helpers.kernel_suite import key, nonce, state  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def build_folder(pytestconfig, tmp_path_factory):
    """Where compiled kernels stay from one run to the next, if pytest keeps anything."""
    if not pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        return tmp_path_factory.mktemp("kernels")
    return pytestconfig.cache.mkdir("kernels")


@pytest.fixture(scope="session")
def build(build_folder):
    """Compiles a .cu file for the host, or skips where that is not possible."""
    if not kernel_host.is_there():
        pytest.skip("there is no g++ to compile the kernels for the host")
    if platform.machine() != "x86_64":
        pytest.skip("the shim runs kernels on x86-64 only")
    return lambda source, variant="watched": kernel_host.build(source, build_folder, variant)


@pytest.fixture(scope="session")
def host(build):
    return Host(Library.load(build(SOURCE)), kernel_host.constants(SOURCE))
