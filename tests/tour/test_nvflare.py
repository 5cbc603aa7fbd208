"""Tours in NVFlare: its filters and components alone, its simulator, and a server and three clients as processes."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed: make integrations-flare")

from helpers import flare_training, lying_server, plain_executor
from helpers.flare_sites import contents, deployed, simulate
from helpers.flare_tour import HOLDERS, ORDER, SITES, Tour, machine
from helpers.tour_rig import Rig
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.app_common.abstract.learnable import Learnable
from nvflare.job_config.defs import FilterType

import fastrack
from fastrack import FormatError, RollbackError
from fastrack.tour import Chain, nvflare

MODEL, MANIFEST, CHAIN = nvflare.FILES
FILES = sorted(nvflare.FILES)
pytestmark = pytest.mark.filterwarnings("ignore")  # NVFlare's own


# Folders of a tour of three visits.


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("rig"), order=("ada", "ben", "ada"))
    rig.whole()
    return rig


@pytest.fixture
def files(rig):
    """Return a function that gives the files after some visits."""
    return lambda visits: nvflare._read(rig.folder / f"v{visits}")


@pytest.fixture
def owner(rig):
    return str(rig.owner.verifier)


def sent(files, kind=DataKind.APP_DEFINED):
    return DXO(kind, data=files).to_shareable()


def received(shareable):
    return shareable["DXO"]["data"]


@pytest.mark.parametrize("make_filter", [nvflare.DataFilter, nvflare.ResultFilter])
class TestFilters:
    def test_the_files_of_a_tour_pass(self, make_filter, owner, files):
        passed = received(make_filter(owner).process(sent(files(1)), FLContext()))
        assert {name: array.tobytes() for name, array in passed.items()} == {
            name: array.tobytes() for name, array in files(1).items()
        }

    def test_plain_weights_are_refused(self, make_filter, owner):
        for kind in DataKind.WEIGHTS, DataKind.APP_DEFINED:
            with pytest.raises(FormatError, match="its files"):
                make_filter(owner).process(sent({"layer.weight": np.ones(4)}, kind), FLContext())

    def test_what_is_no_exchange_of_files_is_refused(self, make_filter, owner):
        with pytest.raises(ValueError, match="DXO"):
            make_filter(owner).process(Shareable(), FLContext())

    @pytest.mark.parametrize("other", ["weights", "optimizer"])
    def test_one_file_more_is_refused(self, make_filter, owner, files, other):
        with pytest.raises(FormatError, match="its files"):
            make_filter(owner).process(sent({**files(1), other: np.zeros(1, np.uint8)}), FLContext())

    @pytest.mark.parametrize("name", FILES)
    def test_one_file_less_is_refused(self, make_filter, owner, files, name):
        fewer = files(1)
        fewer.pop(name)
        with pytest.raises(FormatError, match="its files"):
            make_filter(owner).process(sent(fewer), FLContext())

    @pytest.mark.parametrize("value", [np.ones(4, np.float32), np.ones((2, 2), np.uint8), b"bytes", [1.5], None])
    def test_a_file_that_is_not_bytes_is_refused(self, make_filter, owner, files, value):
        with pytest.raises(FormatError, match="bytes"):
            make_filter(owner).process(sent({**files(1), MODEL: value}), FLContext())

    def test_what_stands_beside_the_files_is_refused(self, make_filter, owner, files):
        shareable = sent(files(1))
        shareable["weights"] = np.ones(4)
        with pytest.raises(FormatError, match="its files"):
            make_filter(owner).process(shareable, FLContext())

    @pytest.mark.parametrize("name", FILES)
    def test_the_model_of_another_version_is_refused(self, make_filter, owner, files, name):
        with pytest.raises(fastrack.FastrackError):
            make_filter(owner).process(sent({**files(1), name: files(2)[name]}), FLContext())

    @pytest.mark.parametrize("name", FILES)
    def test_no_byte_can_be_another(self, make_filter, owner, files, name):
        content = files(1)[name]
        for place in {0, content.size // 2, content.size - 1}:
            other = content.copy()
            other[place] ^= 1
            with pytest.raises(fastrack.FastrackError):
                make_filter(owner).process(sent({**files(1), name: other}), FLContext())

    def test_plain_weights_in_the_place_of_a_message_are_refused(self, make_filter, owner, rig, files):
        with fastrack.load_file(rig.folder / "v1" / MODEL) as file:
            message = max((bytes(tensor.message) for tensor in file.values()), key=len)
        content = files(1)[MODEL].copy()
        start = content.tobytes().index(message) + len(message) - 32
        content[start : start + 32] = np.ones(4, np.float64).view(np.uint8)
        with pytest.raises(fastrack.FastrackError, match=r"SHA-256|altered"):
            make_filter(owner).process(sent({**files(1), MODEL: content}), FLContext())

    def test_a_tour_of_another_owner_is_refused(self, make_filter, files):
        other = str(fastrack.grants.Signer.generate().verifier)
        with pytest.raises(fastrack.SignatureError):
            make_filter(other).process(sent(files(1)), FLContext())


def test_what_was_not_visited_is_no_result(owner, files):
    nvflare.DataFilter(owner).process(sent(files(0)), FLContext())
    with pytest.raises(FormatError, match="expected a receipt"):
        nvflare.ResultFilter(owner).process(sent(files(0)), FLContext())


def test_headers_and_metadata_do_not_leave_a_site(owner, files):
    shareable = DXO(DataKind.APP_DEFINED, data=files(1), meta={"weights": [1.5]}).to_shareable()
    shareable.set_header("weights", np.ones(4))
    shareable.set_header(ReservedKey.RC, ReturnCode.OK)
    assert "weights" not in str(nvflare.ResultFilter(owner).process(shareable, FLContext()))


def test_a_return_code_of_an_executors_own_does_not_leave_a_site(owner):
    result = make_reply("rows of patients", {"fastrack_error": "x" * 5000})
    filtered = nvflare.ResultFilter(owner).process(result, FLContext())
    assert filtered.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert len(filtered.get_header("fastrack_error")) == 400


def test_a_site_allows_the_components_by_name_and_nothing_that_their_module_imports(tmp_path):
    allowed = json.loads(nvflare.allow(tmp_path).read_bytes())["class_allow_list"]
    own = [name for name in allowed if name.startswith("fastrack")]
    assert sorted(own) == sorted(f"fastrack.tour.nvflare.{each.__name__}" for each in nvflare.COMPONENTS)


def test_a_failed_result_leaves_a_site_without_what_it_carries(owner):
    shareable = make_reply(ReturnCode.EXECUTION_EXCEPTION, {"fastrack_error": "reason", "weights": [1.5]})
    shareable["weights"] = np.ones(4)
    filtered = nvflare.ResultFilter(owner).process(shareable, FLContext())
    assert filtered == make_reply(ReturnCode.EXECUTION_EXCEPTION, {"fastrack_error": "reason"})


# A site's own settings, and what its executor makes of them.


@pytest.fixture
def site(tmp_path):
    (tmp_path / "site" / "startup").mkdir(parents=True)
    (tmp_path / "site" / "local").mkdir()
    return tmp_path / "site"


@pytest.fixture
def context(site):
    """Return the context of a task at a site."""
    context = FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False)
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(site), "site-1"), private=True)
    return context


@pytest.fixture
def settings(site, owner):
    """Return a function that writes the settings of a site, whose desks do not answer."""

    def settings(name="visit.toml", **changes):
        values = {"owner": owner, "holder": "ada", "train": "helpers.tour_rig:train", "data": ["a"], **changes}
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
        lines += [f'[{desk}]\nurl = "http://127.0.0.1:9"\ntimeout = 1' for desk in ("owner_desk", "holder_desk")]
        (site / "local" / name).write_text("\n".join(lines))

    return settings


def visit(owner, context, files):
    return nvflare.TourExecutor(owner).execute(nvflare.TASK, sent(files), context, Signal())


def error_of(result):
    assert result.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert set(result) == {"__headers__"}  # not the model as it came
    return result.get_header("fastrack_error")


def test_a_site_asks_the_desks_that_it_names(owner, context, files, settings, tmp_path, key):
    fastrack.save_file({"rows": np.zeros(3)}, tmp_path / "data", key)
    settings(data=[str(tmp_path / "data")])
    assert error_of(visit(owner, context, files(2))).startswith("Connection")


def test_a_site_refuses_the_turn_of_another_before_a_desk_is_asked(owner, context, files, settings):
    settings()
    assert "expected a turn of ada, got that of ben" in error_of(visit(owner, context, files(1)))


def test_a_tour_that_is_over_is_refused(owner, context, files, settings):
    settings()
    assert "The tour is over" in error_of(visit(owner, context, files(3)))


@pytest.mark.parametrize(("model", "chain"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_a_site_refuses_a_model_that_is_not_of_the_receipt_before_its_turn(
    owner, context, files, settings, model, chain
):
    settings()
    other = {**files(model), CHAIN: files(chain)[CHAIN]}
    assert error_of(visit(owner, context, other)).startswith(("RollbackError", "SignatureError"))


def test_a_site_trains_models_of_the_owner_that_it_names(owner, context, files, settings):
    settings(owner=str(fastrack.grants.Signer.generate().verifier))
    assert "This site trains only models of that owner" in error_of(visit(owner, context, files(0)))


def test_sites_that_share_a_folder_have_settings_of_their_own(owner, context, files, settings):
    settings()
    settings("visit-site-1.toml", code="of this site")
    assert "as code" in error_of(visit(owner, context, files(1)))


def test_a_job_names_no_code_data_or_desk_of_a_site(make_job, rig):
    exported = make_job(rig.folder / "v0", rig.owner.verifier)
    for path in exported.rglob("config_fed_client.json"):
        executors = json.loads(path.read_text())["executors"]
        assert [each["executor"]["args"] for each in executors] == [{"owner": str(rig.owner.verifier)}]


def test_values_in_the_exception_of_a_visit_stay_at_the_site(
    owner, context, site, files, settings, caplog, monkeypatch
):
    def fail(*_, **__):
        value = 3.590417
        raise ValueError(f"patient 17 has {value}")

    settings()
    monkeypatch.setattr(nvflare, "visit", fail)
    result = visit(owner, context, files(2))
    assert "ValueError" in error_of(result)
    assert "test_nvflare.py" in caplog.text
    assert "3.590417" not in f"{result}{caplog.text}"
    assert "ValueError: patient 17 has 3.590417" in (site / "failed-visit.txt").read_text()


def test_a_visit_that_leaves_its_process_fails(owner, context, files, settings, monkeypatch):
    def leave(*_, **__):
        raise SystemExit(0)

    settings()
    monkeypatch.setattr(nvflare, "visit", leave)
    assert "SystemExit" in error_of(visit(owner, context, files(2)))


# The server.


@pytest.fixture
def persistor(rig, owner, tmp_path):
    shutil.copytree(rig.folder / "v0", tmp_path / "start")
    return nvflare.TourPersistor(str(tmp_path / "start"), str(tmp_path / "end"), owner)


def visits(persistor, owner):
    return len(nvflare._verify(dict(persistor.load(FLContext())), owner).visits)


def test_a_tour_goes_on_from_the_last_visit_that_was_kept(persistor, owner, files, tmp_path):
    for number in range(4):
        assert visits(persistor, owner) == number
        if number < 3:
            persistor.keep(files(number + 1))
    assert {path.name for path in (tmp_path / "end.progress").iterdir()} == {"visit-2", "visit-3"}


def test_the_output_of_a_tour_is_new_and_whole(persistor, files, tmp_path):
    for number in (1, 2):
        persistor.keep(files(number))
    with pytest.raises(RollbackError, match="expected 3 visits, got 2"):
        persistor.save(Learnable(files(2)), FLContext())
    with pytest.raises(fastrack.FastrackError):
        persistor.save(Learnable({**files(3), MODEL: files(2)[MODEL]}), FLContext())
    assert not (tmp_path / "end").exists()
    persistor.save(Learnable(files(3)), FLContext())
    assert (tmp_path / "end" / MODEL).read_bytes() == files(3)[MODEL].tobytes()
    assert not (tmp_path / "end.progress").exists()
    for again in (persistor.load, lambda context: persistor.save(Learnable(files(3)), context)):
        with pytest.raises(FileExistsError):
            again(FLContext())


def test_a_folder_of_progress_that_was_altered_or_is_of_another_tour_is_refused(persistor, files, tmp_path):
    with pytest.raises(fastrack.FastrackError):
        persistor.keep({**files(1), CHAIN: files(2)[CHAIN]})
    assert not (tmp_path / "end.progress").exists()
    persistor.keep(files(1))
    (tmp_path / "end.progress" / "visit-1" / MODEL).write_bytes(files(2)[MODEL].tobytes())
    with pytest.raises(fastrack.FastrackError):
        persistor.load(FLContext())


def test_a_tour_does_not_go_on_with_the_progress_of_another(rig, persistor, files, tmp_path):
    persistor.keep(files(1))
    (tmp_path / "other").mkdir()
    other = Rig(tmp_path / "other", owner=rig.owner)
    persistor.start = str(other.folder / "v0")
    with pytest.raises(RollbackError, match="Move it away"):
        persistor.load(FLContext())


@pytest.mark.parametrize("after", [0, 1, 3])
def test_other_than_one_more_receipt_ends_the_job(rig, files, after):
    chains = [Chain.from_bytes(files(number)[CHAIN].tobytes(), owner=rig.owner.verifier) for number in range(4)]
    assert nvflare._require_next(chains[1], chains[2], "site-1") == chains[2]
    with pytest.raises(RollbackError, match="the visit at site-1: expected receipt 2"):
        nvflare._require_next(chains[1], chains[after], "site-1")


@pytest.fixture
def make_job(tmp_path):
    """Return a function that exports the job of a tour, and gives its folder."""

    def make_job(start, owner, output=tmp_path / "end", script=None, lie=None):
        job = nvflare.make_job(str(start), str(output), owner=owner, sites=SITES)
        if script:
            job.to_server(script)
        if lie:
            names = {name: str(path / name) for name, path in lie.items()}
            job.to_server(lying_server.OtherFiles(names), filter_type=FilterType.TASK_DATA, tasks=[nvflare.TASK])
            job.set_app_packages(["fastrack", "helpers"])
        job.export_job(str(tmp_path / "jobs"))
        return tmp_path / "jobs" / job.name

    return make_job


def test_a_job_has_no_custom_code(make_job, rig):
    names = {path.name for path in make_job(rig.folder / "v0", rig.owner.verifier).rglob("*") if path.is_file()}
    assert names == {"config_fed_client.json", "config_fed_server.json", "meta.json"}


def test_a_job_is_made_of_a_folder_that_verifies(make_job, rig):
    with pytest.raises(fastrack.SignatureError):
        make_job(rig.folder / "v0", fastrack.grants.Signer.generate().verifier)


# Whole tours.


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Start the machine of all sites, and return its roots."""
    with machine(tmp_path_factory.mktemp("machine")) as (environment, roots), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield roots


