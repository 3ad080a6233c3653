from __future__ import annotations

import pytest
from nfdt_client.connection_options import find_server, read_token
from nfdt_client.options import resolve, resolve_each

import nfdt
from nfdt.core.errors import NotInstalled, UsageError


def layered(arguments=None, environ=None, directory=None, **more):
    return resolve(arguments or {}, environ=environ or {}, directory=directory, **more)


def test_defaults_are_the_default_preset_on_two_workers(tmp_path):
    options = layered(directory=tmp_path)
    assert (options.algorithm.name, options.cluster.workers, options.server) == ("ddc-asgd", 2, None)
    assert not options.workers_given
    assert {setting.origin for setting in options.settings.values()} == {"default"}


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ({}, {}, (1, "all")),
        ({"devices_per_worker": "2"}, {}, (2, 2)),
        ({"workers": 4}, {}, (4, None)),
        ({}, {"CUDA_VISIBLE_DEVICES": "3"}, (2, None)),
        ({}, {"NFDT_SERVER": "host:1"}, (2, None)),
        ({"algorithm": "allreduce"}, {}, (2, None)),
    ],
)
def test_one_worker_has_all_gpus_of_this_machine_unless_options_say_otherwise(arguments, environ, expected, tmp_path):
    cluster = layered(arguments, {"CUDA_VISIBLE_DEVICES": "0,1,2,3", **environ}, tmp_path).cluster
    assert (cluster.workers, cluster.devices_per_worker) == expected


def test_fewer_than_one_device_are_refused(tmp_path):
    with pytest.raises(UsageError, match="devices_per_worker: expected 'all', or at least 1. Received: 0"):
        layered({"devices_per_worker": 0}, {}, tmp_path)


def test_argument_beats_environment_beats_file_beats_default(tmp_path):
    (tmp_path / "nfdt.toml").write_text('workers = 3\nshards = 2\nalgorithm = "asgd"\ndc_lambda = 1.5\n')
    environ = {"NFDT_WORKERS": "4", "NFDT_ALGORITHM": "dc-asgd"}
    options = layered({"algorithm": "ddc-asgd", "workers": None}, environ, tmp_path)
    assert (options.algorithm.name, options.cluster.workers, options.cluster.shards) == ("ddc-asgd", 4, 2)
    assert options.algorithm.dc_lambda == 1.5
    origins = {name: options.settings[name].origin for name in ("algorithm", "workers", "shards", "overlap")}
    assert origins == {
        "algorithm": "argument",
        "workers": "environment NFDT_WORKERS",
        "shards": str(tmp_path / "nfdt.toml"),
        "overlap": "default",
    }


def test_the_nearest_file_upwards_counts_and_foreign_projects_do_not(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.nfdt]\nworkers = 2\n[tool.nfdt.emulate]\nslowdown = [1, 4]\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    options = layered(directory=inner)
    assert options.cluster.workers == 2
    assert options.cluster.emulate.slowdown == (1.0, 4.0)


def test_emulation_is_given_as_mapping_or_dotted_names(tmp_path):
    mapping = layered({"emulate": {"fail": "1@5"}}, directory=tmp_path)
    dotted = layered({"emulate.fail": "1@5", "emulate.slowdown": "1, 2.5"}, directory=tmp_path)
    environ = layered({}, {"NFDT_EMULATE_FAIL": "1@5"}, tmp_path)
    assert mapping.cluster.emulate.fail == dotted.cluster.emulate.fail == environ.cluster.emulate.fail == "1@5"
    assert dotted.cluster.emulate.slowdown == (1.0, 2.5)
    links = layered({"emulate.bandwidth_mbit": "100", "emulate.latency_ms": "5,10"}, directory=tmp_path)
    assert (links.cluster.emulate.bandwidth_mbit, links.cluster.emulate.latency_ms) == ((100.0,), (5.0, 10.0))


