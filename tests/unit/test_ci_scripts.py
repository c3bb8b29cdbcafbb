"""The workflow file for GitHub Actions, and the script that its steps call."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

CI = Path(__file__).parents[2] / "scripts" / "ci"
SCRIPT = CI / "build_engines.sh"
TEXT = (CI / "github-actions.yml").read_text()
WORKFLOW = yaml.safe_load(TEXT)
JOBS = WORKFLOW["jobs"]
STEPS = [(job, step) for job, values in JOBS.items() for step in values["steps"]]
SUBCOMMANDS = set(re.findall(r"^#   (\w+) ", SCRIPT.read_text(), re.M))
EXPRESSION = re.compile(r"\$\{\{ *([\w.-]+) *\}\}")
# What docs.github.com lists under "context availability".
AVAILABLE = {
    "runs-on": {"github", "needs", "strategy", "matrix", "vars", "inputs"},
    "container": {"github", "needs", "strategy", "matrix", "vars", "inputs", "env", "secrets"},
    "container.image": {"github", "needs", "strategy", "matrix", "vars", "inputs"},
}


def texts(value):
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts(each)]
    return [text for each in value for text in texts(each)] if isinstance(value, list) else [str(value)]


def resolve(text, job):
    """Put values in place of expressions: outputs are followed to the step that makes them, and named after it."""

    def value(match):
        context, *rest = match.group(1).split(".")
        if context == "needs":
            assert rest[0] == JOBS[job]["needs"]
            return resolve(JOBS[rest[0]]["outputs"][rest[2]], rest[0])
        if context == "steps":
            step = next(step for step in JOBS[job]["steps"] if step.get("id") == rest[0])
            assert f"{rest[2]}=" in step["run"]
            assert "GITHUB_OUTPUT" in step["run"]
            return f"<{rest[2]}>"
        if context == "env":
            return WORKFLOW["env"][rest[0]]
        return f"<{match.group(1)}>"

    return EXPRESSION.sub(value, text)


def step_of(job, action):
    return next(step for step in JOBS[job]["steps"] if step.get("uses", "").startswith(f"actions/{action}@"))


def test_the_script_documents_exactly_its_subcommands():
    code = SCRIPT.read_text().rsplit('case "$1" in', 1)[1]
    handled = {word for words in re.findall(r"^ {4}([\w |]+)\)", code, re.M) for word in words.split(" | ")}
    assert handled == SUBCOMMANDS == {"checkpoints", "key", "container", "engines", "verify", "publish", "all"}
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.parametrize("arguments", [[], ["engines"], ["deploy", "pair.yaml"], ["key", "a.yaml", "b.yaml"]], ids=" ".join)
def test_a_wrong_call_of_the_script_is_a_usage_error(arguments):
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(f"  {name} " in done.stderr for name in SUBCOMMANDS)


@pytest.mark.parametrize("subcommand", ["checkpoints", "key", "engines", "verify", "publish", "all"])
def test_a_yaml_that_is_not_there_is_one_line(subcommand, tmp_path):
    done = subprocess.run([SCRIPT, subcommand, "absent.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("Error: Cannot read config absent.yaml")


def test_every_run_of_the_workflow_names_a_subcommand_that_exists():
    called = [name for _, step in STEPS for name in re.findall(r"build_engines\.sh (\w+)", step.get("run", ""))]
    assert called == ["checkpoints", "key", "container", "engines", "verify", "publish"]
    assert set(called) <= SUBCOMMANDS


def test_actions_are_pinned_and_official():
    used = [step["uses"] for _, step in STEPS if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@(v\d+|[0-9a-f]{40})", name) for name in used)


def test_permissions_are_the_least_and_no_stranger_runs_it():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not [job for job in JOBS.values() if "permissions" in job]
    assert set(WORKFLOW[True]) == {"push", "workflow_dispatch"}  # `on` is a boolean to YAML 1.1; a pull request would run on own machines
    assert all(step["with"]["persist-credentials"] is False for _, step in STEPS if step.get("uses", "").startswith("actions/checkout"))
    assert "secrets." not in TEXT


def test_no_step_goes_on_after_a_failure_and_nothing_is_published_before_it_is_verified():
    assert not [step for _, step in STEPS if "if" in step or "continue-on-error" in step]
    runs = [step.get("run", step.get("uses", "")) for step in JOBS["engines"]["steps"]]
    words = ("download", "cache@", "sh engines", "sh verify", "sh publish", "upload")
    order = [next(index for index, run in enumerate(runs) if word in run) for word in words]
    assert order == sorted(order)
    assert all(values["timeout-minutes"] for values in JOBS.values())


def test_artifacts_and_the_cache_are_named_by_the_key_and_the_names_match():
    up, down = step_of("checkpoints", "upload-artifact")["with"], step_of("engines", "download-artifact")["with"]
    assert resolve(up["name"], "checkpoints") == resolve(down["name"], "engines") == "checkpoints-<key>"
    assert resolve(up["path"], "checkpoints") == resolve(down["path"], "engines") == "build/ci/checkpoints"
    cache, out = step_of("engines", "cache")["with"], step_of("engines", "upload-artifact")["with"]
    assert resolve(cache["key"], "engines") == "engines-<key>-cc<matrix.compute_capability>"
    assert "restore-keys" not in cache  # engines of another key are of no use
    assert resolve(out["name"], "engines") == "repository-<key>-cc<matrix.compute_capability>"
    script = SCRIPT.read_text()
    for path in (up["path"], cache["path"], out["path"]):
        assert f'"$store/{resolve(path, "engines").removeprefix(WORKFLOW["env"]["STORE"] + "/")}' in script


def test_there_is_a_job_for_each_compute_capability_on_a_runner_and_in_the_container_that_fit():
    engines = JOBS["engines"]
    capabilities = engines["strategy"]["matrix"]["compute_capability"]
    assert all(re.fullmatch(r"\d+\.\d", value) and float(value) >= 8 for value in capabilities)
    assert len(set(capabilities)) == len(capabilities)
    assert "cc-${{ matrix.compute_capability }}" in engines["runs-on"]
    assert engines["env"]["COMPUTE_CAPABILITY"] == "${{ matrix.compute_capability }}"
    assert resolve(engines["env"]["KEY"], "engines") == "<key>"
    assert resolve(engines["container"]["image"], "engines") == "<container>"
    assert "--gpus all" in engines["container"]["options"]


def test_expressions_use_contexts_that_github_has_there():
    for job in JOBS.values():
        container = job.get("container", {})
        for what, value in (("runs-on", job["runs-on"]), ("container", container), ("container.image", container.get("image", ""))):
            contexts = {match.split(".")[0] for text in texts(value) for match in EXPRESSION.findall(text)}
            assert contexts <= AVAILABLE[what]
    for job, values in JOBS.items():
        for text in texts(values):
            resolve(text, job)  # every output that is used is made
