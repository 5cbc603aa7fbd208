"""Tours in NVFlare: its filters and components alone, its simulator, and a server and three clients as processes."""

import json

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed: make integrations-flare")

from helpers import hollow_tour
from helpers.flare_sites import deployed, simulate
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.app_common.abstract.learnable import Learnable

from fastrack import FormatError
from fastrack.tour import nvflare

SITES = ["site-1", "site-2", "site-3"]
ALLOWED = ["helpers.hollow_tour."]
PLAIN = "helpers.plain_executor"
pytestmark = pytest.mark.filterwarnings("ignore")  # NVFlare's own


@pytest.fixture
def members():
    return {name: np.frombuffer(name.encode(), np.uint8) for name in nvflare.FILES}


@pytest.fixture
def job(tmp_path):
    """Return a function that exports the job of a tour, and gives its folder."""

    def job(visit="visit", order=SITES * 2, script=None):
        if not (tmp_path / "start").exists():
            hollow_tour.start(tmp_path / "start")
        job = nvflare.make_job(
            order, start=str(tmp_path / "start"), output=str(tmp_path / "end"), visit=f"helpers.hollow_tour:{visit}",
            home=str(tmp_path / "{site}"),
        )  # fmt: skip
        if script:
            job.to_server(script)
        job.export_job(str(tmp_path / "jobs"))
        return tmp_path / "jobs" / job.name

    return job


@pytest.fixture
def context(tmp_path):
    """Return the context of a task at a site, whose workspace allows the visits of tests."""
    (tmp_path / "site" / "startup").mkdir(parents=True)
    nvflare.allow(tmp_path / "site" / "local", *ALLOWED)
    context = FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False)
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path / "site"), "site-1"), private=True)
    return context


def sent(data, kind=DataKind.APP_DEFINED):
    return DXO(kind, data=data).to_shareable()


def received(shareable):
    return shareable["DXO"]["data"]


@pytest.mark.parametrize("make_filter", [nvflare.DataFilter, nvflare.ResultFilter])
class TestFilters:
    def test_the_members_of_a_tour_pass(self, make_filter, members):
        passed = received(make_filter().process(sent(members), FLContext()))
        assert {name: array.tobytes() for name, array in passed.items()} == {name: name.encode() for name in members}

    def test_plain_weights_are_refused(self, make_filter):
        for kind in DataKind.WEIGHTS, DataKind.APP_DEFINED:
            with pytest.raises(FormatError, match="members"):
                make_filter().process(sent({"layer.weight": np.ones(4)}, kind), FLContext())

    def test_what_is_no_exchange_of_members_is_refused(self, make_filter):
        with pytest.raises(ValueError, match="DXO"):
            make_filter().process(Shareable(), FLContext())

    @pytest.mark.parametrize("other", ["weights", "optimizer"])
    def test_one_member_more_is_refused(self, make_filter, members, other):
        with pytest.raises(FormatError, match="members"):
            make_filter().process(sent({**members, other: np.zeros(1, np.uint8)}), FLContext())

    def test_one_member_less_is_refused(self, make_filter, members):
        members.pop("plan")
        with pytest.raises(FormatError, match="members"):
            make_filter().process(sent(members), FLContext())

    @pytest.mark.parametrize("value", [np.ones(4, np.float32), np.ones((2, 2), np.uint8), b"bytes", [1.5], None])
    def test_a_member_that_is_not_bytes_is_refused(self, make_filter, members, value):
        with pytest.raises(FormatError, match="bytes"):
            make_filter().process(sent({**members, "model": value}), FLContext())

    def test_what_stands_beside_the_members_is_refused(self, make_filter, members):
        shareable = sent(members)
        shareable["weights"] = np.ones(4)
        with pytest.raises(FormatError, match="members"):
            make_filter().process(shareable, FLContext())


def test_headers_and_metadata_do_not_leave_a_site(members):
    shareable = DXO(DataKind.APP_DEFINED, data=members, meta={"weights": [1.5]}).to_shareable()
    shareable.set_header("weights", np.ones(4))
    shareable.set_header(ReservedKey.RC, ReturnCode.OK)
    assert "weights" not in str(nvflare.ResultFilter().process(shareable, FLContext()))


def test_a_failed_result_leaves_a_site_without_what_it_carries():
    shareable = make_reply(ReturnCode.EXECUTION_EXCEPTION, {"fastrack_error": "reason", "weights": [1.5]})
    shareable["weights"] = np.ones(4)
    filtered = nvflare.ResultFilter().process(shareable, FLContext())
    assert filtered == make_reply(ReturnCode.EXECUTION_EXCEPTION, {"fastrack_error": "reason"})


def run(visit, context, members, home="/srv/{site}"):
    executor = nvflare.TourExecutor(visit, str(home))
    return executor.execute(nvflare.TASK, sent(members), context, Signal())


def test_a_function_that_the_site_does_not_allow_is_not_called(context, members):
    for name in "os:system", "helpers.hollow_tours:visit", "nvflare.lighter.utils:load_yaml":
        result = run(name, context, members)
        assert result.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
        assert result.get_header("fastrack_error").startswith("UnsafeComponentError")


