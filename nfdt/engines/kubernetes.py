"""Kubernetes manifests, as dictionaries, of a cluster: a job server, workers, shards, and the secrets they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nfdt.core.work.slot_connection import GRACE_S

if TYPE_CHECKING:
    from nfdt.core.wire.certificates import CertificateAuthority

PORT = 7777
PAGE_PORT = 7778  # of the page and of /metrics
USER = 1000  # of the image
STATE = "/var/lib/nfdt"
RUN = "/run/nfdt"
TOKEN = "/etc/nfdt/token"
WORKER_TOKEN = "worker-token"
TLS = "/etc/nfdt/tls"
HOME = "/home/nfdt"
PROBE_PERIOD_S = 30
PROBE_TIMEOUT_S = 20  # a probe starts Python, on a machine that may be busy
MORE_S = 10  # from the end of the grace, in which slots and the server end in order, to SIGKILL
START_PROBES = 20  # number of probes until the server must serve

WANTED = "nfdt_workers_wanted"  # of /metrics
_PORTS = {"grpc": PORT, "page": PAGE_PORT}

KubernetesObject = dict[str, Any]


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of a cluster on Kubernetes.

    Attributes:
        image: Image of every container, as made from deploy/Containerfile.
        workers: Number of pods with one worker each.
        shards: Number of pods with one shard each; 0: shards are in the server's pod.
        name: Name of the server's Service, and prefix of all other names.
        namespace: Namespace of everything.
        cpu: CPUs of each pod.
        memory: Memory of each pod.
        gpu: GPUs of each worker; the image then has TensorFlow for GPUs.
        grace: Seconds in which slots finish their step and hand over, after SIGTERM.
        storage: Size of a volume that keeps the server's state; None: the state ends with the server's pod.
        allow_code: Whether the server takes jobs that carry code.
        token: Secret of the server, for those who train.
        worker_token: Secret of the server for workers and shards.
        max_workers: Number of worker pods to which an autoscaler may raise ``workers``; None: there is no autoscaler.
    """

    image: str
    workers: int
    shards: int = 0
    name: str = "nfdt"
    namespace: str = "default"
    cpu: str = "2"
    memory: str = "4Gi"
    gpu: int = 0
    grace: int = int(GRACE_S)
    storage: str | None = None
    allow_code: bool = False
    token: str = field(default="", repr=False)
    worker_token: str = field(default="", repr=False)
    max_workers: int | None = None

    @property
    def host(self) -> str:
        """Name of the server within the cluster."""
        return f"{self.name}.{self.namespace}.svc"


def manifests(options: KubernetesOptions, authority: CertificateAuthority) -> list[KubernetesObject]:
    """Return all manifests, in the order in which they are applied."""
    documents = [_token(options, "token", options.token), _token(options, WORKER_TOKEN, options.worker_token)]
    documents += [_tls(options, authority), _service(options), _policy(options), _server(options)]
    documents.append(_offer(options, "worker", options.workers, ("--slots", "1"), gpu=options.gpu))
    if options.shards:
        documents.append(_offer(options, "shard", options.shards, ("--shards", "1")))
    if options.max_workers is not None:
        documents.append(_autoscaler(options, options.max_workers))
    return [*documents, *_budgets(options)]


def _labels(options: KubernetesOptions, component: str = "") -> dict[str, str]:
    """Return the labels of a component, or those that all pods of the cluster share."""
    parts = {"name": "nfdt", "instance": options.name, "component": component}
    return {f"app.kubernetes.io/{name}": value for name, value in parts.items() if value}


