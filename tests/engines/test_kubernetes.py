"""Manifests for Kubernetes: valid, complete in themselves, and their commands train."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import kubernetes_validate
import pytest
from click.testing import CliRunner
from cryptography import x509
from nfdt_client.connection import JobsClient

from nfdt.cli import cli
from nfdt.cli.kubernetes import CPU_IMAGE, GPU_IMAGE
from nfdt.core.errors import PolicyRefused
from nfdt.engines.kubernetes import WANTED
from tests.support.command_lines import command_of
from tests.support.pods import PodFolder, component, controllers, of_kind, read_manifests
from tests.support.scripts import DEADLINE_S, DIGITS, NFDT, environment, stop

pytestmark = pytest.mark.processes

TRAIN = """
print(json.dumps(build().fit(x[:600], y[:600], epochs=1, verbose=0).nfdt))
"""
EVICTED = """
from pathlib import Path

class UntilEnough(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("trained", flush=True)
        self.model.stop_training = Path(__file__).with_name("enough").exists()

history = build().fit(x[:600], y[:600], batch_size=20, epochs=100_000, verbose=0, callbacks=[UntilEnough()])
print(json.dumps([len(history.epoch), history.nfdt]))
"""

VERSIONS = ["1.28", kubernetes_validate.latest_version()]
SMALL = ("--workers", "1")
FULL = ("--workers", "8", "--shards", "2", "--image", "registry.example/nfdt:1", "--name", "digits", "--namespace")
FULL += ("vision", "--cpu", "500m", "--memory", "2Gi", "--gpu", "1", "--storage", "10Gi", "--allow-code")
FULL += ("--grace", "600")


def generate(*options: str):
    done = CliRunner().invoke(cli, ["kubernetes", *options])
    assert done.exit_code == 0, done.output
    return read_manifests(done.output)


@pytest.fixture(params=[SMALL, FULL], ids=["small", "full"])
def documents(request):
    return generate(*request.param)


@pytest.fixture
def pods(documents, tmp_path):
    found = {component(one): PodFolder(one, documents, tmp_path / component(one)) for one in controllers(documents)}
    for pod in found.values():
        pod.make_volumes()
    return found


def certificate(documents) -> x509.Certificate:
    (tls,) = [secret for secret in of_kind(documents, "Secret") if "tls.crt" in secret["stringData"]]
    return x509.load_pem_x509_certificate(tls["stringData"]["tls.crt"].encode())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_match_the_published_schemas(documents, version):
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_a_schema_finds_a_wrong_field(documents):
    document = controllers(documents)[0]
    document["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


def test_the_options_are_in_the_manifests():
    documents = generate(*FULL)
    assert {one["metadata"]["namespace"] for one in documents} == {"vision"}
    server, worker, shard = controllers(documents)
    assert [one["spec"]["replicas"] for one in (server, worker, shard)] == [1, 8, 2]
    assert [c["image"] for one in controllers(documents) for c in PodFolder(one, documents, None).containers] == [
        "registry.example/nfdt:1"
    ] * 4
    for one in (server, worker, shard):
        assert one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 600 + 10
    amounts = {"cpu": "500m", "memory": "2Gi"}
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {**amounts, "nvidia.com/gpu": "1"}
    (container,) = shard["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == amounts
    (claim,) = server["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "10Gi"}
    assert "--allow-code" in server["spec"]["template"]["spec"]["containers"][0]["command"]


def test_every_command_of_ours_parses_with_the_files_of_its_volumes(pods):
    checked = []
    for pod in pods.values():
        for container in pod.containers:
            probes = [container[name]["exec"]["command"] for name in container if name.endswith("Probe")]
            for words in [pod.command(container), *(pod.command(container, words) for words in probes)]:
                if words[0] == "nfdt":
                    with command_of(cli, words[1]).make_context(words[1], words[2:]) as context:
                        checked.append(context.info_name)
    assert {"server", "health", "worker"} == set(checked)


def test_every_volume_is_mounted_and_only_the_server_has_the_private_key(pods):
    for role, pod in pods.items():
        mounted = {mount["name"] for container in pod.containers for mount in container["volumeMounts"]}
        assert mounted == {folder.name for folder in pod.root.iterdir()}
        assert (pod.root / "tls" / "tls.key").exists() == (role == "server")


def test_selectors_choose_the_pods_that_they_mean(documents):
    templates = {component(one): one["spec"]["template"]["metadata"]["labels"] for one in controllers(documents)}

    def chosen(selector):
        return {role for role, labels in templates.items() if selector.items() <= labels.items()}

    for controller in controllers(documents):
        assert chosen(controller["spec"]["selector"]["matchLabels"]) == {component(controller)}
    (service,), (policy,) = of_kind(documents, "Service"), of_kind(documents, "NetworkPolicy")
    assert chosen(service["spec"]["selector"]) == {"server"}
    assert chosen(policy["spec"]["podSelector"]["matchLabels"]) == set(templates)
    assert chosen(policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]) == set(templates)
    budgets = of_kind(documents, "PodDisruptionBudget")
    assert {component(one) for one in budgets} == set(templates)
    for budget in budgets:
        assert chosen(budget["spec"]["selector"]["matchLabels"]) == {component(budget)}


def test_an_autoscaler_makes_as_many_workers_as_jobs_want():
    documents = generate("--workers", "2", "--max-workers", "9", "--shards", "1")
    (scaler,) = of_kind(documents, "HorizontalPodAutoscaler")
    for version in VERSIONS:
        kubernetes_validate.validate(scaler, version, strict=True)
    _, worker, shard = controllers(documents)
    spec = scaler["spec"]
    scaled = {name: worker[name] for name in ("apiVersion", "kind")} | {"name": worker["metadata"]["name"]}
    assert spec["scaleTargetRef"] == scaled
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 9)
    assert "replicas" not in worker["spec"], "a manifest that is applied again leaves the autoscaler's number"
    assert shard["spec"]["replicas"] == 1
    (metric,) = spec["metrics"]
    assert metric["external"]["metric"]["name"] == WANTED
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_fewer_workers_at_most_than_at_least_are_refused():
    done = CliRunner().invoke(cli, ["kubernetes", "--workers", "3", "--max-workers", "2"])
    assert done.exit_code == 2
    assert "at least --workers, 3" in done.output


@pytest.mark.parametrize(("options", "server"), [((), 0), (("--storage", "1Gi"), 1)], ids=["in-pod", "volume"])
def test_a_drain_of_nodes_takes_one_pod_at_a_time_and_no_server_whose_state_ends_with_it(options, server):
    budgets = of_kind(generate(*SMALL, "--shards", "2", *options), "PodDisruptionBudget")
    most = {component(one): one["spec"]["maxUnavailable"] for one in budgets}
    assert most == {"server": server, "worker": 1, "shard": 1}


@pytest.mark.parametrize(
    ("options", "image"),
    [((), CPU_IMAGE), (("--gpu", "2"), GPU_IMAGE), (("--gpu", "1", "--image", "site/nfdt:cuda"), "site/nfdt:cuda")],
    ids=["cpu", "gpu", "own"],
)
def test_workers_with_gpus_get_an_image_for_them(options, image):
    documents = generate(*SMALL, *options)
    pods = [PodFolder(one, documents, None) for one in controllers(documents)]
    assert {container["image"] for pod in pods for container in pod.containers} == {image}


def test_the_image_for_cpus_is_refused_with_gpus():
    done = CliRunner().invoke(cli, ["kubernetes", *SMALL, "--gpu", "1", "--image", f"registry.example/{CPU_IMAGE}"])
    assert done.exit_code == 2
    assert GPU_IMAGE in done.output


def test_the_images_are_made_as_the_containerfile_says():
    text = (Path(__file__).parents[2] / "deploy" / "Containerfile").read_text(encoding="utf-8")
    assert f"-t {CPU_IMAGE} ." in text
    assert f"-t {GPU_IMAGE} --build-arg EXTRAS=tensorflow ." in text


def test_names_and_ports_agree(documents):
    (service,), (server, *others) = of_kind(documents, "Service"), controllers(documents)
    port, page = service["spec"]["ports"]
    (container,) = server["spec"]["template"]["spec"]["containers"]
    exposed = [(each["name"], each["containerPort"]) for each in container["ports"]]
    assert exposed == [(each["targetPort"], each["port"]) for each in (port, page)]
    words = container["command"]
    assert words[words.index("--listen") + 1] == f"0.0.0.0:{port['port']}"
    assert words[words.index("--ui") + 1] == f"0.0.0.0:{page['port']}"
    (policy,) = of_kind(documents, "NetworkPolicy")
    _, clients, readers = policy["spec"]["ingress"]
    assert [each["ports"][0]["port"] for each in (clients, readers)] == [port["port"], page["port"]]
    assert readers["from"] == [{"namespaceSelector": {}, **clients["from"][0]}]
    assert server["spec"]["serviceName"] == service["metadata"]["name"]
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    names = certificate(documents).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {host, "localhost"} <= set(names.get_values_for_type(x509.DNSName))
    for other in others:
        words = other["spec"]["template"]["spec"]["containers"][0]["command"]
        assert words[words.index("--server") + 1] == f"{host}:{port['port']}"


def test_pods_run_without_rights_and_without_secrets_in_their_commands(documents):
    opaque = [secret["stringData"] for secret in of_kind(documents, "Secret") if secret["type"] == "Opaque"]
    tokens = [value for values in opaque for value in values.values()]
    assert len({*tokens}) == 2
    assert min(map(len, tokens)) >= 32
    for controller in controllers(documents):
        spec = controller["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        assert not any(token in str(spec) for token in tokens)
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_only_the_server_s_pod_has_its_key_and_the_token_that_may_train(documents):
    for controller in controllers(documents):
        secrets = [
            volume["secret"] for volume in controller["spec"]["template"]["spec"]["volumes"] if "secret" in volume
        ]
        keys = {item["key"] for secret in secrets for item in secret["items"]}
        others = {"worker-token", "ca.crt"}
        assert keys == (others | {"token", "tls.crt", "tls.key"} if component(controller) == "server" else others)


def test_two_runs_share_no_secret():
    first, second = ([secret["stringData"] for secret in of_kind(generate(*SMALL), "Secret")] for _ in range(2))
    assert not {*first[0].values(), *first[1].values()} & {*second[0].values(), *second[1].values()}
    assert first[2]["tls.key"] != second[2]["tls.key"]


@pytest.mark.parametrize(
    ("option", "value"), [("--name", "Digits"), ("--namespace", "a_b"), ("--memory", "4 GB"), ("--workers", "0")]
)
def test_a_value_that_kubernetes_would_refuse_is_refused(option, value):
    done = CliRunner().invoke(cli, ["kubernetes", *SMALL, option, value])
    assert done.exit_code == 2
    assert value in done.output


def test_a_probe_of_a_silent_server_is_exit_code_4():
    done = CliRunner().invoke(cli, ["health", "--server", "127.0.0.1:1", "--timeout", "2"])
    assert done.exit_code == 4
    assert "127.0.0.1:1" in done.output


@dataclass
class RunningPods:
    """Processes of this machine with the commands of the containers, at free ports instead of the Service's.

    Attributes:
        pods: The pods by their role.
        server: Process of the server.
        address: Where it listens.
        page: URL of its page.
        offers: Processes of the other pods, by role.
    """

    pods: dict[str, PodFolder]
    server: subprocess.Popen
    address: str
    page: str
    offers: dict[str, subprocess.Popen]

    def script(self, path: Path, text: str, *options: str) -> subprocess.Popen:
        """Run a script as a client of the cluster."""
        path.write_text(DIGITS + text)
        root = self.pods["server"].root
        files = {"NFDT_TOKEN_FILE": str(root / "token" / "token"), "NFDT_CA_FILE": str(root / "tls" / "ca.crt")}
        return subprocess.Popen(
            [*NFDT, "run", "--server", self.address, "--workers", "1", *options, str(path)],
            env=environment(**files),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextmanager
def running(pods: dict[str, PodFolder], folder: Path) -> Iterator[RunningPods]:
    server = pods["server"]
    copy, serve = server.containers
    subprocess.run(server.command(copy), check=True, timeout=DEADLINE_S)
    free = {"0.0.0.0:7777": "127.0.0.1:0", "0.0.0.0:7778": "127.0.0.1:0"}
    words = [free.get(word, word) for word in server.command(serve)[1:]]
    with ExitStack() as undo:
        logs = undo.enter_context((folder / "log").open("w"))
        own = {"env": environment(HOME=str(server.root / "home")), "text": True, "stderr": logs}
        process = subprocess.Popen([*NFDT, *words], stdout=subprocess.PIPE, **own)
        undo.callback(stop, process)
        line = process.stdout.readline()
        assert "listening" in line, (folder / "log").read_text()
        address = f"localhost:{line.split()[-1].rpartition(':')[2]}"
        (page,) = re.findall(r"page: (https://[^/]+)/", (folder / "log").read_text())
        probe = server.command(serve, serve["readinessProbe"]["exec"]["command"])[1:]
        probe[probe.index("--server") + 1] = address
        subprocess.run([*NFDT, *probe], check=True, timeout=DEADLINE_S, **own)
        offers = {}
        for role, pod in pods.items():
            if role != "server":
                offer = pod.command(*pod.containers)[1:]
                offer[offer.index("--server") + 1] = address
                offers[role] = subprocess.Popen([*NFDT, *offer], **own)
                undo.callback(stop, offers[role])
        yield RunningPods(pods, process, address, page, offers)


@pytest.mark.feature("Kubernetes manifests", area="Launchers and environments")
@pytest.mark.parametrize("documents", [generate(*SMALL, "--shards", "1")], ids=["shard"])
def test_the_commands_of_the_containers_train_and_serve_metrics(documents, pods, tmp_path):
    """Server, probe, worker and shard with the files of their volumes, and a client."""
    with running(pods, tmp_path) as cluster:
        client = cluster.script(tmp_path / "script.py", TRAIN)
        output, errors = client.communicate(timeout=DEADLINE_S)
        root = pods["server"].root
        request = urllib.request.Request(
            f"{cluster.page.replace('127.0.0.1', 'localhost')}/metrics",
            headers={"Authorization": f"Bearer {(root / 'own-token' / 'token').read_text().strip()}"},
        )
        trusted = ssl.create_default_context(cafile=root / "tls" / "ca.crt")
        with urllib.request.urlopen(request, context=trusted, timeout=DEADLINE_S) as reply:
            metrics = reply.read().decode()
        of_worker = (pods["worker"].root / "worker-token" / "worker-token").read_text()
        with closing(JobsClient(cluster.address, of_worker, ca_file=str(root / "tls" / "ca.crt"))) as thief:
            with pytest.raises(PolicyRefused, match="whose role is work"):
                thief.list()
    assert client.returncode == 0, errors[-4000:]
    assert sum(one["samples"] for one in json.loads(output.splitlines()[-1]).values()) == 600
    assert 'nfdt_jobs{state="succeeded"} 1.0' in metrics
    assert f"{WANTED} 0.0" in metrics
    assert [os.stat(file).st_mode & 0o777 for file in (root / "own-token").iterdir()] == [0o600, 0o600]


@pytest.mark.parametrize("documents", [generate(*SMALL)], ids=["in-pod"])
def test_a_worker_that_is_evicted_hands_over_within_the_time_that_its_pod_has(documents, pods, tmp_path):
    """SIGTERM to the container's process; the worker of another pod goes on, and no sample is trained twice."""
    (allowed,) = [
        one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for one in controllers(documents)
        if component(one) == "worker"
    ]
    with running(pods, tmp_path) as cluster:
        client = cluster.script(tmp_path / "script.py", EVICTED, "--set", "epoch_overlap=false")
        assert client.stdout.readline() == "trained\n"
        began = time.monotonic()
        evicted = cluster.offers["worker"]
        evicted.send_signal(signal.SIGTERM)
        assert evicted.wait(DEADLINE_S) == 0
        assert time.monotonic() - began < allowed
        offer = [*NFDT, *pods["worker"].command(*pods["worker"].containers)[1:]]
        offer[offer.index("--server") + 1] = cluster.address
        with (tmp_path / "log").open("a") as log:
            following = subprocess.Popen([*offer, "--name", "following"], stderr=log, env=environment())
        (tmp_path / "enough").touch()
        try:
            output, errors = client.communicate(timeout=DEADLINE_S)
        finally:
            stop(following)
    assert client.returncode == 0, errors[-4000:]
    epochs, workers = json.loads(output.splitlines()[-1])
    assert sum(one["samples"] for one in workers.values()) == 600 * epochs