def test_values_in_the_exception_of_a_visit_stay_at_the_site(context, members, tmp_path, caplog):
    result = run("helpers.hollow_tour:fail", context, members, tmp_path)
    assert result.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "ValueError" in result.get_header("fastrack_error")
    assert "hollow_tour.py" in caplog.text
    assert "3.590417" not in f"{result}{caplog.text}"
    assert "ValueError: patient 17 has 3.590417" in (tmp_path / "failed-visit.txt").read_text()
    assert set(result) == {"__headers__"}  # not the model as it came


def test_a_visit_that_leaves_its_process_fails(context, members):
    assert run("helpers.hollow_tour:leave", context, members).get_return_code() == ReturnCode.EXECUTION_EXCEPTION


def test_the_output_of_a_tour_is_new_and_whole(tmp_path, members):
    hollow_tour.start(tmp_path / "start")
    persistor = nvflare.TourPersistor(str(tmp_path / "start"), str(tmp_path / "end"))
    assert received(nvflare._to_shareable(dict(persistor.load(FLContext()))))["plan"].tobytes() == b"plan"
    with pytest.raises(KeyError):  # as when a disk is full
        persistor.save(Learnable({"model": members["model"]}), FLContext())
    assert [path.name for path in tmp_path.iterdir()] == ["start"]
    persistor.save(Learnable(members), FLContext())
    assert (tmp_path / "end" / "model.safetensors").read_bytes() == b"model"
    with pytest.raises(FileExistsError):
        persistor.load(FLContext())
    with pytest.raises(FileExistsError):
        persistor.save(Learnable(members), FLContext())


@pytest.mark.parametrize("receipts", [[], [1], [1, 3, 2], [1, 2, 3, 4], [2, 1]])
def test_other_than_one_more_receipt_ends_the_job(members, receipts):
    def chain(receipts):
        return {**members, "chain": np.frombuffer(json.dumps(receipts).encode(), np.uint8)}

    nvflare._require_one_more(chain([1, 2]), chain([1, 2, 3]), "site-1")
    with pytest.raises(FormatError, match="one more receipt from site-1"):
        nvflare._require_one_more(chain([1, 2]), chain(receipts), "site-1")


def test_a_job_has_no_custom_code(job):
    names = {path.name for path in job().rglob("*") if path.is_file()}
    assert names == {"config_fed_client.json", "config_fed_server.json", "meta.json"}


def whole(folder):
    receipts = hollow_tour.receipts(folder)
    return [receipt["site"] for receipt in receipts] == ["owner", *SITES, *SITES] and (
        len({receipt["process"] for receipt in receipts}) == 1 + len(SITES)
    )


@pytest.mark.slow
class TestSimulator:
    def test_a_tour_ends_with_one_receipt_of_each_visit(self, job, tmp_path):
        status, log = simulate(job(), tmp_path / "sim", SITES, ALLOWED)
        assert status == 0, log
        assert whole(tmp_path / "end")

    def test_another_executor_that_sends_plain_weights_ends_the_job(self, job, tmp_path):
        exported = job()
        for path in exported.rglob("config_fed_client.json"):
            changed = path.read_text().replace("fastrack.tour.nvflare.TourExecutor", f"{PLAIN}.PlainExecutor")
            path.write_text(changed)
        status, log = simulate(exported, tmp_path / "sim", SITES, [*ALLOWED, f"{PLAIN}."])
        assert status != 0, log
        assert ReturnCode.TASK_RESULT_FILTER_ERROR in log
        assert not (tmp_path / "end").exists()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with deployed(tmp_path_factory.mktemp("flare"), SITES, ALLOWED) as deployment:
        yield deployment


@pytest.mark.slow
class TestProcesses:
    def test_a_tour_runs_where_custom_code_is_blocked(self, deployment, job, tmp_path):
        about = deployment.run(job())
        assert about["status"] == "FINISHED:COMPLETED"
        assert "byoc" not in about
        assert whole(tmp_path / "end")

    def test_custom_code_is_blocked(self, deployment, job):
        about = deployment.run(job(script=hollow_tour.__file__))
        assert about["status"] == "FINISHED:FAILED_TO_RUN"
        assert "BYOC not permitted" in str(about[JobMetaKey.JOB_DEPLOY_DETAIL.value])

    def test_a_model_that_is_not_of_the_last_receipt_ends_the_job(self, deployment, job, tmp_path):
        hollow_tour.start(tmp_path / "start")
        (tmp_path / "start" / "model.safetensors").write_bytes(b"an older model")
        assert deployment.run(job())["status"] == "FINISHED:EXECUTION_EXCEPTION"
        assert not (tmp_path / "end").exists()

    def test_values_in_the_exception_of_a_visit_do_not_reach_the_server(self, deployment, job, tmp_path):
        assert deployment.run(job("fail"))["status"] == "FINISHED:EXECUTION_EXCEPTION"
        assert b"ValueError" in deployment.kept_by_the_server()  # NVFlare streams logs of errors there
        assert b"3.590417" not in deployment.kept_by_the_server()
        assert not (tmp_path / "end").exists()

    def test_an_accelerator_that_dies_during_its_visit_ends_the_job(self, deployment, job, tmp_path):
        status = deployment.run(job("die"))["status"]
        assert status.startswith("FINISHED")
        assert status not in ("FINISHED:COMPLETED", "FINISHED:FAILED_TO_RUN")
        assert not (tmp_path / "end").exists()
