import subprocess
import sys
from pathlib import Path

import pytest

from nfdt.core.errors import AuthenticationFailed, ServerUnreachable, UsageError
from nfdt.core.wire import jobs_pb2, jobs_pb2_grpc
from nfdt.core.wire.channel import make_server, open_channel, same_token
from nfdt.core.wire.status import translated
from tests.support.certificates import CertificatePair, self_signed
from tests.support.scripts import environment


@pytest.fixture(scope="module")
def server_pair(tmp_path_factory) -> CertificatePair:
    return self_signed(tmp_path_factory.mktemp("tls"), "server")


@pytest.fixture(scope="module")
def client_pair(tmp_path_factory) -> CertificatePair:
    return self_signed(tmp_path_factory.mktemp("tls"), "client")


class Answers(jobs_pb2_grpc.JobsServicer):
    def Show(self, request, context):
        return jobs_pb2.JobDescription(name="hello")


every_server = pytest.mark.parametrize("most_calls", [None, 64], ids=["threads", "loop"])


def serve(pair: CertificatePair, most_calls: int | None, client_ca: Path | None = None):
    tls = {"cert": pair.cert, "key": pair.key, "client_ca": client_ca}
    server, bound = make_server(
        "127.0.0.1:0", authenticate=lambda m, t: same_token("s", t), most_calls=most_calls, **tls
    )
    jobs_pb2_grpc.add_JobsServicer_to_server(Answers(), server)
    server.start()
    return server, bound


def ask(address: str, **kwargs) -> str:
    with open_channel(address, "s", **kwargs) as channel, translated(address):
        return jobs_pb2_grpc.JobsStub(channel).Show(jobs_pb2.JobRef(), timeout=10).name


@every_server
def test_tls_works_and_plain_text_does_not(most_calls, server_pair):
    server, bound = serve(server_pair, most_calls)
    assert ask(bound, ca_file=server_pair.cert) == "hello"
    with pytest.raises(ServerUnreachable, match="TLS"):
        ask(bound)
    server.stop(None).wait()


@every_server
def test_another_certificate_is_not_trusted(most_calls, server_pair, client_pair):
    server, bound = serve(server_pair, most_calls)
    with pytest.raises(AuthenticationFailed, match=f"certificate of {bound} is not trusted: .*--ca-file"):
        ask(bound, ca_file=client_pair.cert)
    server.stop(None).wait()


@pytest.mark.processes
def test_nothing_but_the_error_is_printed_about_another_certificate(server_pair, client_pair):
    server, bound = serve(server_pair, None)
    command = [sys.executable, "-m", "nfdt.cli", "health", "--server", bound, "--ca-file", str(client_pair.cert)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    server.stop(None).wait()
    assert done.returncode == AuthenticationFailed.exit_code
    assert done.stderr.startswith(f"Error: The certificate of {bound} is not trusted")
    assert done.stderr.count("\n") == 1


@every_server
def test_mutual_tls_wants_the_clients_certificate(most_calls, server_pair, client_pair):
    server, bound = serve(server_pair, most_calls, client_ca=client_pair.cert)
    own = {"cert_file": client_pair.cert, "key_file": client_pair.key}
    assert ask(bound, ca_file=server_pair.cert, **own) == "hello"
    with pytest.raises(ServerUnreachable):
        ask(bound, ca_file=server_pair.cert)
    server.stop(None).wait()


def test_a_certificate_needs_its_key(server_pair):
    with pytest.raises(UsageError, match="private key"):
        make_server("127.0.0.1:0", authenticate=lambda m, t: True, cert=server_pair.cert)
