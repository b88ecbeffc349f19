"""What KubeRay's resource definitions ask of a manifest, written down by hand.

The source is ray-operator/config/crd/bases/ray.io_rayclusters.yaml and ray.io_rayjobs.yaml of ray-project/kuberay,
version v1, as of release 1.7, and the rules of `ValidateRayJobSpec` and `ValidateRayClusterSpec` in its
ray-operator/controllers/ray/utils/validation.go. Only what the manifests here use is covered.
"""

from collections.abc import Iterator
from typing import Any

CLUSTER_FIELDS = {
    "authOptions",
    "autoscalerOptions",
    "enableInTreeAutoscaling",
    "gcsFaultToleranceOptions",
    "headGroupSpec",
    "headServiceAnnotations",
    "managedBy",
    "networkPolicy",
    "rayVersion",
    "suspend",
    "upgradeStrategy",
    "workerGroupSpecs",
}
JOB_FIELDS = {
    "activeDeadlineSeconds",
    "backoffLimit",
    "clusterSelector",
    "deletionStrategy",
    "entrypoint",
    "entrypointNumCpus",
    "entrypointNumGpus",
    "entrypointResources",
    "jobId",
    "managedBy",
    "metadata",
    "preRunningDeadlineSeconds",
    "rayClusterSpec",
    "runtimeEnvYAML",
    "shutdownAfterJobFinishes",
    "submissionMode",
    "submitterConfig",
    "submitterPodTemplate",
    "suspend",
    "ttlSecondsAfterFinished",
}
HEAD_FIELDS = {
    "enableIngress",
    "headService",
    "ingressOptions",
    "labels",
    "rayStartParams",
    "resources",
    "serviceType",
    "template",
}
WORKER_FIELDS = {
    "groupName",
    "idleTimeoutSeconds",
    "labels",
    "maxReplicas",
    "minReplicas",
    "numOfHosts",
    "priority",
    "rayStartParams",
    "replicas",
    "resources",
    "scaleStrategy",
    "suspend",
    "template",
}
AUTOSCALER_FIELDS = {
    "args",
    "command",
    "env",
    "envFrom",
    "idleTimeoutSeconds",
    "image",
    "imagePullPolicy",
    "resources",
    "securityContext",
    "upscalingMode",
    "version",
    "volumeMounts",
}
UPSCALING_MODES = ("Default", "Aggressive", "Conservative")
SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
AUTH_MODES = ("disabled", "token")
CLUSTER_NAME_LABEL = "ray.io/cluster"


def problems_of(manifest: dict[str, Any]) -> list[str]:
    """Everything in a RayCluster or RayJob that its definition refuses, as paths with what is wrong."""
    found = [*_required(manifest, "", "apiVersion", "kind", "metadata", "spec")]
    if found:
        return found
    if manifest["apiVersion"] != "ray.io/v1":
        found.append(f"apiVersion: {manifest['apiVersion']} is not ray.io/v1")
    found += _required(manifest["metadata"], "metadata.", "name")
    kinds = {"RayCluster": _cluster, "RayJob": _job}
    if manifest["kind"] not in kinds:
        return [*found, f"kind: {manifest['kind']} is none of {', '.join(kinds)}"]
    return [*found, *kinds[manifest["kind"]](manifest["spec"], "spec.")]


def _job(spec: dict[str, Any], at: str) -> Iterator[str]:
    yield from _unknown(spec, at, JOB_FIELDS)
    yield from _one_of(spec, at, "submissionMode", SUBMISSION_MODES)
    for name in ("backoffLimit", "ttlSecondsAfterFinished"):
        if not isinstance(spec.get(name, 0), int) or spec.get(name, 0) < 0:
            yield f"{at}{name}: {spec[name]} is no number of 0 or more"
    selector = spec.get("clusterSelector")
    if not selector and "rayClusterSpec" not in spec:
        yield f"{at}rayClusterSpec: missing, and so is clusterSelector"
    if selector and not selector.get(CLUSTER_NAME_LABEL):
        yield f"{at}clusterSelector: has no {CLUSTER_NAME_LABEL}"
    if selector and spec.get("backoffLimit"):
        yield f"{at}backoffLimit: not beside clusterSelector"
    if "rayClusterSpec" in spec:
        yield from _cluster(spec["rayClusterSpec"], f"{at}rayClusterSpec.")


def _cluster(spec: dict[str, Any], at: str) -> Iterator[str]:
    yield from _required(spec, at, "headGroupSpec")
    yield from _unknown(spec, at, CLUSTER_FIELDS)
    autoscaler = spec.get("autoscalerOptions", {})
    yield from _unknown(autoscaler, f"{at}autoscalerOptions.", AUTOSCALER_FIELDS)
    yield from _one_of(autoscaler, f"{at}autoscalerOptions.", "upscalingMode", UPSCALING_MODES)
    yield from _one_of(spec.get("authOptions", {}), f"{at}authOptions.", "mode", AUTH_MODES)
    if head := spec.get("headGroupSpec"):
        yield from _group(head, f"{at}headGroupSpec.", HEAD_FIELDS)
    for index, group in enumerate(spec.get("workerGroupSpecs", [])):
        here = f"{at}workerGroupSpecs[{index}]."
        yield from _required(group, here, "groupName", "minReplicas", "maxReplicas")
        if not 0 <= group.get("minReplicas", 0) <= group.get("maxReplicas", 0):
            yield f"{here}minReplicas: not between 0 and maxReplicas"
        yield from _group(group, here, WORKER_FIELDS)


def _group(group: dict[str, Any], at: str, fields: set[str]) -> Iterator[str]:
    yield from _unknown(group, at, fields)
    yield from _required(group, at, "template")
    for name, value in group.get("rayStartParams", {}).items():
        if not isinstance(value, str):
            yield f"{at}rayStartParams.{name}: {value!r} is no text"
    pod, here = group.get("template", {}).get("spec", {}), f"{at}template.spec."
    yield from _required(pod, here, "containers")
    volumes = {volume.get("name") for volume in pod.get("volumes", [])}
    if None in volumes:
        yield f"{here}volumes: one has no name"
    for index, container in enumerate(pod.get("containers", [])):
        inside = f"{here}containers[{index}]."
        yield from _required(container, inside, "name", "image")
        for port in container.get("ports", []):
            yield from _required(port, f"{inside}ports.", "containerPort")
        for mount in container.get("volumeMounts", []):
            yield from _required(mount, f"{inside}volumeMounts.", "name", "mountPath")
            if mount.get("name") not in volumes:
                yield f"{inside}volumeMounts: {mount.get('name')} is no volume of the pod"


def _required(value: dict[str, Any], at: str, *names: str) -> Iterator[str]:
    for name in names:
        if value.get(name) in (None, "", [], {}):
            yield f"{at}{name}: missing"


def _unknown(value: dict[str, Any], at: str, fields: set[str]) -> Iterator[str]:
    for name in sorted(set(value) - fields):
        yield f"{at}{name}: unknown"


def _one_of(value: dict[str, Any], at: str, name: str, choices: tuple[str, ...]) -> Iterator[str]:
    if name in value and value[name] not in choices:
        yield f"{at}{name}: {value[name]} is none of {', '.join(choices)}"
