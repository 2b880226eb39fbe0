"""Finds out which of this machine's networks carries the ranks' messages, and how fast its lines are.

Ray knows each node by an address at which the other nodes reach it. By default, gloo and NCCL may choose another
address: gloo the one to which the host's name resolves (127.0.1.1 on Debian), and NCCL that of the first network that
it finds. So environment variables make both use the interface that has Ray's address.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from launcher.runtime.preflight.findings import Finding

_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
# Addresses on the internet, to ask the kernel which route leads there; nothing is sent to them.
_INTERNET_HOSTS = {socket.AF_INET: "8.8.8.8", socket.AF_INET6: "2001:4860:4860::8888"}
_MEGABIT, _GIGABIT = 1e6 / 8, 1e9 / 8  # in bytes
_RANK_ENVIRONMENT = {  # variables of every rank, unless the user sets them
    # Our watchdog ends stuck ranks, after it has asked for their tracebacks and found the node at fault. torch's own
    # monitor would abort a rank after 8 minutes, sooner than `watchdog.step` and without a message. After an hour
    # it still ends ranks whose watchdog is gone.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "3600",
    # A rank that gets an error from NCCL, or waits for a dead rank, aborts its communicators, and its process stays
    # (`encoder_core.train.groups`). Otherwise a thread of torch would end the process, after it has searched its
    # recorder of collectives for stack traces (seconds) and waited for a dump of the recorder, which nobody reads.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",  # the name of TORCH_FR_BUFFER_SIZE in older versions of torch
}


def parse_ray_head(address: str) -> tuple[str, int] | None:
    """Return host and port of a Ray address (RAY_ADDRESS); None for a name such as "auto", with which Ray looks on this
    machine and fails at once if it finds nothing."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def connection_error(address: str, timeout_s: float) -> OSError | None:
    """Return why a Ray address accepts no connection; None if it accepts one. Ray itself would try for many minutes
    without a useful message."""
    head = parse_ray_head(address)
    try:
        if head is not None:
            socket.create_connection(head, timeout_s).close()
    except OSError as error:
        return error
    return None


def interface_with_address(address: str) -> str | None:
    """Return the name of this machine's interface with `address`, as the kernel labels it (`eth0`, `bond0.12`,
    `eth0:1`); None if no interface has it, as in a container whose host forwards ports."""
    wanted = _parse_ip(address)
    internet = (socket.AF_INET, socket.AF_INET6)
    found = ((str(name), one) for name, addresses in psutil.net_if_addrs().items() for one in addresses)
    return next((name for name, one in found if one.family in internet and _parse_ip(one.address) == wanted), None)


def _parse_ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address without its IPv6 scope (`fe80::1%eth0`); ::ffff:10.0.0.1 becomes 10.0.0.1."""
    found = ipaddress.ip_address(address.split("%")[0])
    mapped = found.ipv4_mapped if found.version == 6 else None
    return mapped or found


def rank_network_variables(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make gloo and NCCL use the network of `address`, this node's address in
    Ray. Variables in `environment` are left out: a user's own value wins."""
    found = dict(_RANK_ENVIRONMENT)
    name = interface_with_address(address)
    if name is not None:
        # NCCL takes a name without `=` before it for a prefix, and the part after a colon for a port. So it gets `=`
        # and the device's name, without the label after the colon.
        device = name.split(":")[0]
        found |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={device}"}
        found["NCCL_SOCKET_FAMILY"] = f"AF_INET{'6' if _parse_ip(address).version == 6 else ''}"
    return {name: value for name, value in found.items() if name not in environment}


def network_line_rate() -> float | None:
    """Return the rate, in bytes a second each way, of the fastest line over which NCCL can reach other nodes:
    InfiniBand if there is any, else the interface in NCCL_SOCKET_IFNAME. None if the rate is unknown, as on many
    virtual machines."""
    rates = [
        _read_leading_number(path, " ") * _GIGABIT
        for path in _INFINIBAND.glob("*/ports/*/rate")
        if _is_port_active(path.parent)
    ]
    name = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    rates = [rate for rate in rates if rate > 0] or [_read_leading_number(_NET / name / "speed") * _MEGABIT]
    return max(rates) if max(rates) > 0 else None


def _is_port_active(port: Path) -> bool:
    return "ACTIVE" in _read_text(port / "state")


def _read_leading_number(path: Path, end: str | None = None) -> float:
    """Return the number at the beginning of a file; -1 if the file does not begin with one."""
    try:
        return float(_read_text(path).split(end)[0])
    except (ValueError, IndexError):
        return -1.0


def _read_text(path: Path) -> str:
    """Return the text of a file; "" if reading fails, as for an interface that is down or does not know its speed."""
    try:
        return path.read_text()
    except OSError:
        return ""


def local_address() -> str:
    """Return this machine's address on its route to the internet, which Ray uses by default; 127.0.0.1 if there is no
    route. Nothing is sent."""
    for family, outside in _INTERNET_HOSTS.items():
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((outside, 53))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def examine_network(address: str) -> Finding:
    """Judge whether ranks of this machine can connect at `address`. Warn if they would use the address to which the
    host's name resolves, which may be the loopback's."""
    try:
        with socket.create_server((address, 0), family=_address_family(address)) as server:
            socket.create_connection(server.getsockname()[:2], 5).close()
    except OSError as error:
        remedy = f"check that {address} is an address of this machine (ip address), and allow connections to it"
        return Finding("ports", "failure", f"{address}: {error}", remedy)
    text, reaches = _resolve_own_name()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or interface_with_address(address)
    if chosen is not None:
        return Finding("ports", "ok", f"ranks connect at {address} on {chosen}, which works; {text}")
    remedy = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME where Ray is started"
    if not reaches:
        remedy += f", or make {socket.gethostname()} resolve to an address of this machine (/etc/hosts)"
    return Finding("ports", "warning", f"no interface has {address}, so ranks use the host's name; {text}", remedy)


def _resolve_own_name() -> tuple[str, bool]:
    """Return the address to which the host's name resolves, as text, and whether other machines can reach it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return f"{name} resolves to nothing", False
    return f"{name} is {address}", not ipaddress.ip_address(address).is_loopback


def _address_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if _parse_ip(address).version == 6 else socket.AF_INET
