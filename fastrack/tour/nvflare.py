"""A tour as a job of NVFlare: each site is an accelerator, and the server carries sealed bytes that it cannot open.

Nothing in a job of `make_job` is custom code: the components are those of this module, and a site names them in the
``class_allow_list`` of its ``resources.json``, see `allow`. Nor does a job name code, data or addresses: these are in
``visit.toml`` in the folder ``local`` of the site. `TourExecutor` lists its keys.

Each visit is verified before it is kept: a site that refuses, an exception in a filter, a dead client and a reply
without exactly one more receipt each end the job with a status other than ``FINISHED:COMPLETED``. The output is written
when all visits are made, whole. The last verified visit is kept beside it, and the next job goes on from there.

Examples
--------
>>> from fastrack.tour import nvflare  # doctest: +SKIP
>>> job = nvflare.make_job(  # doctest: +SKIP
...     "/tours/7/start", "/tours/7/end", owner=Verifier.load("owner.signer.pub"), sites={"St. Mary": "clinic-1"}
... )
>>> job.export_job("/tours/7/job")  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from importlib import import_module
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
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.app_common.abstract.learnable import Learnable
from nvflare.app_common.abstract.learnable_persistor import LearnablePersistor
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import CLASS_ALLOW_LIST
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType

from fastrack._keys.signing import Verifier
from fastrack._util.atomic import new_file
from fastrack._util.new_folder import new_folder
from fastrack.errors import FastrackError, FormatError, RollbackError
from fastrack.tour._chain import Chain
from fastrack.tour._folder import FILES, verify_files
from fastrack.tour._settings import VisitSettings
from fastrack.tour._visit import visit

__all__ = ["DataFilter", "ResultFilter", "TourController", "TourExecutor", "TourPersistor", "allow", "make_job"]

TASK = "visit"
SETTINGS = "visit.toml"
_REASON = "failed-visit.txt"
_ERROR = "fastrack_error"
_ERROR_LIMIT = 400  # characters of an error that a site sends
_DXO = "DXO"

_CODES = {value for name, value in vars(ReturnCode).items() if not name.startswith("_")}

Members = dict[str, np.ndarray]


def make_job(
    start: str,
    output: str,
    *,
    owner: Verifier,
    sites: Mapping[str, str] | None = None,
    name: str = "tour",
    seconds: int = 0,
) -> FedJob:
    """Make the job of a tour, for `FedJob.export_job`, or for NVFlare's simulator by way of its recipes.

    Parameters
    ----------
    start, output : str
        The folder that `fastrack.tour.start` wrote, which is read here and at the server; and at the server, the folder
        that the model of the last visit is written to. The output must not exist.
    owner : Verifier
        The public key of the owner of the model.
    sites : mapping of str to str, optional
        The names of the sites by the names of their holders in the plan. A holder that is not in it has its site's
        name.
    name : str, optional
        The name of the job.
    seconds : int, optional
        The time limit of a visit, from the moment it is offered to its site. 0, the default, is none but the plan's.

    Raises
    ------
    RollbackError, SignatureError, AuthenticationError, FormatError
        If `start` is no folder of a tour of this owner.
    OSError
        If it cannot be read.
    """
    key, named = str(owner), dict(sites or {})
    plan = verify_files(_read(Path(start)), owner).plan
    clients = sorted({named.get(holder, holder) for holder in plan.holders})
    job = FedJob(name=name, min_clients=len(clients), mandatory_clients=clients, fail_fast=True)
    job.set_app_packages([__name__.partition(".")[0]])  # installed at the sites, and so no custom code
    job.to_server(TourController(key, named, seconds=seconds))
    job.to_server(TourPersistor(start, output, key), id="persistor")
    job.to_server({"server": {"task_request_interval": 0.5}})  # sites ask as often, not every two seconds
    for client in clients:
        # For `TASK` by its name: NVFlare applies no filter that is meant for all tasks.
        job.to(TourExecutor(key), client, tasks=[TASK])
        job.to(DataFilter(key), client, filter_type=FilterType.TASK_DATA, tasks=[TASK])
        job.to(ResultFilter(key), client, filter_type=FilterType.TASK_RESULT, tasks=[TASK])
    return job


def allow(local: str | Path, *names: str) -> Path:
    """Allow the classes of this module in the ``resources.json`` of a site or a server.

    Parameters
    ----------
    local : path-like
        The folder ``local`` of the participant.
    *names : str
        What else to allow: ``package.module.Class`` or, with a dot at its end, all of a package.

    Returns
    -------
    pathlib.Path
        The file, which takes the place of ``resources.json.default``.
    """
    path = Path(local) / "resources.json"
    before = path if path.exists() else path.with_name("resources.json.default")
    resources: dict[str, Any] = json.loads(before.read_bytes()) if before.exists() else {"format_version": 2}
    allowed = resources.setdefault(CLASS_ALLOW_LIST, list(DEFAULT_CLASS_ALLOW_LIST))
    # Each by its whole name: with a prefix a job could build what this module imports, such as `import_module`.
    own = [f"{__name__}.{each.__name__}" for each in COMPONENTS]
    allowed += [name for name in (*own, *names) if name not in allowed]
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        file.write(json.dumps(resources, indent=2).encode())
    return path


class TourController(Controller):
    """Controller of a tour: one visit after the other, and the end of the job at the first that is not as expected.

    The order is the plan's. Unlike NVFlare's ``CyclicController`` it never goes on to the next site after a timeout,
    and never keeps the model of a visit that failed.

    Parameters
    ----------
    owner : str
        The public key of the owner of the model, as text.
    sites : dict of str to str, optional
        The names of the sites by the names of their holders, where they differ.
    persistor_id : str, optional
        The id of the `TourPersistor`.
    seconds : int, optional
        The time limit of a visit. 0 is no limit.
    """

    def __init__(
        self, owner: str, sites: dict[str, str] | None = None, persistor_id: str = "persistor", seconds: int = 0
    ) -> None:
        super().__init__(task_check_period=0.1)
        self.owner = owner
        self.sites = sites or {}
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
            members = dict(self._persistor.load(fl_ctx))
            chain = _verify(members, self.owner)
            order = [self.sites.get(holder, holder) for holder in chain.plan.order]
            _require_all(order, fl_ctx.get_engine().get_clients())
            for number in range(len(chain.visits), len(order)):
                self.log_info(fl_ctx, f"visit {number + 1} of {len(order)}: {order[number]}")
                members = self._visit(order[number], members, abort_signal, fl_ctx)
                chain = _require_next(chain, _verify(members, self.owner), order[number])
                self._persistor.keep(members)
            self._persistor.save(Learnable(members), fl_ctx)
        except Exception as error:  # noqa: BLE001 - whatever it is ends the job
            self.system_panic(f"the tour was interrupted, and no output was written: {error}", fl_ctx)

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
        return _from_shareable(results[0])


class TourPersistor(LearnablePersistor):
    """Files of a tour at the server: as it begins, as it is after each visit, and when all visits are made.

    Parameters
    ----------
    start, output : str
        The folder to read, and the one to write at the end, which must not exist. Beside it ``OUTPUT.progress`` keeps
        the last verified visit of a tour that was interrupted. The next job goes on from there.
    owner : str
        The public key of the owner of the model, as text.
    """

    def __init__(self, start: str, output: str, owner: str) -> None:
        super().__init__()
        self.start = start
        self.output = output
        self.owner = owner

    def load(self, fl_ctx: FLContext) -> Learnable:
        if Path(self.output).exists():
            raise FileExistsError(f"{self.output}: expected no such folder, got one. Name another output")
        Path(self.output).parent.mkdir(parents=True, exist_ok=True)
        members = _read(Path(self.start))
        plan = _verify(members, self.owner).plan
        if kept := self._kept():
            members = _read(kept[-1])
            found = _verify(members, self.owner).plan
            if found.digest != plan.digest:
                raise RollbackError(
                    f"{kept[-1]}: expected plan {plan.digest:.16}…, got {found.digest:.16}…. Move it away"
                )
        return Learnable(members)

    def keep(self, members: Members) -> None:
        """Keep a visit, and the one before."""
        chain = _verify(members, self.owner)
        earlier = self._kept()[:-1]  # the one before stays: a later attempt at this visit would begin with it
        self._progress.mkdir(parents=True, exist_ok=True)
        with new_folder(self._progress / f"visit-{len(chain.visits)}") as folder:
            _write(folder, members)
        _remove(earlier)

    def save(self, learnable: Learnable, fl_ctx: FLContext) -> None:
        members = dict(learnable)
        chain = _verify(members, self.owner)
        if len(chain.visits) != len(chain.plan.order):
            raise RollbackError(
                f"{self.output}: expected {len(chain.plan.order)} visits, got {len(chain.visits)}. Go on with the tour"
            )
        with new_folder(Path(self.output)) as folder:
            _write(folder, members)
        _remove(self._kept())
        with contextlib.suppress(OSError):  # of other files there
            self._progress.rmdir()

    @property
    def _progress(self) -> Path:
        return Path(f"{self.output}.progress")

    def _kept(self) -> list[Path]:
        """Return the folders of visits, the newest one last."""
        found = [path for path in self._progress.glob("visit-*") if path.name.removeprefix("visit-").isdecimal()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("visit-")))


class TourExecutor(Executor):
    """Executor of visits at a site, as ``local/visit.toml`` of the site says.

    That file is TOML, and no other user may write to it or to its folder. Relative paths begin at its folder; unknown
    keys are refused. Where sites share a folder, as in the simulator, ``visit-SITE.toml`` is read in its place.

    ================================  ==================================================================================
    ``owner``                         the public key of the owner whose models are trained here, as text
    ``holder``                        the name in the plan of the holder whose data are here
    ``train``                         ``module:function``, as for `fastrack.tour.visit`
    ``data``                          the sealed files: a list of paths and URLs
    ``device``, ``collect``           optional; ``cuda:0``, and another ``module:function`` than `collect_evidence`
    ``[owner_desk]``                  ``url``, and optionally ``certificate``, ``private_key``, ``ca``, ``timeout`` in
                                      seconds, as for `fastrack.tour.RemoteDesk`
    ``[holder_desk]``                 the same
    ================================  ==================================================================================

    An exception becomes the result ``EXECUTION_EXCEPTION``. Of errors of fastrack, whose messages hold no values, the
    server gets the message, of others the name of their class; ``failed-visit.txt`` in the workspace of the site has
    the whole traceback.

    Parameters
    ----------
    owner : str
        The public key of the owner of the model, as text. A site whose file names another one refuses.
    """

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:  # all sites import what they need at once, before the first visit
            try:
                import_module(_settings(fl_ctx).train.partition(":")[0])
            except Exception:  # noqa: BLE001 - it is raised again at the visit, and reported then
                self.log_warning(fl_ctx, f"{SETTINGS} cannot be used")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        home = Path(_workspace(fl_ctx).get_root_dir())
        try:
            members, settings = _from_shareable(shareable), _settings(fl_ctx)
            settings.require_turn(_verify(members, self.owner))
            with tempfile.TemporaryDirectory(prefix="fastrack-tour-") as scratch:
                given, made = Path(scratch, "given"), Path(scratch, "made")
                given.mkdir()
                _write(given, members)
                visit(given, made, **settings.arguments())
                return _to_shareable(_read(made))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is ends the job
            self.log_error(fl_ctx, f"the visit failed: {_shown(error)}\n{''.join(format_tb(error.__traceback__))}")
            _keep_reason(error, home)
            return make_reply(ReturnCode.EXECUTION_EXCEPTION, {_ERROR: _shown(error)})


class DataFilter(Filter):
    """Filter of what comes to a site: the files of a tour, verified, or an exception.

    Parameters
    ----------
    owner : str
        The public key of the owner of the model, as text.
    """

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        members = _from_shareable(shareable)
        _verify(members, self.owner)
        filtered = _to_shareable(members)
        filtered[ReservedHeaderKey.HEADERS] = shareable[ReservedHeaderKey.HEADERS] | filtered[ReservedHeaderKey.HEADERS]
        return filtered


class ResultFilter(Filter):
    """Filter of what leaves a site: the files of a tour after a visit and nothing beside them, or an exception.

    It belongs in the job, and also in the ``privacy.json`` of a site that wants it for the jobs of others: whatever
    executor they name, no model leaves but one that is sealed and signed by a visit that this owner delegated. Of an
    error 400 characters leave. It is no sandbox: an executor that means to can hide some bits in what leaves.

    Parameters
    ----------
    owner : str
        The public key of the owner of the model, as text.
    """

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            known = code if code in _CODES else ReturnCode.EXECUTION_EXCEPTION  # no text of an executor's own
            return make_reply(known, {_ERROR: str(shareable.get_header(_ERROR, ""))[:_ERROR_LIMIT]})
        members = _from_shareable(shareable)
        _require(bool(_verify(members, self.owner).visits), "a receipt")
        return _to_shareable(members)


def _verify(members: Members, owner: str) -> Chain:
    return verify_files(members, Verifier.parse(owner))


def _to_shareable(members: Members) -> Shareable:
    # They are no weights, which filters of others would change.
    return DXO(DataKind.APP_DEFINED, data=dict(members)).to_shareable()


def _from_shareable(shareable: Shareable) -> Members:
    others = set(shareable) - {_DXO, ReservedHeaderKey.HEADERS}
    members = from_shareable(shareable).data
    _require(not others and isinstance(members, dict) and set(members) == set(FILES), "its files and nothing else")
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


def _require_next(before: Chain, after: Chain, site: str) -> Chain:
    """Return the chain with the receipt of one more visit, whose holder had the turn."""
    is_next = len(after.visits) == len(before.visits) + 1 and after.to_bytes().startswith(before.to_bytes())
    if not is_next or after.completion is not None:
        raise RollbackError(
            f"the visit at {site}: expected receipt {len(before.visits) + 1} of tour {before.plan.tour}, got "
            f"{len(after.visits)} receipts, or others. Look for the reason at the site, and begin the visit again"
        )
    return after


def _read(folder: Path) -> Members:
    return {name: np.fromfile(folder / name, np.uint8) for name in FILES}


def _write(folder: Path, members: Members) -> None:
    for name in FILES:
        with new_file(folder / name, members[name].size) as output:
            output.write(members[name].data)


def _remove(folders: list[Path]) -> None:
    """Remove folders of a tour, and no other file that may be in them."""
    for folder in folders:
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _shown(error: BaseException) -> str:
    if isinstance(error, FastrackError):
        return f"{type(error).__name__}: {error}"[:_ERROR_LIMIT]
    return f"{type(error).__name__}, with the reason in {_REASON} at the site"


def _settings(fl_ctx: FLContext) -> VisitSettings:
    # Not where a job could say: its own files are on this machine too.
    local = Path(_workspace(fl_ctx).get_site_config_dir())
    of_site = local / f"visit-{fl_ctx.get_identity_name()}.toml"
    return VisitSettings.load(of_site if of_site.exists() else local / SETTINGS)


def _workspace(fl_ctx: FLContext) -> Workspace:
    workspace: Workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    return workspace


def _keep_reason(error: BaseException, folder: Path) -> None:
    # Not in the log, which NVFlare streams to the server: the text of an exception may have values of the data.
    with contextlib.suppress(OSError), new_file(folder / _REASON, mode=0o600) as file:
        file.write("".join(format_exception(error)).encode())


def _error_of(result: Shareable) -> str:
    text = str(result.get_header(_ERROR, ""))[:_ERROR_LIMIT]
    return f". {text}" if text else ". The log of the site has the reason"


COMPONENTS = (DataFilter, ResultFilter, TourController, TourExecutor, TourPersistor)
