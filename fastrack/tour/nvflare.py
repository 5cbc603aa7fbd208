"""A tour as a job of NVFlare: each site is an accelerator, and the server carries sealed bytes that it cannot open.

Nothing in a job of `make_job` is custom code: the components are those of this module, and the function that runs a
visit is installed at the sites. A site names both in the ``class_allow_list`` of its ``resources.json``, see `allow`.

A tour is whole or it is nothing: a site that refuses, an exception in a filter, a dead client and a reply without
exactly one more receipt each end the job with a status other than ``FINISHED:COMPLETED``, and nothing is written.

Examples
--------
>>> from fastrack.tour import nvflare  # doctest: +SKIP
>>> job = nvflare.make_job(  # doctest: +SKIP
...     ["clinic", "lab", "clinic"], start="/tours/7/start", output="/tours/7/end", visit="ward.visits:train",
...     home="/srv/tour/{site}",
... )
>>> job.export_job("/tours/7/job")  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import format_exception, format_tb
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.learnable import Learnable
from nvflare.app_common.abstract.learnable_persistor import LearnablePersistor
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import CLASS_ALLOW_LIST, ComponentPathAuthorizer
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType

from fastrack._util.atomic import new_file, new_folder
from fastrack.errors import FastrackError, FormatError

__all__ = ["DataFilter", "ResultFilter", "TourController", "TourExecutor", "TourPersistor", "allow", "make_job"]

FILES = {"model": "model.safetensors", "manifest": "model.safetensors.manifest", "chain": "chain", "plan": "plan"}
TASK = "visit"
_ERROR = "fastrack_error"
_REASON = "failed-visit.txt"
_ERROR_LIMIT = 2000  # characters of an error that a site sends
_DXO = "DXO"

Members = dict[str, np.ndarray]


def make_job(
    order: Sequence[str],
    *,
    start: str,
    output: str,
    visit: str,
    home: str,
    name: str = "tour",
    seconds: int = 0,
) -> FedJob:
    """Make the job of a tour, for `FedJob.export_job`, or for NVFlare's simulator by way of its recipes.

    Parameters
    ----------
    order : sequence of str
        The site of each visit. A name may come several times.
    start, output : str
        At the server, the folder of the tour as it begins, and the folder that it is written to when it is whole.
        The output must not exist.
    visit : str
        At the sites, the function of a visit as ``package.module:function``. It is called with two paths, the folder
        of the tour, which it changes, and the `home` of the site.
    home : str
        At the sites, the folder of keys, grants and data. ``{site}`` in it stands for the name of the site.
    name : str, optional
        The name of the job.
    seconds : int, optional
        The time limit of a visit, from the moment it is offered to its site. 0 is no limit.
    """
    sites = sorted(set(order))
    job = FedJob(name=name, min_clients=len(sites), mandatory_clients=sites, fail_fast=True)
    job.set_app_packages([__name__.partition(".")[0]])  # installed at the sites, and so no custom code
    job.to_server(TourController(list(order), seconds=seconds))
    job.to_server(TourPersistor(start, output), id="persistor")
    job.to_server({"server": {"task_request_interval": 0.5}})  # sites ask as often, not every two seconds
    for site in sites:
        job.to(TourExecutor(visit, home), site, tasks=[TASK])
        job.to(DataFilter(), site, filter_type=FilterType.TASK_DATA, tasks=[TASK])
        job.to(ResultFilter(), site, filter_type=FilterType.TASK_RESULT, tasks=[TASK])
    return job


def allow(local: str | Path, *names: str) -> Path:
    """Allow the classes of this module, and functions of visits, in the ``resources.json`` of a site or a server.

    Parameters
    ----------
    local : path-like
        The folder ``local`` of the participant.
    *names : str
        What else to allow: ``package.module.function`` or, with a dot at its end, all of a package.

    Returns
    -------
    pathlib.Path
        The file, which takes the place of ``resources.json.default``.
    """
    path = Path(local) / "resources.json"
    before = path if path.exists() else path.with_name("resources.json.default")
    resources: dict[str, Any] = json.loads(before.read_bytes()) if before.exists() else {"format_version": 2}
    allowed = resources.setdefault(CLASS_ALLOW_LIST, list(DEFAULT_CLASS_ALLOW_LIST))
    allowed += [name for name in (f"{__name__}.", *names) if name not in allowed]
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        file.write(json.dumps(resources, indent=2).encode())
    return path


class TourController(Controller):
    """Controller of a tour: one visit after the other, and the end of the job at the first that is not as expected.

    Unlike NVFlare's ``CyclicController`` it never goes on to the next site after a timeout, and never keeps the model
    of a visit that failed.

    Parameters
    ----------
    order : list of str
        The site of each visit.
    persistor_id : str, optional
        The id of the `TourPersistor`.
    seconds : int, optional
        The time limit of a visit. 0 is no limit.
    """

    def __init__(self, order: list[str], persistor_id: str = "persistor", seconds: int = 0) -> None:
        super().__init__(task_check_period=0.1)
        self.order = order
        self.persistor_id = persistor_id
        self.seconds = seconds
        self._persistor: Any = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        persistor = fl_ctx.get_engine().get_component(self.persistor_id)
        if isinstance(persistor, TourPersistor):
            self._persistor = persistor
        else:
            self.system_panic(f"component {self.persistor_id}: expected a TourPersistor, got another", fl_ctx)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        try:
            _require_all(self.order, fl_ctx.get_engine().get_clients())
            learnable = self._persistor.load(fl_ctx)
            for number, site in enumerate(self.order):
                self.log_info(fl_ctx, f"visit {number + 1} of {len(self.order)}: {site}")
                learnable = Learnable(self._visit(site, dict(learnable), abort_signal, fl_ctx))
            self._persistor.save(learnable, fl_ctx)
        except Exception as error:  # noqa: BLE001 - whatever it is ends the job
            self.system_panic(f"the tour ended early, and nothing was written: {error}", fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_warning(fl_ctx, f"dropped a result of {client.name} that no visit waits for")

    def _visit(self, site: str, members: Members, abort_signal: Signal, fl_ctx: FLContext) -> Members:
        results: list[Any] = []

        def receive(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001 - NVFlare passes it by name
            results.append(client_task.result)

        task = Task(name=TASK, data=_to_shareable(members), result_received_cb=receive, timeout=self.seconds)
        self.send_and_wait(task=task, fl_ctx=fl_ctx, targets=[site], abort_signal=abort_signal)
        if len(results) != 1:  # cancelled by an exception in a filter, timed out, aborted or its client is dead
            raise RuntimeError(f"the visit at {site}: expected its result, got {task.completion_status}")
        code = results[0].get_return_code()
        if code != ReturnCode.OK:
            raise RuntimeError(f"the visit at {site}: expected the result OK, got {code}{_error_of(results[0])}")
        returned = _from_shareable(results[0])
        _require_one_more(members, returned, site)
        return returned


class TourPersistor(LearnablePersistor):
    """Files of a tour at the server: a folder that is read, and one that is written when the tour is whole.

    Parameters
    ----------
    start, output : str
        The two folders. The output must not exist.
    """

    def __init__(self, start: str, output: str) -> None:
        super().__init__()
        self.start = start
        self.output = output

    def load(self, fl_ctx: FLContext) -> Learnable:
        if Path(self.output).exists():
            raise FileExistsError(f"{self.output}: expected no such folder, got one. Name another output")
        return Learnable(_read(Path(self.start)))

    def save(self, learnable: Learnable, fl_ctx: FLContext) -> None:
        with new_folder(Path(self.output)) as folder:
            _write(folder, dict(learnable))


class TourExecutor(Executor):
    """Executor of visits at a site, by a function that the site allows.

    An exception in the function becomes the result ``EXECUTION_EXCEPTION``. Of errors of fastrack, whose messages hold
    no values, the server gets the message, of others the name of their class; ``failed-visit.txt`` in the home of the
    site has the whole traceback.

    Parameters
    ----------
    visit : str
        The function as ``package.module:function``.
    home : str
        The folder that it gets. ``{site}`` in it stands for the name of the site.
    """

    def __init__(self, visit: str, home: str) -> None:
        super().__init__()
        self.visit = visit
        self.home = home

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:  # all sites import what they need at once, before the first visit
            try:
                self._function(fl_ctx)
            except Exception:  # noqa: BLE001 - it is raised again at the visit, and reported then
                self.log_warning(fl_ctx, f"{self.visit} cannot be used")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        home = Path(self.home.replace("{site}", fl_ctx.get_identity_name()))
        try:
            members = _from_shareable(shareable)
            with tempfile.TemporaryDirectory(prefix="fastrack-tour-") as scratch:
                folder = Path(scratch, "tour")
                folder.mkdir()
                _write(folder, members)
                self._function(fl_ctx)(folder, home)
                return _to_shareable(_read(folder))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is ends the job
            self.log_error(fl_ctx, f"the visit failed: {_shown(error)}\n{''.join(format_tb(error.__traceback__))}")
            _keep(error, home)
            return make_reply(ReturnCode.EXECUTION_EXCEPTION, {_ERROR: _shown(error)})

    def _function(self, fl_ctx: FLContext) -> Callable[[Path, Path], object]:
        module, _, name = self.visit.partition(":")
        # Arguments of components are the job's, and NVFlare checks classes alone: without this a job could name any
        # function of the machine.
        ComponentPathAuthorizer().authorize_component_config({"path": f"{module}.{name}"}, fl_ctx=fl_ctx)
        function: Callable[[Path, Path], object] = getattr(importlib.import_module(module), name)
        return function


class DataFilter(Filter):
    """Filter of what comes to a site: the members of a tour, each as bytes, or an exception."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        filtered = _to_shareable(_from_shareable(shareable))
        filtered[ReservedHeaderKey.HEADERS] = {
            **shareable[ReservedHeaderKey.HEADERS],
            **filtered[ReservedHeaderKey.HEADERS],
        }
        return filtered


