"""Hosts of our own on one machine: each has its network, processes and files, an sshd, and a stand-in for launchd.

A host's files are this machine's, seen through an overlay: what is written on the host lies in memory and is gone at
the end. Needs root on Linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NETWORK = f"198.18.{os.getpid() % 250}"  # of the range that is set apart for tests of networks
# What must be there and readable for every account of a host, beside the folder that the hosts are made in: the project
# and the Python that runs the tests.
SHOWN = sorted({str(ROOT), sys.prefix, sys.base_prefix})
TOOLS = ("ip", "unshare", "sshd", "ssh", "ssh-keygen", "chroot", "mount")

SSHD = """Port 22
HostKey /etc/ssh/fleet_host_key
PermitRootLogin prohibit-password
AuthorizedKeysFile /etc/ssh/fleet_authorized_keys
StrictModes no
UsePAM no
PrintMotd no
MaxStartups 100
PidFile none
Subsystem sftp internal-sftp
SetEnv PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
"""
# What a Mac says of itself. `sysctl` remembers what it is told; everything else of it is this machine's own.
MAC = {
    "usr/local/bin/launchctl": 'exec {python} {root}/tests/fleet/launchd.py ctl "$@"',
    "usr/local/bin/sw_vers": "echo 15.5",
    "usr/local/bin/pmset": "printf 'AC Power:\\n sleep                0\\n autorestart          1\\n'",
    "usr/local/bin/fdesetup": "echo 'FileVault is Off.'",
    "usr/local/bin/sysctl": """
case "$*" in
"-n machdep.cpu.brand_string") echo "Apple M4 Max" ;;
"-n hw.memsize") echo 68719476736 ;;
"-n iogpu.wired_limit_mb") cat /run/wired_limit 2>/dev/null || echo 0 ;;
iogpu.wired_limit_mb=*) echo "${{1#*=}}" > /run/wired_limit ;;
*) exit 1 ;;
esac""",
}
# Whether this machine lets root do what a host is made of; it leaves nothing.
PROBE = """
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
ip link add bridge0 type bridge
ip link add one type veth peer name other
"""
BOOT = """
set -eu
mount --make-rprivate /
mount -t overlay overlay -o lowerdir=/,upperdir={upper},workdir={work} {root}
for folder in {shown}; do
    [ -e {root}$folder/. ] || mkdir -p {root}$folder
    [ -n "$(ls -A {root}$folder)" ] || mount --bind -o ro $folder {root}$folder
done
for folder in {walked}; do
    chmod o+x {root}$folder
done
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mount -t tmpfs tmpfs {root}/run
mkdir -p {root}/run/sshd
hostname {name}
{last}
"""
SSHD_ALONE = "exec chroot {root} /usr/sbin/sshd -D -e -f /etc/ssh/fleet_sshd"
# sshd in the first place, and the stand-in for launchd beside it.
MAC_BOOT = """exec chroot {root} /bin/sh -c '
{python} {project}/tests/fleet/launchd.py daemon &
exec /usr/sbin/sshd -D -e -f /etc/ssh/fleet_sshd
'"""
# A real systemd with no service of this machine but journal and sshd.
SYSTEMD_BOOT = """mount -t sysfs sysfs {root}/sys
mount -t cgroup2 cgroup2 {root}/sys/fs/cgroup
rm -rf {root}/etc/systemd/system/*.wants {root}/usr/lib/systemd/system/sysinit.target.wants
rm -rf {root}/usr/lib/systemd/system/multi-user.target.wants {root}/usr/lib/systemd/system/timers.target.wants
mkdir -p {root}/etc/systemd/system/multi-user.target.wants
ln -s ../fleet-sshd.service {root}/etc/systemd/system/multi-user.target.wants/fleet-sshd.service
export container=lxc
exec chroot {root} /lib/systemd/systemd --system --unit=multi-user.target --log-target=console
"""
SSHD_UNIT = """[Service]
RuntimeDirectory=sshd
ExecStart=/usr/sbin/sshd -D -e -f /etc/ssh/fleet_sshd
"""
BOOTS = {"mac": MAC_BOOT, "linux": SYSTEMD_BOOT}


