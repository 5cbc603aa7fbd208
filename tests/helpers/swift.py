"""OpenStack Swift on loopback with its S3 interface, from an environment that ``make swift`` fills."""

import contextlib
import getpass
import os
import re
import socket
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(os.environ.get("FASTRACK_SWIFT", ROOT / ".venv-swift" / "bin"))
USER, PASSWORD = "test:tester", "testing"
_SERVERS = ("account", "container", "object", "proxy")
_COMMON = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
devices = {folder}/srv
mount_check = false
user = {user}
workers = 0
log_name = {server}
recon_cache_path = {folder}
disable_fallocate = true
"""
_STORAGE = """[pipeline:main]
pipeline = {server}-server
[app:{server}-server]
use = egg:swift#{server}
"""
_PROXY = """[pipeline:main]
pipeline = catch_errors proxy-logging cache listing_formats bulk s3api tempauth slo dlo versioned_writes symlink \
proxy-logging proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin http://127.0.0.1:{port}/v1/AUTH_test
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
s3_acl = false
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
""" + "".join(
    f"[filter:{name}]\nuse = egg:swift#{name.replace('-', '_')}\n"
    for name in ("catch_errors", "proxy-logging", "bulk", "slo", "dlo", "listing_formats", "symlink")
)


def is_installed():
    return (BIN / "swift-proxy-server").exists()


class Swift:
    """Four servers of one device in a folder; `endpoint` is the address of the S3 interface."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.ports = dict(zip(_SERVERS, free_ports(len(_SERVERS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{self.ports['proxy']}"
        self._stack = contextlib.ExitStack()

    def requests(self):
        """Return the methods and paths that the S3 interface was asked for, by its log."""
        lines = (self.folder / "proxy.log").read_text().splitlines()
        found = [re.search(r" (GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1", line) for line in lines]
        # Each is followed by what it becomes, of Swift's own interface.
        return [match.groups() for match in found if match and not match[2].startswith("/v1/")]

    def __enter__(self):
        (self.folder / "srv" / "d1").mkdir(parents=True)
        (self.folder / "swift.conf").write_text(
            "[swift-hash]\nswift_hash_path_suffix = test\n[storage-policy:0]\nname = one\ndefault = yes\n"
        )
        for server, port in self.ports.items():
            text = _COMMON.format(port=port, folder=self.folder, user=getpass.getuser(), server=server)
            text += (_PROXY if server == "proxy" else _STORAGE).format(port=port, server=server)
            (self.folder / f"{server}.conf").write_text(text)
            if server != "proxy":
                self._ring("create", server, "4", "1", "1")
                self._ring("add", server, f"r1z1-127.0.0.1:{port}/d1", "1")
                self._ring("rebalance", server)
        for server in _SERVERS:
            log = self._stack.enter_context((self.folder / f"{server}.log").open("wb"))
            command = [BIN / f"swift-{server}-server", self.folder / f"{server}.conf", "-v"]
            environment = {**os.environ, "SWIFT_DIR": str(self.folder)}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            self._stack.callback(process.wait, 20)
            self._stack.callback(process.terminate)
        try:
            self._wait()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _ring(self, verb, server, *values):
        command = [BIN / "swift-ring-builder", f"{server}.builder", verb, *values]
        subprocess.run(command, cwd=self.folder, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _wait(self):
        end = time.monotonic() + 60
        for port in self.ports.values():
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                if time.monotonic() > end:
                    raise TimeoutError(f"Swift did not start; see {self.folder}/*.log")
                time.sleep(0.1)


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
