"""bench against a real tritonserver."""

import json
import socket

import pytest

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def served(write_pair_yaml, tmp_path_factory):
    """A tiny pair whose draft is its target, packaged and served: (YAML, gRPC address)."""
    from specbuild.build import run_build
    from specbuild.config import ROLES, load_config
    from specbuild.convert import run_convert
    from specbuild.package import run_package
    from specbuild.quantize import run_quantize
    from specbuild.triton.server import Ports, Server

    path = write_pair_yaml(tmp_path_factory.mktemp("bench"), draft={"quantize": {"scheme": "int4_awq", "group_size": 32}})
    config = load_config(path)
    path = write_pair_yaml(path.parent, draft={"model": config.target.model, "quantize": {"scheme": "int4_awq", "group_size": 32}})
    config = load_config(path)
    for stage in (run_convert, run_quantize, run_build):
        for role in ROLES:
            stage(config, role)
    run_package(config)
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = Ports(*(probe.getsockname()[1] for probe in probes))
    for probe in probes:
        probe.close()
    with Server(config.repository_dir, ports) as server:
        server.wait_until_ready()
        yield path, f"127.0.0.1:{ports.grpc}"


def test_a_server_is_measured_with_real_concurrency(cli, served, tmp_path):
    path, url = served
    options = ["--url", url, "--runs", 1, "--max-tokens", 12, "--draft-len", 3, "--batch", "1,2", "--html", tmp_path / "b.html", "--json"]
    code, out, err = cli("bench", path, *options)
    assert code == 0, err
    report = json.loads(out)
    assert report["place"] == f"served at {url}"
    rows = {(row["draft_len"], row["batch"]): row for row in report["rows"]}
    assert set(rows) == {(0, 1), (3, 1), (0, 2), (3, 2)}
    for batch in (1, 2):
        plain, drafting = rows[0, batch]["counts"], rows[3, batch]["counts"]
        assert plain["tokens"] == drafting["tokens"] == plain["rounds"]
        assert plain["drafted"] == 0
        assert drafting["accepted"] == drafting["drafted"] > 0  # the draft is the target
    assert rows[3, 1]["split_seconds"] is None  # a client cannot see it
    assert report["c"] > 0  # of the engines here
    assert not any("not the plain ones" in warning for warning in report["warnings"])
