"""The workflows of the public host, and its search for new versions."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not WORKFLOWS, reason="the tests run without the workflows"),
]


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def text(request):
    return request.param.read_text(encoding="utf-8")


def jobs_of(text):
    return yaml.safe_load(text)["jobs"].values()


def test_every_action_is_named_by_its_hash_and_its_version(text):
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert [each for each in used if not PINNED.fullmatch(each)] == []


def test_an_action_has_one_hash_everywhere():
    used = {each for path in WORKFLOWS for each in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))}
    assert len({each.partition("@")[0] for each in used}) == len(used)


def test_a_job_may_do_what_it_names_and_nothing_else(text):
    assert yaml.safe_load(text)["permissions"] == {}
    assert all("permissions" in job and "timeout-minutes" in job for job in jobs_of(text))


def test_none_runs_for_a_fork_with_rights_of_the_repository(text):
    assert "pull_request_target" not in text
    assert "workflow_run" not in text


def test_only_jobs_that_run_nothing_of_ours_may_sign_or_publish(text):
    for job in jobs_of(text):
        if "write" in job["permissions"].values():
            assert [step["uses"] for step in job["steps"] if "checkout" in step.get("uses", "")] == []
            assert "make " not in " ".join(step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize("name", ["release", "testkit"])
def test_a_run_by_hand_publishes_nothing(name):
    text = (GITHUB / f"workflows/{name}.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert {name for name, job in jobs.items() if job.get("if") != "github.event_name == 'push'"} == {"build"}
    assert jobs["build"]["permissions"] == {"contents": "read"}
    assert {"build", "prove"} <= set(jobs["pypi"]["needs"]) < set(jobs["github"]["needs"])


@pytest.mark.parametrize(("name", "publisher"), [("release", "pypi"), ("testkit", "pypi-testkit")])
def test_what_signs_or_publishes_waits_for_a_maintainer(name, publisher):
    jobs = yaml.safe_load((GITHUB / f"workflows/{name}.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["pypi"]["environment"]["name"] == publisher
    for job in jobs.values():
        assert ("write" in job["permissions"].values()) == ("environment" in job)
    assert jobs["prove"]["environment"] == jobs["github"]["environment"] == "release"


@pytest.mark.parametrize("name", ["release", "testkit"])
def test_a_tag_is_checked_against_the_branch_and_no_tag_of_its_name(name):
    text = (GITHUB / f"workflows/{name}.yml").read_text(encoding="utf-8")
    assert re.findall(r"release\.py tag .* (\S+)$", text, re.MULTILINE) == ["refs/remotes/origin/main"]
    recipe = re.findall(r"release\.py tag .* (refs/\S+) ", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert recipe == ["refs/remotes/origin/main"]


@pytest.mark.parametrize("name", ["release", "testkit"])
def test_a_proof_is_verified_with_all_that_it_says(name):
    text = (GITHUB / f"workflows/{name}.yml").read_text(encoding="utf-8")
    (command,) = re.findall(r"gh attestation verify (.*?)\n +done", text, re.DOTALL)
    options = set(re.findall(r"--[\w-]+", command))
    assert options == {
        *("--repo", "--bundle", "--signer-workflow", "--source-ref", "--source-digest", "--deny-self-hosted-runners")
    }
    page = (ROOT / "docs/dev/releasing.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^gh attestation verify (.*?)\n\n", page, re.DOTALL | re.MULTILINE)
    assert options <= set(re.findall(r"--[\w-]+", command))


def test_what_makes_a_release_has_owners():
    owned = dict(line.split() for line in (GITHUB / "CODEOWNERS").read_text().splitlines() if line.startswith("/"))
    assert set(owned) >= {"/.github/", "/.ci/", "/Makefile", "/hatch_build.py"}
    assert set(owned.values()) == {"@fastrack-io/maintainers"}
    assert all((ROOT / name.strip("/")).exists() for name in owned)


def test_what_is_made_exists(text):
    targets = set(re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    run = "\n".join(step.get("run", "") for job in jobs_of(text) for step in job["steps"])
    assert set(re.findall(r"\bmake ([\w-]+)", run)) <= targets


def test_new_versions_are_looked_for_where_versions_are_named():
    settings = yaml.safe_load((GITHUB / "dependabot.yml").read_text(encoding="utf-8"))
    updates = {update["package-ecosystem"]: update for update in settings["updates"]}
    assert set(updates) == {"github-actions", "pip", "npm"}
    assert all(update["cooldown"]["default-days"] >= 7 and update["groups"] for update in updates.values())
    recipe = re.findall(
        r"^\t\$\(LOCK\).*--output-file (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    folders = {(Path("/") / Path(name).parent).as_posix() for name in recipe}
    assert len(folders) > 4
    assert folders - {"/tests"} <= set(updates["pip"]["directories"])  # tests/lowest.txt keeps the lowest