@dataclass(frozen=True)
class Host:
    """A host under test. ``upper`` has every file that was written on it."""

    name: str
    address: str
    upper: Path
    key: Path

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    def run(self, command: str, check: bool = True) -> str:
        """What a command prints on the host, by ssh."""
        done = subprocess.run(
            ["ssh", *ssh_options(self.key), f"root@{self.address}", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout


def missing() -> str | None:
    """Why hosts cannot be made here; None: they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "test hosts need root on Linux"
    search = os.environ["PATH"] + ":/usr/sbin:/sbin"
    if absent := [tool for tool in TOOLS if shutil.which(tool, path=search) is None]:
        return f"test hosts need {', '.join(absent)}"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-ec", PROBE], capture_output=True, text=True
    )
    return None if probe.returncode == 0 else f"test hosts need namespaces: {probe.stderr.strip()}"


def ssh_options(key: Path) -> list[str]:
    quiet = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "BatchMode=yes")
    return ["-i", str(key), "-F", "none", *(word for option in quiet for word in ("-o", option))]


def _sh(*words: str) -> None:
    subprocess.run(
        words, check=True, capture_output=True, env=os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    )


@contextmanager
def hosts(folder: Path, names: list[str]) -> Iterator[list[Host]]:
    """Hosts that accept ssh as root with one key, on a bridge with this machine, and nothing else in reach.

    A name says what a host is: ``mac-`` with the stand-in for launchd, ``linux-`` with systemd, others with sshd alone.
    """
    token = f"{os.getpid() % 100000}"
    bridge = f"mxb{token}"
    key = folder / "key"
    _sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    with ExitStack() as stack:
        _sh("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_sh, "ip", "link", "del", bridge)
        _sh("ip", "address", "add", f"{NETWORK}.1/24", "dev", bridge)
        _sh("ip", "link", "set", bridge, "up")
        made = []
        for number, name in enumerate(names):
            host = Host(name, f"{NETWORK}.{number + 10}", folder / name / "upper", key)
            made.append(stack.enter_context(_host(folder, bridge, f"mx{token}-{number}", host)))
        for host in made:
            _wait_for_ssh(host)
        yield made


@contextmanager
def _host(folder: Path, bridge: str, namespace: str, host: Host) -> Iterator[Host]:
    home = folder / host.name
    home.mkdir()
    with ExitStack() as stack:
        _sh("mount", "-t", "tmpfs", "tmpfs", str(home))
        stack.callback(_sh, "umount", "--lazy", str(home))
        for name in ("upper", "work", "root"):
            (home / name).mkdir()
        _furnish(host)
        _sh("ip", "netns", "add", namespace)
        stack.callback(_sh, "ip", "netns", "del", namespace)
        _sh("ip", "link", "add", f"{namespace}v", "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _sh("ip", "link", "set", f"{namespace}v", "master", bridge, "up")
        for words in (f"address add {host.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _sh("ip", "-n", namespace, *words.split())
        shown = [*SHOWN, str(folder)]
        script = BOOT.format(
            upper=home / "upper",
            work=home / "work",
            root=home / "root",
            name=host.name,
            shown=" ".join(shown),
            walked=" ".join(sorted({str(parent) for path in shown for parent in Path(path).parents} - {"/"})),
            last=BOOTS.get(host.kind, SSHD_ALONE).format(root=home / "root", python=sys.executable, project=ROOT),
        )
        with (folder / f"{host.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", namespace),
                    *("unshare", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child=SIGKILL"),
                    *("/bin/sh", "-c", script),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
            )
        try:
            yield host
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _furnish(host: Host) -> None:
    """What a host has that this machine has not, written into its upper layer before it boots."""
    ssh = host.upper / "etc/ssh"
    ssh.mkdir(parents=True)
    _sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "fleet_host_key"))
    (ssh / "fleet_sshd").write_text(SSHD)
    (ssh / "fleet_authorized_keys").write_text(host.key.with_suffix(".pub").read_text())
    (host.upper / "etc/hostname").write_text(host.name + "\n")
    (host.upper / "etc/hosts").write_text(f"127.0.0.1 localhost {host.name}\n")
    # sshd without PAM lets nobody into an account that is locked.
    lines = Path("/etc/shadow").read_text().splitlines()
    shadow = host.upper / "etc/shadow"
    shadow.write_text(
        "".join(f"root:*:{line.split(':', 2)[2]}\n" if line.startswith("root:") else line + "\n" for line in lines)
    )
    shadow.chmod(0o600)
    (host.upper / "tmp").mkdir()
    (host.upper / "tmp").chmod(0o1777)
    (host.upper / "etc/systemd/system").mkdir(parents=True)
    (host.upper / "etc/systemd/system/fleet-sshd.service").write_text(SSHD_UNIT)
    if host.kind != "mac":
        return
    (host.upper / "Library/LaunchDaemons").mkdir(parents=True)
    for name, body in MAC.items():
        path = host.upper / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + body.format(python=sys.executable, root=ROOT) + "\n")
        path.chmod(0o755)


def _wait_for_ssh(host: Host) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host.address, 22), timeout=1) as probe:
            if probe.recv(4) == b"SSH-":
                return
        time.sleep(0.05)
    raise AssertionError(f"no sshd on {host.name}:\n" + (host.upper.parent.parent / f"{host.name}.log").read_text())
