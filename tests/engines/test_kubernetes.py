"""Manifests for Kubernetes: valid, complete in themselves, and their commands train."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack

import kubernetes_validate
import pytest
from click.testing import CliRunner
from cryptography import x509

from nfdt.cli import cli
from tests.support.command_lines import command_of
from tests.support.pods import PodFolder, component, controllers, of_kind, read_manifests
from tests.support.scripts import DEADLINE_S, DIGITS, NFDT, answer, environment, stop

pytestmark = pytest.mark.processes

VERSIONS = ["1.28", kubernetes_validate.latest_version()]
SMALL = ("--workers", "1")
FULL = ("--workers", "8", "--shards", "2", "--image", "registry.example/nfdt:1", "--name", "digits", "--namespace")
FULL += ("vision", "--cpu", "500m", "--memory", "2Gi", "--gpu", "1", "--storage", "10Gi", "--allow-code")


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


def test_names_and_ports_agree(documents):
    (service,), (server, *others) = of_kind(documents, "Service"), controllers(documents)
    (port,) = service["spec"]["ports"]
    (container,) = server["spec"]["template"]["spec"]["containers"]
    (exposed,) = container["ports"]
    assert (exposed["name"], exposed["containerPort"]) == (port["targetPort"], port["port"])
    words = container["command"]
    assert words[words.index("--listen") + 1] == f"0.0.0.0:{port['port']}"
    assert server["spec"]["serviceName"] == service["metadata"]["name"]
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    names = certificate(documents).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {host, "localhost"} <= set(names.get_values_for_type(x509.DNSName))
    for other in others:
        words = other["spec"]["template"]["spec"]["containers"][0]["command"]
        assert words[words.index("--server") + 1] == f"{host}:{port['port']}"


def test_pods_run_without_rights_and_without_secrets_in_their_commands(documents):
    (token,) = [s["stringData"]["token"] for s in of_kind(documents, "Secret") if "token" in s["stringData"]]
    assert len(token) >= 32
    for controller in controllers(documents):
        spec = controller["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        assert token not in str(spec)
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_two_runs_share_no_secret():
    first, second = ([secret["stringData"] for secret in of_kind(generate(*SMALL), "Secret")] for _ in range(2))
    assert first[0]["token"] != second[0]["token"]
    assert first[1]["tls.key"] != second[1]["tls.key"]


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


@pytest.mark.feature("Kubernetes manifests", area="Launchers and environments")
@pytest.mark.parametrize("documents", [generate(*SMALL, "--shards", "1")], ids=["shard"])
def test_the_commands_of_the_containers_train(documents, pods, tmp_path):
    """Server, probe, worker and shard with the files of their volumes, at a free port instead of the Service's."""
    server, worker, shard = pods["server"], pods["worker"], pods["shard"]
    copy, serve = server.containers
    subprocess.run(server.command(copy), check=True, timeout=DEADLINE_S)
    words = ["127.0.0.1:0" if word == "0.0.0.0:7777" else word for word in server.command(serve)[1:]]
    with ExitStack() as undo:
        logs = undo.enter_context((tmp_path / "log").open("w"))
        own = {"env": environment(HOME=str(server.root / "home")), "text": True, "stderr": logs}
        running = subprocess.Popen([*NFDT, *words], stdout=subprocess.PIPE, **own)
        undo.callback(stop, running)
        line = running.stdout.readline()
        assert "listening" in line, (tmp_path / "log").read_text()
        address = f"localhost:{line.split()[-1].rpartition(':')[2]}"
        probe = server.command(serve, serve["readinessProbe"]["exec"]["command"])[1:]
        probe[probe.index("--server") + 1] = address
        subprocess.run([*NFDT, *probe], check=True, timeout=DEADLINE_S, **own)
        for pod in (worker, shard):
            offer = pod.command(*pod.containers)[1:]
            offer[offer.index("--server") + 1] = address
            undo.callback(stop, subprocess.Popen([*NFDT, *offer], **own))
        script = tmp_path / "script.py"
        script.write_text(DIGITS + "h = build().fit(x[:600], y[:600], epochs=1, verbose=0)\nprint(json.dumps(h.nfdt))")
        files = {"NFDT_TOKEN_FILE": worker.root / "token" / "token", "NFDT_CA_FILE": worker.root / "tls" / "ca.crt"}
        done = subprocess.run(
            [*NFDT, "run", "--server", address, "--workers", "1", str(script)],
            env=environment(**{name: str(path) for name, path in files.items()}),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert sum(one["samples"] for one in answer(done).values()) == 600
    assert os.stat(server.root / "own-token" / "token").st_mode & 0o777 == 0o600
