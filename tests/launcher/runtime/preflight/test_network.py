"""Which network ranks take: the one with Ray's address, whatever it is called; a user's own choice before all."""

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runtime.preflight import network
from launcher.runtime.preflight.network import (
    connection_error,
    examine_network,
    interface_with_address,
    network_line_rate,
    parse_ray_head,
    rank_network_variables,
)

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.1.0.5", "fe80::1%eth0"],
    "eth0:1": ["10.2.0.5"],
    "bond0.120": ["10.3.0.5", "10.3.1.5", "2001:db8::3"],
    "docker0": ["172.17.0.1"],
    "eth1@if9": ["100.64.0.7"],
}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    found = {
        name: [SimpleNamespace(family=families[":" in one], address=one) for one in addresses]
        + [SimpleNamespace(family=psutil.AF_LINK, address="02:fc:00:00:00:01")]
        for name, addresses in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.parametrize(("name", "address"), [(n, a) for n, found in INTERFACES.items() for a in found])
def test_the_interface_with_the_address_is_taken(interfaces: None, name: str, address: str) -> None:
    assert interface_with_address(address) == name
    found = rank_network_variables(address, {})
    assert found["GLOO_SOCKET_IFNAME"] == name
    assert found["NCCL_SOCKET_IFNAME"] == f"={name.split(':')[0]}"
    assert found["NCCL_SOCKET_FAMILY"] == ("AF_INET6" if ":" in address else "AF_INET")


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("::ffff:10.1.0.5", "eth0"),
        ("fe80::1", "eth0"),
        ("2001:0db8:0:0::3", "bond0.120"),
        ("10.1.0.50", None),
        ("10.1.0.4", None),
    ],
)
def test_an_address_is_more_than_its_letters(interfaces: None, address: str, name: str | None) -> None:
    assert interface_with_address(address) == name
    assert ("GLOO_SOCKET_IFNAME" in rank_network_variables(address, {})) == (name is not None)


NAMES = sorted(rank_network_variables("127.0.0.1", {}))


@given(st.sets(st.sampled_from(NAMES)), st.sampled_from(["127.0.0.1", "203.0.113.9"]))
def test_what_a_user_has_set_stays(own: set[str], address: str) -> None:
    found = rank_network_variables(address, dict.fromkeys(own, "own"))
    assert found == {name: value for name, value in rank_network_variables(address, {}).items() if name not in own}


def test_this_machines_loopback_takes_connections() -> None:
    assert examine_network("127.0.0.1").verdict == "ok"
    assert examine_network("203.0.113.9").verdict == "failure", "an address that is not here"


@pytest.mark.parametrize(("own", "verdict"), [(None, "warning"), ("eth7", "ok")])
def test_a_hosts_name_matters_where_no_interface_has_the_address(
    monkeypatch: pytest.MonkeyPatch, own: str | None, verdict: str
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert examine_network("127.0.0.1").verdict == "ok", "ranks do not go by it"
    if own is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", own)
    monkeypatch.setattr(network, "interface_with_address", lambda address: None)
    finding = examine_network("127.0.0.1")
    assert finding.verdict == verdict
    assert bool(finding.remedy) == (verdict != "ok")
    assert "127.0.1.1" in finding.found


@pytest.mark.parametrize(
    ("speed", "ports", "expected"),
    [
        ("25000\n", {}, 25e9 / 8),
        ("-1\n", {}, None),
        (None, {}, None),
        (
            "1000\n",
            {"mlx5_0": ("400 Gb/sec (4X NDR)", "4: ACTIVE"), "mlx5_1": ("0 Gb/sec", "1: DOWN")},
            400e9 / 8,
        ),
        ("1000\n", {"mlx5_0": ("100 Gb/sec (4X EDR)", "1: DOWN")}, 1e9 / 8),
    ],
)
def test_a_line_has_the_rate_that_the_kernel_tells(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speed: str | None,
    ports: dict[str, tuple[str, str]],
    expected: float | None,
) -> None:
    monkeypatch.setattr(network, "_NET", tmp_path / "net")
    monkeypatch.setattr(network, "_INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth0")
    (tmp_path / "net/eth0").mkdir(parents=True)
    if speed is not None:
        (tmp_path / "net/eth0/speed").write_text(speed)
    for device, (rate, state) in ports.items():
        port = tmp_path / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text(f"{rate}\n")
        (port / "state").write_text(f"{state}\n")
    assert network_line_rate() == expected


@pytest.mark.parametrize(
    ("address", "head"),
    [
        ("10.0.0.1:6379", ("10.0.0.1", 6379)),
        ("ray://head:10001", ("head", 10001)),
        ("[fd00::1]:6379", ("fd00::1", 6379)),
        ("auto", None),
        ("", None),
        ("head:ray", None),
    ],
)
def test_the_head_that_an_address_of_ray_names(address: str, head: tuple[str, int] | None) -> None:
    assert parse_ray_head(address) == head


def test_only_a_head_that_takes_no_connection_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connection_error(f"127.0.0.1:{port}", 5) is None
    assert isinstance(connection_error(f"ray://127.0.0.1:{port}", 5), ConnectionRefusedError)
    assert connection_error("auto", 5) is None