@pytest.fixture
def fault(roots):  # noqa: ARG001 - its environment names the file
    """Return a file that says how training fails."""
    path = Path(os.environ[flare_training.FAULT])
    yield path
    path.unlink(missing_ok=True)


def settings_of(tour):
    return {SITES[name]: tour.settings(name) for name in HOLDERS}


def assert_same(found, expected):
    """Compare states bit for bit."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    elif hasattr(expected, "numpy"):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    else:
        assert found == expected


def assert_whole(tour):
    """Require the weights, optimizer and generator of training on the joined data, and a receipt of each visit."""
    state = tour.finish()
    assert_same(state, tour.joined())
    chain = Chain.load(tour.folder / "final" / CHAIN, owner=tour.owner)
    assert tuple(visit.holder for visit in chain.visits) == ORDER


def find(secrets, folders):
    """Return the names of the secrets that files below some folders have."""
    found = contents(*folders).values()
    return {name for name, secret in secrets.items() if any(secret in content for content in found)}


def assert_nothing_leaked(tour, *folders):
    """Require that no file there has a secret. The folder of the tour, which has its keys, shows that one could."""
    assert find(tour.secrets(), [tour.folder]) >= {f"the text of {name}.key" for name in ("owner", *HOLDERS)}
    assert find(tour.secrets(), folders) == set()


@pytest.mark.slow
class TestSimulator:
    def test_a_tour_trains_what_training_on_the_joined_data_does(self, roots, make_job, tmp_path):
        with Tour(tmp_path, roots).served() as tour:
            status, log = simulate(make_job(tmp_path / "v0", tour.owner), tmp_path / "sim", settings_of(tour))
            assert status == 0, log
            assert_whole(tour)
        assert_nothing_leaked(tour, tmp_path / "sim", tmp_path / "end", tmp_path / "jobs")
        assert not any(secret.decode("latin-1") in log for secret in tour.secrets().values())

    def test_another_executor_that_sends_plain_weights_ends_the_job(self, roots, make_job, tmp_path):
        tour = Tour(tmp_path, roots)
        exported = make_job(tmp_path / "v0", tour.owner)
        for path in exported.rglob("config_fed_client.json"):
            other = f"{plain_executor.__name__}.PlainExecutor"
            path.write_text(path.read_text().replace("fastrack.tour.nvflare.TourExecutor", other))
        allowed = [f"{plain_executor.__name__}."]
        status, log = simulate(exported, tmp_path / "sim", settings_of(tour), allowed)
        assert status != 0, log
        assert ReturnCode.TASK_RESULT_FILTER_ERROR in log
        assert not (tmp_path / "end").exists()


@pytest.fixture(scope="module")
def deployment(roots, tmp_path_factory):  # noqa: ARG001 - the processes inherit the way to the machine
    allowed = [f"{module.__name__}." for module in (lying_server, plain_executor)]
    with deployed(tmp_path_factory.mktemp("flare"), sorted(SITES.values()), allowed) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def begun(roots, tmp_path_factory):
    """Return a tour of which three of six visits were made, and are kept at the server."""
    folder = tmp_path_factory.mktemp("begun")
    with Tour(folder, roots).served() as tour:
        for number in range(3):
            tour.visit(number)
        shutil.copytree(folder / "v3", folder / "end.progress" / "visit-3")
        yield tour


@pytest.fixture
def run(deployment, begun, make_job):
    """Return a function that runs the next job of that tour, which has to leave everything as it is."""

    def run(**changes):
        deployment.configure(settings_of(begun))
        before = contents(begun.folder / "end.progress")
        about = deployment.run(make_job(begun.folder / "v0", begun.owner, begun.folder / "end", **changes))
        assert about["status"].startswith("FINISHED")
        assert about["status"] != "FINISHED:COMPLETED"
        assert contents(begun.folder / "end.progress") == before
        assert not (begun.folder / "end").exists()
        return about

    return run


def kept_by_the_server(deployment):
    """Return all that files of the server have, and logs that NVFlare streamed to it."""
    return b"".join(content for path, content in contents(deployment.workspace).items() if "/site-" not in path)


@pytest.mark.slow
class TestProcesses:
    def test_a_tour_that_a_holder_interrupted_goes_on_where_custom_code_is_blocked(
        self, roots, deployment, make_job, tmp_path
    ):
        with Tour(tmp_path, roots).served() as tour:
            deployment.configure(settings_of(tour))
            tour.serve("ben", gpus=1)
            assert deployment.run(make_job(tmp_path / "v0", tour.owner))["status"] == "FINISHED:EXECUTION_EXCEPTION"
            assert [path.name for path in (tmp_path / "end.progress").iterdir()] == ["visit-1"]
            assert not (tmp_path / "end").exists()
            tour.serve("ben")
            about = deployment.run(make_job(tmp_path / "v0", tour.owner))
            assert about["status"] == "FINISHED:COMPLETED"
            assert "byoc" not in about
            assert_whole(tour)
        assert_nothing_leaked(tour, deployment.workspace, tmp_path / "end", tmp_path / "jobs")

    def test_custom_code_is_blocked(self, deployment, run):
        about = run(script=lying_server.__file__)
        assert about["status"] == "FINISHED:FAILED_TO_RUN"
        assert "BYOC not permitted" in str(about[JobMetaKey.JOB_DEPLOY_DETAIL.value])

    def test_an_older_folder_is_refused_though_it_is_later_than_the_last_one_of_its_site(self, begun, deployment, run):
        run(lie=dict.fromkeys(nvflare.FILES, begun.folder / "v2"))
        assert b"expected a turn of ada, got that of cleo" in kept_by_the_server(deployment)

    def test_values_in_the_exception_of_a_visit_do_not_reach_the_server(self, begun, deployment, run, fault):
        fault.write_text("fail")
        run()
        kept = kept_by_the_server(deployment)
        assert b"the visit failed: ValueError" in kept  # NVFlare streams logs of errors there
        assert str(begun.rows["ada"]["x"][0, 0].item()).encode() not in kept

    def test_an_accelerator_that_dies_during_its_visit_ends_the_job(self, run, fault):
        fault.write_text("die")
        run()
        assert not fault.exists()