def _document(
    options: KubernetesOptions, api: str, kind: str, name: str, component: str, content: Mapping[str, Any]
) -> KubernetesObject:
    metadata = {"name": name, "namespace": options.namespace, "labels": _labels(options, component)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _token(options: KubernetesOptions, name: str, secret: str) -> KubernetesObject:
    content = {"type": "Opaque", "stringData": {name: secret}}
    return _document(options, "v1", "Secret", f"{options.name}-{name}", "server", content)


def _tls(options: KubernetesOptions, authority: CertificateAuthority) -> KubernetesObject:
    names = [options.name, f"{options.name}.{options.namespace}", options.host, f"{options.host}.cluster.local"]
    names += ["localhost", "127.0.0.1"]  # for kubectl port-forward
    pair = authority.issue(names)
    files = {"ca.crt": authority.cert, "tls.crt": pair.cert, "tls.key": pair.key}
    content = {"type": "kubernetes.io/tls", "stringData": {name: pem.decode() for name, pem in files.items()}}
    return _document(options, "v1", "Secret", f"{options.name}-tls", "server", content)


def _service(options: KubernetesOptions) -> KubernetesObject:
    spec = {
        "clusterIP": "None",
        "selector": _labels(options, "server"),
        "ports": [{"name": name, "port": port, "targetPort": name} for name, port in _PORTS.items()],
    }
    return _document(options, "v1", "Service", options.name, "server", {"spec": spec})


def _policy(options: KubernetesOptions) -> KubernetesObject:
    """Return a policy that admits the cluster's own pods, and clients at the server's ports.

    Clients are of the namespace; those of the page, such as Prometheus, may be of any other.
    """
    all_pods = {"matchLabels": _labels(options)}
    clients = {"podSelector": {"matchLabels": {f"{options.name}-client": "true"}}}
    ingress = [
        {"from": [{"podSelector": all_pods}]},
        {"from": [clients], "ports": [{"port": PORT, "protocol": "TCP"}]},
        {"from": [{"namespaceSelector": {}, **clients}], "ports": [{"port": PAGE_PORT, "protocol": "TCP"}]},
    ]
    spec = {"podSelector": all_pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return _document(options, "networking.k8s.io/v1", "NetworkPolicy", options.name, "server", {"spec": spec})


def _server(options: KubernetesOptions) -> KubernetesObject:
    serve = ["nfdt", "server", "--listen", f"0.0.0.0:{PORT}", "--state-dir", STATE, "--token-file", f"{RUN}/token"]
    serve += ["--worker-token-file", f"{RUN}/{WORKER_TOKEN}"]
    serve += ["--tls-cert", f"{TLS}/tls.crt", "--tls-key", f"{TLS}/tls.key", "--ui", f"0.0.0.0:{PAGE_PORT}"]
    health = ["nfdt", "health", "--server", f"localhost:{PORT}", "--ca-file", f"{TLS}/ca.crt"]
    probe = {"exec": {"command": health}, "periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": PROBE_TIMEOUT_S}
    container = _container(options, "server", [*serve, *(["--allow-code"] if options.allow_code else [])])
    container |= {
        "ports": [{"name": name, "containerPort": port} for name, port in _PORTS.items()],
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": START_PROBES},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 6},
    }
    own = {"name": "own-token", "mountPath": RUN}
    tls = {"name": "tls", "mountPath": TLS, "readOnly": True}
    container["volumeMounts"] += [own, tls, {"name": "state", "mountPath": STATE}]
    # The server refuses a token that others may read; files of a Secret belong to root, and the group may read them.
    places = {"token": TOKEN, WORKER_TOKEN: f"{TOKEN}-of-workers"}
    files = [f"{place}/{name}" for name, place in places.items()]
    copy = _container(options, "token", ["install", "-m", "600", *files, RUN])
    copy["volumeMounts"] += [own, *({"name": n, "mountPath": path, "readOnly": True} for n, path in places.items())]
    tokens = [_secret_volume(options, name, name) for name in places]
    certificates = _secret_volume(options, "tls", "ca.crt", "tls.crt", "tls.key")
    volumes = [*tokens, certificates, {"name": "own-token", "emptyDir": {"medium": "Memory"}}]
    spec: KubernetesObject = {
        "serviceName": options.name,
        "replicas": 1,
        "selector": {"matchLabels": _labels(options, "server")},
        "template": _template(options, "server", container, volumes, initContainers=[copy]),
    }
    if options.storage is None:
        spec["template"]["spec"]["volumes"].append({"name": "state", "emptyDir": {}})
    else:
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": options.storage}}}
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "state"}, "spec": claim}]
    return _document(options, "apps/v1", "StatefulSet", options.name, "server", {"spec": spec})


