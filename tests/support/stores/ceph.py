"""One node of Ceph with its S3 gateway, from Debian's packages: a production S3 server for tests.

A monitor, one storage daemon that keeps everything in memory, and the gateway, all on free ports of this
host. The processes of a test run share one server: it takes a quarter of a minute to start.
"""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.stores.s3 import S3Server
from tests.support.stores.shared import answers, free_port, shared, stop, wait

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
def shared_server(folder: Path) -> Iterator[S3Server]:
    """The server of all processes that share `folder`, ready for requests."""
    with shared(folder, "ceph", _start) as server:
        yield S3Server(**server)


def _start(folder: Path) -> tuple[dict[str, str], list[int]]:
    """Start the server; return its fields and the processes of its daemons, in the order in which to end them."""
    for name in ("mon", "osd", "run", "log"):
        (folder / name).mkdir()
    port = free_port()
    config = folder / "ceph.conf"
    config.write_text(_CONFIG.format(fsid=uuid.uuid4(), folder=folder, port=port, mon_port=free_port()))
    daemons = list[int]()
    try:
        node = _Node(folder, config, daemons)
        node.start_monitor()
        node.start_storage()
        node.start_gateway(port)
        server = S3Server(f"http://127.0.0.1:{port}", "maskaccess", "masksecret")
        node.run(
            "radosgw-admin", "user", "create", "--uid=mask", "--display-name=mask",
            f"--access-key={server.access_key}", f"--secret={server.secret_key}",
        )  # fmt: skip
    except BaseException:
        stop(daemons)
        raise
    return vars(server), daemons


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
        self.run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
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

    def start_gateway(self, port: int) -> None:
        gateway = self.start("radosgw", "-n", "client.rgw")
        wait(lambda: answers(port), gateway, "the S3 gateway", seconds=90)