@pytest.mark.parametrize(
    ("given", "read"), [("lazy", "lazy"), ("true", True), (False, False), ("0", False), (True, True)]
)
def test_rows_are_on_off_or_lazy(given, read, tmp_path):
    options = layered({"sparse": given}, directory=tmp_path)
    assert options.algorithm.sparse == options.algorithm.rows == read
    with pytest.raises(UsageError, match="sparse=.* has no effect here. Expected: .*codec='identity'"):
        layered({"sparse": given, "codec": "int8"}, directory=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ({"sparse": "eager"}, "sparse"),
        ({"wokers": 3}, "workers"),
        ({"algorithm": "adsg"}, "ddc-asgd"),
        ({"algorithm": "group-sync", "workers": 4, "groups": "0,1;2"}, "each of the workers 0 to 3"),
        ({"algorithm": "group-sync", "hosts": "a:2"}, "its own machine"),
        ({"workers": 0}, "workers"),
        ({"consistency": "sometimes"}, "softsync"),
        ({"emulate": {"slow": 1}}, "emulate.slowdown"),
        ({"emulate": 3}, "mapping"),
        ({"server": "localhost"}, "HOST:PORT"),
        ({"step_timeout_s": "soon"}, "seconds"),
        ({"codec": "gzip"}, "int8, int4, top-k, adaptive"),
        ({"codec": "int8", "reply_codec": "gzip"}, "reply_codec.* int8"),
        ({"codec": "adaptive", "reply_codec": "int8"}, "both directions"),
        ({"reply_codec": "adaptive"}, "both directions"),
        ({"codec": "top-k", "top_k": 0}, "top_k.* greater than 0"),
        ({"codec": "adaptive", "error_budget": 1}, "error_budget"),
        ({"algorithm": "allreduce", "codec": "int8"}, "identity, fp16, bf16 for allreduce"),
        ({"algorithm": "allreduce", "codec": "adaptive"}, "identity, fp16, bf16 for allreduce"),
        ({"algorithm": "allreduce", "reply_codec": "bf16"}, "no replies"),
        ({"algorithm": "allreduce", "emulate.bandwidth_mbit": 100}, r"Horovod carries.*bsp"),
        ({"emulate.step_ms": "1,2", "workers": 3}, r"one for each of 3\. Received: 2 values"),
        ({"emulate.bandwidth_mbit": "fast"}, "bandwidth_mbit"),
        ({"emulate.latency_ms": "-1"}, "latency_ms"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path, arguments, needle):
    with pytest.raises(UsageError, match=needle):
        layered(arguments, directory=tmp_path)


def test_emulated_values_wait_for_the_number_of_workers_of_the_server(tmp_path):
    options = layered({"server": "host:1", "emulate.step_ms": "1,2,3"}, directory=tmp_path)
    assert options.cluster.emulate.step_ms == (1.0, 2.0, 3.0)


def test_a_bad_file_is_named(tmp_path):
    (tmp_path / "nfdt.toml").write_text("workers = \n")
    with pytest.raises(UsageError, match="nfdt.toml"):
        layered(directory=tmp_path)
    (tmp_path / "nfdt.toml").write_text("worker = 3\n")
    with pytest.raises(UsageError, match=r"nfdt\.toml.*Unknown option 'worker'"):
        layered(directory=tmp_path)


def test_tokens_come_from_the_environment_or_a_file_and_are_never_shown(tmp_path):
    (tmp_path / "token").write_text(" secret\n")
    given = {"server": "host:1"}
    assert layered(given, {"NFDT_TOKEN": "abc"}, tmp_path).token() == "abc"
    from_file = layered(given, {"NFDT_TOKEN_FILE": str(tmp_path / "token")}, tmp_path)
    assert from_file.token() == "secret"
    shown = layered(given, {"NFDT_TOKEN": "abc"}, tmp_path)
    assert "abc" not in repr(shown)
    assert shown.settings["token"].value == "(hidden)"


def test_a_token_in_a_shared_file_is_refused(tmp_path):
    (tmp_path / "nfdt.toml").write_text('token = "secret"\n')
    with pytest.raises(UsageError, match="token_file"):
        layered(directory=tmp_path)


SERVER = 'server = "host:1"\n'


@pytest.mark.parametrize("name", ["/etc/hostname", "../token", "link", "~/token"])
def test_a_file_that_names_a_server_may_not_name_a_token_outside_its_folder(tmp_path, monkeypatch, name):
    (checkout := tmp_path / "checkout").mkdir()
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text("mine")
    (checkout / "link").symlink_to(tmp_path / "token")
    (checkout / "nfdt.toml").write_text(f'token_file = "{name}"\n')
    assert layered({"server": "host:1"}).has_token  # the server is the user's choice
    (checkout / "nfdt.toml").write_text(SERVER + f'token_file = "{name}"\n')
    for resolving in (layered, lambda: find_server({})):
        with pytest.raises(UsageError, match="expected a token_file inside"):
            resolving()


def test_a_token_beside_the_file_that_names_the_server_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("ours")
    (tmp_path / "nfdt.toml").write_text(SERVER + 'token_file = "token"\n')
    assert find_server({}).token() == layered().token() == "ours"


@pytest.mark.parametrize("beside", ["", 'token_file = "ours"\n'], ids=["alone", "beside a token of its own"])
@pytest.mark.parametrize("given", [{"NFDT_TOKEN": "mine"}, {"NFDT_TOKEN_FILE": "/home/me/token"}])
def test_a_server_that_a_file_names_gets_no_token_from_elsewhere_unless_it_is_asked_for(
    tmp_path, monkeypatch, given, beside
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours").write_text("ours")
    (tmp_path / "nfdt.toml").write_text(SERVER + 'ca_file = "their-ca.pem"\n' + beside)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    as_argument = {"token_file": "/home/me/token"}
    for resolving in (lambda: layered({}, given), lambda: find_server({}), lambda: layered(as_argument)):
        with pytest.raises(
            UsageError, match=r"expected a server that you name yourself.* Received: 'host:1'.*--server"
        ):
            resolving()
    assert layered({"server": "host:1"}, given).server == find_server({"server": "host:1"}).server == "host:1"
    assert layered({}, {**given, "NFDT_SERVER": "own:2"}).server == "own:2"


def test_plain_text_is_not_asked_for_by_a_file(tmp_path):
    assert layered({"server": "host:1"}, {"NFDT_INSECURE": "1"}, tmp_path).tls == {"insecure": True}
    assert layered({"server": "host:1", "insecure": False}, {"NFDT_INSECURE": "1"}, tmp_path).tls == {}
    (tmp_path / "nfdt.toml").write_text(SERVER + "insecure = true\n")
    with pytest.raises(UsageError, match="plain text"):
        layered(directory=tmp_path)


def test_a_missing_token_names_where_it_is_looked_for(tmp_path):
    with pytest.raises(UsageError, match="NFDT_TOKEN_FILE"):
        layered({"server": "host:1"}, directory=tmp_path).token()
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "absent")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="empty"):
        read_token(tmp_path / "empty")


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HOROVODRUN = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "0"}
SRUN = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "3"}