def _offer(options: KubernetesOptions, role: str, count: int, offer: tuple[str, ...], gpu: int = 0) -> KubernetesObject:
    """Return the pods that offer one slot each, on different machines as far as possible."""
    command = ["nfdt", "worker", "--server", f"{options.host}:{PORT}", "--ca-file", f"{TLS}/ca.crt"]
    command += ["--grace", str(options.grace)]
    container = _container(options, role, [*command, "--token-file", f"{TOKEN}/{WORKER_TOKEN}", *offer], gpu)
    secrets = {WORKER_TOKEN: TOKEN, "tls": TLS}
    container["volumeMounts"] += [{"name": n, "mountPath": path, "readOnly": True} for n, path in secrets.items()]
    volumes = [_secret_volume(options, WORKER_TOKEN, WORKER_TOKEN), _secret_volume(options, "tls", "ca.crt")]
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(options, role)},
    }
    scaled = role == "worker" and options.max_workers is not None  # then the autoscaler sets the number
    spec = {
        **({} if scaled else {"replicas": count}),
        "selector": {"matchLabels": _labels(options, role)},
        "template": _template(options, role, container, volumes, topologySpreadConstraints=[spread]),
    }
    return _document(options, "apps/v1", "Deployment", f"{options.name}-{role}", role, {"spec": spec})


def _autoscaler(options: KubernetesOptions, most: int) -> KubernetesObject:
    """Return an autoscaler that makes a worker pod for each worker that jobs want, within the limits."""
    target = {"type": "AverageValue", "averageValue": "1"}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{options.name}-worker"},
        "minReplicas": options.workers,
        "maxReplicas": most,
        "metrics": [{"type": "External", "external": {"metric": {"name": WANTED}, "target": target}}],
    }
    name = f"{options.name}-worker"
    return _document(options, "autoscaling/v2", "HorizontalPodAutoscaler", name, "worker", {"spec": spec})


def _budgets(options: KubernetesOptions) -> list[KubernetesObject]:
    """Return how many pods a drain of nodes takes away at a time: no server that keeps its state in its pod."""
    most = {"server": int(options.storage is not None), "worker": 1, **({"shard": 1} if options.shards else {})}
    budgets = []
    for role, count in most.items():
        spec = {"maxUnavailable": count, "selector": {"matchLabels": _labels(options, role)}}
        name = f"{options.name}-{role}"
        budgets.append(_document(options, "policy/v1", "PodDisruptionBudget", name, role, {"spec": spec}))
    return budgets


def _container(options: KubernetesOptions, name: str, command: list[str], gpu: int = 0) -> KubernetesObject:
    amounts = {"cpu": options.cpu, "memory": options.memory, **({"nvidia.com/gpu": str(gpu)} if gpu else {})}
    return {
        "name": name,
        "image": options.image,
        "command": command,
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "temporary", "mountPath": "/tmp"}, {"name": "home", "mountPath": HOME}],
    }


def _template(
    options: KubernetesOptions,
    component: str,
    container: KubernetesObject,
    volumes: list[KubernetesObject],
    **more: Any,
) -> KubernetesObject:
    """Return the template of pods with one container; ``more`` are further fields of their specification."""
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": options.grace + MORE_S,
        **more,
        "containers": [container],
        "volumes": [{"name": "temporary", "emptyDir": {}}, {"name": "home", "emptyDir": {}}, *volumes],
    }
    return {"metadata": {"labels": _labels(options, component)}, "spec": spec}


def _secret_volume(options: KubernetesOptions, secret: str, *keys: str) -> KubernetesObject:
    """Return a volume with some keys of one of the secrets, which the pod's group may read."""
    items = [{"key": key, "path": key} for key in keys]
    return {"name": secret, "secret": {"secretName": f"{options.name}-{secret}", "items": items, "defaultMode": 0o440}}
