"""
Hosts on one machine: each has its own network, host name, processes and shared memory (Linux namespaces).

All hosts reach each other through a bridge, and share the file system.
"""

import os
import shutil
import subprocess
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil

from tests.invariants.launching import ROOT, cpu_environment


_numbers = count()
# Several workers of pytest may have a cluster at the same time.
NETWORK = f"10.77.{os.getpid() % 256}"
_TOOLS = ("ip", "unshare", "mount")
# Begin a host: $1 is its name, $2 the file of names.
_BEGIN = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm
shift 2
exec "$@"
"""


def why_impossible() -> str | None:
    """Return why this machine cannot make hosts, or `None` if it can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)}: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    trial = f"hp-trial-{os.getpid()}"
    words = (
        ["ip", "netns", "add", trial],
        ["ip", "netns", "exec", trial, "unshare", "--mount", "--pid", "--fork", "true"],
    )
    results = [subprocess.run(command, capture_output=True, text=True) for command in words]
    subprocess.run(["ip", "netns", "delete", trial], capture_output=True)
    errors = [result.stderr.strip() for result in results if result.returncode]
    return f"namespaces cannot be made: {errors[0]}" if errors else None


class Host:
    """A host of a [`Cluster`]. Every host can resolve its `name`."""

    def __init__(self, cluster: "Cluster", number: int):
        self.cluster, self.name, self.number = cluster, f"host-{number}", number
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        """Start a command on this host, with stdout and stderr in one text."""
        inside = ["sh", "-c", _BEGIN, "sh", self.name, str(self.cluster.names)]
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = ["ip", "netns", "exec", self.cluster.prefix + self.name, *spaces, *inside, *command]
        env = cpu_environment(GLOO_SOCKET_IFNAME="eth0", LOCAL_SIZE="1", **environment)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._processes.append(subprocess.Popen(words, cwd=ROOT, env=env, **streams))
        return self._processes[-1]

    def die(self) -> None:
        """Kill all processes of this host at once."""
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                # The first process of a process namespace takes all others with it. `unshare` waits for its end.
                for child in psutil.Process(process.pid).children():
                    child.kill()
            process.wait(timeout=60)


class Cluster:
    """A context manager for `size` hosts. The file with their names lies in the directory `path`."""

    def __init__(self, path: Path, size: int = 2):
        self.names = path / "hosts"
        # Interface names have at most 15 characters. The kernel removes those of an earlier cluster with a delay.
        self.prefix = f"h{os.getpid()}-{next(_numbers)}-"
        self._bridge = f"{self.prefix}br"
        self.hosts = [Host(self, number) for number in range(size)]

    def __enter__(self) -> "Cluster":
        try:
            self._connect()
        except subprocess.CalledProcessError:
            self.__exit__()
            raise
        return self

    def _connect(self) -> None:
        """Make the namespaces of the hosts, and a network with a bridge between them."""
        addresses = {host.name: f"{NETWORK}.{host.number + 1}" for host in self.hosts}
        self.names.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in addresses.items()))
        _ip(f"link add {self._bridge} type bridge")
        _ip(f"link set {self._bridge} up")
        for host in self.hosts:
            space, port = self.prefix + host.name, f"{self.prefix}{host.number}"
            _ip(f"netns add {space}")
            _ip(f"link add {port} type veth peer name eth0 netns {space}")
            _ip(f"link set {port} master {self._bridge} up")
            _ip(f"-n {space} address add {addresses[host.name]}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")
            _ip(f"-n {space} link set lo up")

    def __exit__(self, *args):
        for host in self.hosts:
            host.die()
            _ip(f"netns delete {self.prefix + host.name}", check=False)
        _ip(f"link delete {self._bridge}", check=False)


def _ip(words: str, *, check: bool = True) -> None:
    subprocess.run(["ip", *words.split()], check=check)