@pytest.mark.parametrize(
    ("environ", "rank"), [(OPEN_MPI, 1), (HOROVODRUN, 0), (SRUN, 2)], ids=["mpirun", "horovodrun", "srun"]
)
def test_an_allreduce_job_joins_the_world_it_was_started_in(environ, rank):
    options = layered({"algorithm": "allreduce", "workers": 7}, environ)
    assert options.world is not None
    assert options.world.rank == rank
    assert (options.cluster.workers, options.cluster.launcher) == (3, "world")


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ({"algorithm": "bsp"}, OPEN_MPI),
        ({"algorithm": "allreduce", "server": "h:1"}, OPEN_MPI),
        ({"algorithm": "allreduce"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}),
        ({"algorithm": "allreduce"}, {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}),
    ],
    ids=["another preset", "a server", "a batch script", "alone"],
)
def test_other_jobs_join_no_world(arguments, environ):
    assert layered(arguments, environ).world is None


def test_allreduce_has_no_shards():
    with pytest.raises(UsageError, match="shards"):
        layered({"algorithm": "allreduce", "shards": 2})


@pytest.mark.parametrize("hosts", ["a b", "-x", "a:2;reboot", "a:"])
def test_hosts_are_names_and_numbers(hosts):
    with pytest.raises(UsageError, match="hosts"):
        layered({"algorithm": "allreduce", "hosts": hosts})


@pytest.mark.parametrize("algorithm", ["allreduce", "group-sync"])
def test_without_horovod_the_error_names_its_installation(monkeypatch, algorithm):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match="scripts/install-horovod"), nfdt.session(algorithm=algorithm):
        pass


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (
            {"staleness_bound": 2},
            r"staleness_bound=2 \(argument\) has no effect here.*consistency='ssp'.*algorithm='ssp'",
        ),
        ({"algorithm": "asgd", "dc_lambda": 1}, "update_rule='dc'.*Received: update_rule='plain'"),
        ({"algorithm": "dc-asgd", "gap": 1}, "update_rule='ddc'"),
        ({"softsync_n": 2}, "algorithm='n-softsync'"),
        ({"batch_max": 64}, "batch='dbs'.*'dbs-sgd'"),
        ({"top_k": 0.1}, "codec='top-k'"),
        ({"groups": 2}, "'group-sync'"),
        ({"algorithm": "group-sync", "local_steps": 4}, "exchange='local-steps'.*'local-ddc'"),
        ({"algorithm": "bsp", "plan": "overlap"}, "consistency='free'"),
        ({"algorithm": "allreduce", "update_rule": "ddc"}, "Received: topology='ring'"),
        ({"algorithm": "allreduce", "warmup_epochs": 3}, "scale_lr='linear' or 'sqrt'"),
        ({"algorithm": "allreduce", "commit_steps": 5}, "elastic=True"),
        ({"max_workers": 9}, "algorithm='allreduce'"),
        ({"timeline": "trace.json"}, "algorithm='allreduce'"),
    ],
)
def test_an_argument_without_effect_is_refused(tmp_path, arguments, needle):
    with pytest.raises(UsageError, match=needle):
        layered(arguments, directory=tmp_path)


