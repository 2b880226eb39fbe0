"""One node of Ceph with its S3 gateway, from Debian's packages: a production S3 server for tests.

A monitor, one storage daemon that keeps everything in memory, and the gateway, all on free ports of this
host. The processes of a test run share one server: it takes a quarter of a minute to start.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_service.processes import locked
from tests.support.stores.s3 import S3Server

PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"
_PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "ceph-authtool", "monmaptool")
_CONFIG = """
[global]
fsid = {fsid}
mon host = 127.0.0.1:{mon_port}
mon initial members = a
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
log file = {folder}/log/$name.log
keyring = {folder}/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
mon allow pool size one = true
mon max pg per osd = 2000
mon warn on pool no redundancy = false
mon data avail crit = 1
auth allow insecure global id reclaim = false
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 4294967296
mon data = {folder}/mon
osd data = {folder}/osd
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
"""


def why_not() -> str | None:
    """Why Ceph cannot run here, or None if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install --no-install-recommends {PACKAGES})"
    return None if os.geteuid() == 0 else "Ceph's daemons need root"


@contextmanager
def shared(folder: Path) -> Iterator[S3Server]:
    """The server of all processes that share `folder`, ready for requests. Who comes first starts it, who leaves last
    stops it."""
    said = folder / "ceph.json"
    with (folder / "ceph.users").open("a") as users:
        with locked(folder / "ceph.lock"):
            if not said.exists():
                place = tempfile.mkdtemp(prefix="ceph-")  # its sockets' paths must be short
                server, daemons = _start(Path(place))
                said.write_text(json.dumps([place, vars(server), daemons]))
            fcntl.flock(users, fcntl.LOCK_SH)
        place, server, daemons = json.loads(said.read_text())
        try:
            yield S3Server(**server)
        finally:
            with locked(folder / "ceph.lock"):
                fcntl.flock(users, fcntl.LOCK_UN)
                with suppress(BlockingIOError):
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another one still uses it
                    _stop(daemons)
                    said.unlink()
                    shutil.rmtree(place)


def _start(folder: Path) -> tuple[S3Server, list[int]]:
    """Start the server; return it and the processes of its daemons, in the order in which to end them."""
    for name in ("mon", "osd", "run", "log"):
        (folder / name).mkdir()
    port = _free_port()
    config = folder / "ceph.conf"
    config.write_text(_CONFIG.format(fsid=uuid.uuid4(), folder=folder, port=port, mon_port=_free_port()))
    daemons = list[int]()
    try:
        node = _Node(folder, config, daemons)
        node.start_monitor()
        node.start_storage()
        node.start_gateway(f"http://127.0.0.1:{port}")
        server = S3Server(f"http://127.0.0.1:{port}", "maskaccess", "masksecret")
        node.run(
            "radosgw-admin", "user", "create", "--uid=mask", "--display-name=mask",
            f"--access-key={server.access_key}", f"--secret={server.secret_key}",
        )  # fmt: skip
    except BaseException:
        _stop(daemons)
        raise
    return server, daemons


class _Node:
    def __init__(self, folder: Path, config: Path, daemons: list[int]) -> None:
        self.folder = folder
        self.environment = {**os.environ, "CEPH_CONF": str(config)}
        self.daemons = daemons

    def run(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, capture_output=True, timeout=60)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """A daemon in the foreground, as our child."""
        with (self.folder / "log" / f"{command[0]}.out").open("wb") as log:
            process = subprocess.Popen([*command, "-f"], env=self.environment, stdout=log, stderr=log)
        self.daemons.insert(0, process.pid)
        return process

    def start_monitor(self) -> None:
        keyring, everything = f"{self.folder}/keyring", ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
        self.run(
            "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"
        )
        for name in ("client.admin", "osd.0", "client.rgw"):
            self.run("ceph-authtool", keyring, "--gen-key", "-n", name, *everything)
        config = Path(self.environment["CEPH_CONF"]).read_text()
        address = config.split("mon host = ")[1].split()[0]
        fsid = config.split("fsid = ")[1].split()[0]
        monmap = f"{self.folder}/monmap"
        self.run("monmaptool", "--create", "--fsid", fsid, "--add", "a", address, monmap)
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self.start("ceph-mon", "-i", "a", "--public-addr", address)

    def start_storage(self) -> None:
        self.run("ceph", "--connect-timeout", "30", "osd", "create")  # waits until the monitor answers
        self.run("ceph-osd", "-i", "0", "--mkfs")
        self.start("ceph-osd", "-i", "0")

    def start_gateway(self, endpoint: str) -> None:
        gateway = self.start("radosgw", "-n", "client.rgw")
        _wait(lambda: _answers(endpoint), gateway, "the S3 gateway", seconds=90)


def _stop(daemons: list[int]) -> None:
    """End the daemons, whose parent may have ended before. What they hold is in memory, so nothing is lost."""
    for process in daemons:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], what: str, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(f"{what} ended with status {process.returncode} instead of starting")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not ready after {seconds:.0f} s")
        time.sleep(0.1)


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
