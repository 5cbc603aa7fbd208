"""NVFlare on this machine: its simulator, and a proof of concept with a server and clients as processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.tool.poc import poc_commands

from fastrack.tour import nvflare

ADMIN = "admin@nvidia.com"
ROOT = Path(__file__).parents[2]
RIGHTS = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "shell_commands")


def environment():
    """Return variables with which processes find what the tests import, and the python of this environment."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return os.environ | {"PYTHONPATH": paths, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def simulate(job, workspace, settings, allowed=()):
    """Run an exported job in the simulator, with `settings` by sites. Return its exit status and its log."""
    nvflare.allow(workspace / "local", *allowed)
    for site, content in settings.items():
        (workspace / "local" / f"visit-{site}.toml").write_text(content)
    command = ["-m", "nvflare.private.fed.app.simulator.simulator", job, "-w", workspace]
    command += ["-c", ",".join(settings), "-t", len(settings)]
    while True:
        status, log = _simulate([sys.executable, *map(str, command)], workspace.with_suffix(".log"))
        if status is not None:
            return status, log


def _simulate(command, path):
    """Run the simulator once. The status is None if it lost a site before it started, and waits for it for ever.

    It finds a free port for each site, and closes it; another process may have it before the site does.
    """
    limit = time.monotonic() + 90
    with path.open("wb") as output:
        run = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while run.poll() is None and "Communication error with client" not in path.read_text():
            assert time.monotonic() < limit, path.read_text()
            time.sleep(0.1)
        return run.returncode, path.read_text()
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


@contextlib.contextmanager
def deployed(folder, sites, allowed):
    """Start a server and clients that take no custom code, and log in."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment(), "HOME": str(folder), "NVFLARE_POC_WORKSPACE": str(folder / "poc")}.items():
            patch.setenv(name, value)
        workspace = str(folder / "poc")
        poc_commands.prepare_poc_provision(
            clients=sites, number_of_clients=len(sites), workspace=workspace, docker_image=None
        )
        production = Path(poc_commands.get_prod_dir(workspace))
        for participant in ("server", *sites):
            nvflare.allow(production / participant / "local", *allowed)
            _refuse_custom_code(production / participant / "local")
        poc_commands._start_poc(poc_workspace=workspace, gpu_ids=[], excluded=[ADMIN], services_list=[])
        try:
            session = _login(production / ADMIN, len(sites))
            yield Deployment(session, folder / "poc", production)
            session.close()
        finally:
            poc_commands._stop_poc(poc_workspace=workspace, excluded=[ADMIN], services_list=[])


class Deployment:
    def __init__(self, session, workspace, production):
        self.workspace = workspace
        self._session = session
        self._production = production

    def configure(self, settings):
        """Write what each site says of its visits."""
        for site, content in settings.items():
            (self._production / site / "local" / "visit.toml").write_text(content)

    def run(self, job, seconds=80):
        """Run an exported job. Return what the server says of it at its end."""
        number, limit = self._session.submit_job(str(job)), time.monotonic() + seconds
        while not (about := self._session.get_job_meta(number))["status"].startswith("FINISHED"):
            assert time.monotonic() < limit, about
            time.sleep(0.2)
        return about


def contents(*folders):
    """Return the contents of all files below folders by their paths, of archives those of their members."""
    found = {}
    for path in chain.from_iterable(folder.rglob("*") for folder in folders):
        if path.is_file():
            found[str(path)] = path.read_bytes()
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    found |= {f"{path}: {name}": archive.read(name) for name in archive.namelist()}
    return found


def _refuse_custom_code(local):
    path = local / "authorization.json"
    rules = json.loads(path.with_name("authorization.json.default").read_bytes())
    rules["permissions"]["project_admin"] = {**dict.fromkeys(RIGHTS, "any"), "byoc": "none"}
    path.write_text(json.dumps(rules))


def _login(startup, count):
    limit = time.monotonic() + 40
    while True:
        with contextlib.suppress(Exception):
            session = new_secure_session(username=ADMIN, startup_kit_location=str(startup), timeout=1)
            break
        assert time.monotonic() < limit
        time.sleep(0.2)
    while len(session.get_system_info().client_info) < count:
        assert time.monotonic() < limit
        time.sleep(0.2)
    return session