def test_an_option_without_effect_of_environment_or_file_is_ignored_with_a_warning(tmp_path, caplog):
    (tmp_path / "nfdt.toml").write_text("softsync_n = 4\n")
    options = layered({}, {"NFDT_STALENESS_BOUND": "7", "NFDT_MAX_WORKERS": "9"}, tmp_path)
    assert (options.algorithm.staleness_bound, options.algorithm.softsync_n) == (3, 1)
    assert not options.cluster.elastic
    warnings = [record.getMessage() for record in caplog.records]
    assert [w.partition(" has no effect here and is ignored")[0] for w in warnings] == [
        "max_workers='9' (environment NFDT_MAX_WORKERS)",
        f"softsync_n=4 ({tmp_path / 'nfdt.toml'})",
        "staleness_bound='7' (environment NFDT_STALENESS_BOUND)",
    ]
    assert options.settings["staleness_bound"].origin == "environment NFDT_STALENESS_BOUND: no effect"


def test_in_an_elastic_world_its_options_are_read(tmp_path):
    environ = {**HOROVODRUN, "HOROVOD_ELASTIC": "1"}
    options = layered({"algorithm": "allreduce", "commit_steps": 5}, environ, tmp_path)
    assert options.cluster.commit_steps == 5


def test_of_several_algorithms_one_has_to_read_an_option(tmp_path):
    found = resolve_each({"staleness_bound": 2}, ["asgd", "ssp"], {}, tmp_path)
    assert [options.algorithm.staleness_bound for options in found] == [3, 2]
    with pytest.raises(UsageError, match="staleness_bound"):
        resolve_each({"staleness_bound": 2}, ["asgd", "bsp"], {}, tmp_path)


def test_a_misspelt_variable_is_reported_and_those_of_our_own_commands_are_not(tmp_path, caplog):
    layered({}, {"NFDT_WORKERZ": "3", "NFDT_RENDEZVOUS_DIR": "/x", "OTHER": "y"}, tmp_path)
    (warning,) = [record.getMessage() for record in caplog.records]
    message, _, meant = warning.partition(" Did you mean ")
    assert message == "NFDT_WORKERZ in the environment is no option and is ignored."
    assert meant.startswith("'NFDT_WORKERS'")


def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(tmp_path):
    for arguments in ({"wokers": 3}, {"emulate": {"step": 1}}, {"algorithm": "allreduced"}):
        with pytest.raises(UsageError, match="Did you mean '(workers|emulate.step_ms|allreduce)'"):
            layered(arguments, directory=tmp_path)
    with pytest.raises(UsageError) as raised:
        layered({"worker": 3}, directory=tmp_path)
    assert str(raised.value) == (
        "Unknown option 'worker'. Did you mean 'workers' or 'min_workers' or 'max_workers'? "
        "`nfdt config` lists all options."
    )
    (tmp_path / "pyproject.toml").write_text("[tool.nfdt]\nstalenes_bound = 3\n")
    with pytest.raises(UsageError, match=r"pyproject\.toml: .*Did you mean 'staleness_bound'"):
        layered(directory=tmp_path)


@pytest.mark.parametrize(
    ("environ", "file", "arguments", "needle"),
    [
        ({"NFDT_WORKERS": "many"}, "", {}, r"\(workers from environment NFDT_WORKERS\)$"),
        ({"NFDT_WORKERS": "2"}, "step_timeout_s = 0", {}, r"\(step_timeout_s from \S+nfdt\.toml\)$"),
        ({"NFDT_ALGORITHM": "dcc-asgd"}, "", {"workers": 3}, r"\(algorithm from environment NFDT_ALGORITHM\)$"),
        (
            {"NFDT_EMULATE_LATENCY_MS": "-1"},
            "",
            {},
            r"emulate.latency_ms from environment NFDT_EM",
        ),
        ({"NFDT_ALGORITHM": "allreduce"}, "", {"codec": "int8"}, r"codec from argument"),
    ],
)
def test_the_error_of_a_bad_value_names_its_origin(tmp_path, environ, file, arguments, needle):
    (tmp_path / "nfdt.toml").write_text(file)
    with pytest.raises(UsageError, match=needle):
        layered(arguments, environ, tmp_path)
