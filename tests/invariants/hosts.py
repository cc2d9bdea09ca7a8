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

from tests.invariants.launching import process_options


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


class Cluster:
    """
    A context manager for `size` hosts, `host-0` and so on, which can resolve these names. The file with the names lies
    in the directory `path`.
    """

    def __init__(self, path: Path, size: int = 2):
        self.names = path / "hosts"
        # Interface names have at most 15 characters. The kernel removes those of an earlier cluster with a delay.
        self._prefix = f"h{os.getpid()}-{next(_numbers)}-"
        self._spaces = [f"{self._prefix}host-{number}" for number in range(size)]
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, number: int, command: list[str], **environment: str) -> subprocess.Popen[str]:
        """Start a command on a host, with stdout and stderr in one text."""
        inside = ["sh", "-c", _BEGIN, "sh", f"host-{number}", str(self.names)]
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = ["ip", "netns", "exec", self._spaces[number], *spaces, *inside, *command]
        options = process_options(GLOO_SOCKET_IFNAME="eth0", LOCAL_SIZE="1", **environment)
        self._processes[number] = subprocess.Popen(words, **options)
        return self._processes[number]

    def die(self, number: int) -> None:
        """Kill all processes of a host at once."""
        process = self._processes[number]
        with suppress(psutil.NoSuchProcess):
            # The first process of a process namespace takes all others with it. `unshare` waits for its end.
            for child in psutil.Process(process.pid).children():
                child.kill()
        process.wait(timeout=60)

    def __enter__(self) -> "Cluster":
        """Make the namespaces of the hosts, and a network with a bridge between them."""
        lines = [f"{NETWORK}.{number + 1} host-{number}\n" for number in range(len(self._spaces))]
        self.names.write_text("127.0.0.1 localhost\n" + "".join(lines))
        bridge = f"{self._prefix}br"
        _ip(f"link add {bridge} type bridge")
        _ip(f"link set {bridge} up")
        for number, space in enumerate(self._spaces):
            port = f"{self._prefix}{number}"
            _ip(f"netns add {space}")
            _ip(f"link add {port} type veth peer name eth0 netns {space}")
            _ip(f"link set {port} master {bridge} up")
            _ip(f"-n {space} address add {NETWORK}.{number + 1}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")
            _ip(f"-n {space} link set lo up")
        return self

    def __exit__(self, *args):
        for number in self._processes:
            self.die(number)
        for space in self._spaces:
            _ip(f"netns delete {space}")
        _ip(f"link delete {self._prefix}br")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