class ResultFilter(Filter):
    """Filter of what leaves a site: the members of a tour and nothing beside them, or an exception.

    It belongs in the job, and also in the ``privacy.json`` of a site that wants it for the jobs of others: whatever
    executor they name, no plain tensor leaves.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code()
        if code == ReturnCode.OK:
            return _to_shareable(_from_shareable(shareable))
        return make_reply(str(code), {_ERROR: str(shareable.get_header(_ERROR, ""))[:_ERROR_LIMIT]})


def _to_shareable(members: Members) -> Shareable:
    # They are no weights, which filters of others would change.
    return DXO(DataKind.APP_DEFINED, data=dict(members)).to_shareable()


def _from_shareable(shareable: Shareable) -> Members:
    others = set(shareable) - {_DXO, ReservedHeaderKey.HEADERS}
    members = from_shareable(shareable).data
    _require(not others and isinstance(members, dict) and set(members) == set(FILES), "its members and nothing else")
    for array in members.values():
        _require(type(array) is np.ndarray and array.dtype == np.uint8 and array.ndim == 1, "bytes")
    return dict(members)


def _require(is_met: bool, expected: str) -> None:
    if not is_met:
        raise FormatError(f"the load of a tour: expected {expected}, got something else. Let `make_job` make the job")


def _require_all(order: list[str], clients: list[Client]) -> None:
    absent = sorted(set(order) - {client.name for client in clients})
    if absent:
        raise RuntimeError(f"expected all sites of the tour, got none named {', '.join(absent)}. Start these clients")


def _require_one_more(sent: Members, returned: Members, site: str) -> None:
    before, after = _receipts(sent), _receipts(returned)
    _require(after[:-1] == before and len(after) == len(before) + 1, f"one more receipt from {site}")
    _require(np.array_equal(sent["plan"], returned["plan"]), f"the same plan from {site}")


def _receipts(members: Members) -> list[Any]:
    return list(json.loads(members["chain"].tobytes()))


def _read(folder: Path) -> Members:
    return {name: np.fromfile(folder / file, np.uint8) for name, file in FILES.items()}


def _write(folder: Path, members: Members) -> None:
    for name, file in FILES.items():
        with new_file(folder / file, members[name].size) as output:
            output.write(members[name].data)


def _shown(error: BaseException) -> str:
    if isinstance(error, FastrackError):
        return f"{type(error).__name__}: {error}"[:_ERROR_LIMIT]
    return f"{type(error).__name__}, with the reason in {_REASON} at the site"


def _keep(error: BaseException, home: Path) -> None:
    # Not in the log, which NVFlare streams to the server: the text of an exception may have values of the data.
    with contextlib.suppress(OSError), new_file(home / _REASON, mode=0o600) as file:
        file.write("".join(format_exception(error)).encode())


def _error_of(result: Shareable) -> str:
    text = str(result.get_header(_ERROR, ""))[:_ERROR_LIMIT]
    return f". {text}" if text else ". The log of the site has the reason"
