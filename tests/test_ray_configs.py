"""`ray_configs/`: cluster files by Ray's own checks, KubeRay manifests by their definitions, the script."""

import copy
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from expert_pool.cluster import ExpertPool, PoolConfig, load_config
from expert_pool.cluster.cli.commands import main as command_line
from kuberay_fields import problems_of
from packaging.requirements import Requirement
from ray._private.label_utils import validate_node_label_syntax, validate_node_labels
from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer, get_nodes_for
from ray.autoscaler._private.util import prepare_config, validate_config

REPOSITORY = Path(__file__).resolve().parent.parent
RAY_CONFIGS = REPOSITORY / "ray_configs"
CLUSTERS = ("aws", "gcp")
MANIFESTS = ("raycluster", "rayjob", "detached_pool")
POOLS = sorted(path.stem for path in (RAY_CONFIGS / "pools").glob("*.yaml"))
CHECKOUT, IMAGE = "/home/ubuntu/expert_pool/", "/opt/expert_pool/"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))


def cluster_file(name: str) -> dict:
    return yaml.safe_load((RAY_CONFIGS / "clusters" / f"{name}.yaml").read_text("utf-8"))


def manifest(name: str) -> dict:
    return yaml.safe_load((RAY_CONFIGS / "kuberay" / f"{name}.yaml").read_text("utf-8"))


def cluster_spec(name: str) -> dict:
    spec = manifest(name)["spec"]
    return spec.get("rayClusterSpec", spec)


def needed_to_install() -> set[str]:
    """What pip needs of a checkout: the packages' folders, and the files that pyproject.toml names."""
    project, folders = PROJECT["project"], PROJECT["tool"]["setuptools"]["package-dir"].values()
    return {*folders, "pyproject.toml", project["readme"], *project["license-files"]}


def pinned_ray(text: str) -> str:
    """The version in `ray[default]==VERSION`, which pyproject.toml has to allow."""
    version = text.partition("ray[default]==")[2].split()[0].strip("\"'")
    [wanted] = [Requirement(one) for one in PROJECT["project"]["dependencies"] if Requirement(one).name == "ray"]
    assert version in wanted.specifier
    return version


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_a_cluster_file(name):
    config = prepare_config(cluster_file(name))
    validate_config(config)
    types = config["available_node_types"]
    assert config["head_node_type"] == "head"
    assert types["head"]["max_workers"] == 0
    assert types["h200"]["min_workers"] == 0
    assert 0 < types["h200"]["max_workers"] <= config["max_workers"]
    assert config["idle_timeout_minutes"] > 0
    assert "," not in config["provider"]["availability_zone"]
    for node_type in types.values():
        validate_node_labels(node_type["labels"])
        validate_node_label_syntax(node_type["labels"])


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_refuses_a_cluster_file_with_a_slip(name):
    """So the checks above can fail."""
    misspelt = prepare_config(cluster_file(name))
    misspelt["available_node_types"]["h200"]["max_worker"] = 2
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        validate_config(misspelt)
    without_head = prepare_config(cluster_file(name))
    without_head["head_node_type"] = "haed"
    with pytest.raises(ValueError, match="head_node_type"):
        validate_config(without_head)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_nodes_of_a_cluster_can_install_the_package(name):
    config = cluster_file(name)
    mounts = config["file_mounts"]
    mounted = {local for remote, local in mounts.items() if remote.startswith(CHECKOUT)}
    assert all(remote == CHECKOUT + local for remote, local in mounts.items() if local in mounted)
    assert needed_to_install() <= mounted
    assert all((REPOSITORY / local).exists() for local in mounted)
    [install] = [command for command in config["setup_commands"] if "pip install" in command]
    assert '"$HOME/expert_pool[gpu]"' in install
    assert "gpu" in PROJECT["project"]["optional-dependencies"]
    assert pinned_ray(install) == cluster_spec("raycluster")["rayVersion"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_node_shows_the_token_and_no_dashboard_listens_outside(name):
    config = cluster_file(name)
    assert config["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    starts = [command for command in starts if "ray start" in command]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", CLUSTERS)
def test_the_autoscaler_grows_a_cluster_for_a_pool(name, pool):
    """Asked as by a placement group, Ray's own arithmetic brings whole H200 hosts, and no more than it needs."""
    config = prepare_config(cluster_file(name))
    wanted = load_config(str(RAY_CONFIGS / "pools" / f"{pool}.yaml"), {})
    bundles = [wanted.bundle] * wanted.ranks
    scorer = partial(_default_utilization_scorer, node_availability_summary=NodeAvailabilitySummary({}))
    nodes, unplaced = get_nodes_for(
        config["available_node_types"], {"head": 1}, "head", config["max_workers"], bundles, scorer
    )
    assert unplaced == []
    assert nodes == {"h200": -(-wanted.ranks // 8)}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_what_its_definition_asks_for(name):
    assert problems_of(manifest(name)) == []


def test_the_check_of_manifests_finds_what_is_missing_and_what_is_unknown():
    """So it can fail: each change to a good manifest is found, under its path."""
    changes = {
        "spec.headGroupSpec: missing": lambda m: m["spec"].pop("headGroupSpec"),
        "spec.workerGroupSpecs[0].groupName: missing": lambda m: m["spec"]["workerGroupSpecs"][0].pop("groupName"),
        "spec.workerGroupSpecs[0].maxReplicas: missing": lambda m: m["spec"]["workerGroupSpecs"][0].pop("maxReplicas"),
        "spec.workerGroupSpecs[0].minReplica: unknown": lambda m: m["spec"]["workerGroupSpecs"][0].update(minReplica=1),
        "spec.headGroupSpec.template.spec.containers: missing": lambda m: m["spec"]["headGroupSpec"]["template"][
            "spec"
        ].pop("containers"),
        "spec.headGroupSpec.rayStartParams.num-cpus: 0 is no text": lambda m: m["spec"]["headGroupSpec"][
            "rayStartParams"
        ].update({"num-cpus": 0}),
        "spec.enableInTreeAutoscalling: unknown": lambda m: m["spec"].update(enableInTreeAutoscalling=True),
        "metadata: missing": lambda m: m.pop("metadata"),
        "apiVersion: ray.io/v1alpha1 is not ray.io/v1": lambda m: m.update(apiVersion="ray.io/v1alpha1"),
    }
    for said, change in changes.items():
        changed = copy.deepcopy(manifest("raycluster"))
        change(changed)
        assert said in problems_of(changed)
    job = manifest("detached_pool")
    job["spec"]["backoffLimit"] = 1
    assert problems_of(job) == ["spec.backoffLimit: not beside clusterSelector"]
    del job["spec"]["clusterSelector"]
    assert "spec.rayClusterSpec: missing, and so is clusterSelector" in problems_of(job)


def test_both_clusters_of_the_manifests_are_one_that_scales_from_zero_in_one_zone():
    spec = cluster_spec("raycluster")
    assert spec == cluster_spec("rayjob")
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["authOptions"] == {"mode": "token"}
    [workers] = spec["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == 0
    validate_node_labels(workers["labels"])
    validate_node_label_syntax(workers["labels"])
    pod = workers["template"]["spec"]
    [near] = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["topologyKey"] == "topology.kubernetes.io/zone"
    assert near["labelSelector"]["matchLabels"].items() <= workers["template"]["metadata"]["labels"].items()
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["nvidia.com/gpu"] == "8"


def test_the_image_of_the_manifests_holds_the_package():
    text = (RAY_CONFIGS / "kuberay" / "Dockerfile").read_text("utf-8")
    copied = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")]
    sources = {source for *group, _ in copied for source in group}
    assert needed_to_install() <= sources
    assert all((REPOSITORY / source).exists() for source in sources)
    assert pinned_ray(text) == cluster_spec("raycluster")["rayVersion"]
    tag = f"expert-pool:{PROJECT['project']['version']}"
    assert f"-t {tag} " in text
    for group in (cluster_spec("raycluster")["headGroupSpec"], *cluster_spec("raycluster")["workerGroupSpecs"]):
        assert [one["image"] for one in group["template"]["spec"]["containers"]] == [tag]


@pytest.mark.parametrize("name", ["rayjob", "detached_pool"])
def test_the_job_runs_a_command_that_there_is_and_its_files_are_in_the_image(name):
    program, command_name, *options = shlex.split(manifest(name)["spec"]["entrypoint"])
    assert program in PROJECT["project"]["scripts"]
    command = command_line.commands[command_name]
    parsed = command.make_context(command_name, options).params
    assert (RAY_CONFIGS.parent / parsed["config_path"].removeprefix(IMAGE)).is_file()


def test_the_pool_that_stays_is_in_the_cluster_of_the_manifest():
    selected = manifest("detached_pool")["spec"]["clusterSelector"]
    assert selected == {"ray.io/cluster": manifest("raycluster")["metadata"]["name"]}
    comments = (RAY_CONFIGS / "kuberay" / "detached_pool.yaml").read_text("utf-8")
    for command_name, *options in map(shlex.split, re.findall(r"^#   .* -- expert-pool (.*)$", comments, re.MULTILINE)):
        command_line.commands[command_name].make_context(command_name, options)


def test_the_readme_beside_the_files_names_each_of_them_and_nothing_else():
    rows = re.findall(r"^\| (`.*?) \|", (RAY_CONFIGS / "README.md").read_text("utf-8"), re.MULTILINE)
    patterns = [span for row in rows for span in re.findall(r"`([^`]+)`", row) if "." in span or "/" in span]
    named = {path for pattern in patterns for path in RAY_CONFIGS.glob(pattern)}
    assert all(list(RAY_CONFIGS.glob(pattern)) for pattern in patterns)
    files = {path for path in RAY_CONFIGS.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files - named == {RAY_CONFIGS / "README.md"}


@pytest.mark.long
def test_the_script_uses_a_pool_that_stays():
    """`expert-pool launch` and `shutdown` are tested with the pools that have a name."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def script(name: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(RAY_CONFIGS / "detached_pool.py"), name, 'A "break" statement executed in the first'],
            env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            capture_output=True,
            text=True,
            timeout=120,
        )

    try:
        config = PoolConfig(model=str(REPOSITORY / "examples/tiny_moe"), ranks=2)
        pool = ExpertPool.launch(config, name="tiny", detached=True)
        used = script("tiny")
        assert used.stdout.startswith('A "break" statement executed in the first suite terminates the loop'), (
            used.stderr
        )
        assert pool.status().state == "ready"
        gone = script("other")
        assert gone.returncode == 1
        assert gone.stderr.splitlines()[-1].startswith("failed: no pool named 'other' runs in this cluster")
        pool.shutdown()
    finally:
        ray.shutdown()
