"""A stand-in for macOS's launchd and launchctl where there is no Mac: ``launchd.py daemon`` and ``launchd.py ctl``.

It does what the project relies on, in the way macOS is known to do it: ``bootout`` returns before the process has
ended, a label that is still loaded cannot be bootstrapped, and a job file that anybody else may write is refused.
"""

from __future__ import annotations

import grp
import json
import os
import plistlib
import pwd
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SOCKET = "/run/launchd.sock"
DEFAULT_EXIT_S = 5
DEFAULT_THROTTLE_S = 10
SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
# Return codes of launchctl.
NO_PROCESS, IO_ERROR, BUSY, NOT_FOUND, DISABLED, BAD_OWNERSHIP = 3, 5, 37, 113, 119, 122
KEYS: dict[str, type | tuple[type, ...]] = {
    "Label": str,
    "ProgramArguments": list,
    "UserName": str,
    "GroupName": str,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "RunAtLoad": bool,
    "KeepAlive": (bool, dict),
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
PROCESS_TYPES = ("Background", "Standard", "Adaptive", "Interactive")


class Refusal(Exception):
    """What launchctl says on stderr, and its return code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def read_job(path: Path) -> dict[str, Any]:
    """A job file that launchd would take. Raises Refusal."""
    try:
        stat = path.stat()
        job: dict[str, Any] = plistlib.loads(path.read_bytes())
    except (OSError, plistlib.InvalidFileException, ValueError) as error:
        raise Refusal(IO_ERROR, f"Bootstrap failed: 5: Input/output error ({error})") from None
    if stat.st_uid != 0 or stat.st_mode & 0o022:
        raise Refusal(BAD_OWNERSHIP, "Path had bad ownership/permissions")
    for key, value in job.items():
        if key not in KEYS or not isinstance(value, KEYS[key]):
            raise Refusal(IO_ERROR, f"Bootstrap failed: 5: Input/output error ({key} is unknown or of a wrong type)")
    if job.get("ProcessType", "Standard") not in PROCESS_TYPES:
        raise Refusal(IO_ERROR, "Bootstrap failed: 5: Input/output error (ProcessType)")
    return job


class Job:
    """One loaded job: a thread starts its process, and starts it again as KeepAlive has it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.process: subprocess.Popen[bytes] | None = None
        self.last_exit: int | None = None
        self.runs = 0
        self.removed = False
        self.gone = threading.Event()
        self.wake = threading.Event()
        if job.get("RunAtLoad") or job.get("KeepAlive") is True:
            self.wake.set()
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        throttle_s = self.job.get("ThrottleInterval", DEFAULT_THROTTLE_S)
        while not self.removed:
            self.wake.wait()
            self.wake.clear()
            if self.removed:
                break
            began_s = time.monotonic()
            self.runs += 1
            self.process = self._start()
            self.last_exit = self.process.wait()
            self.process = None
            if self.removed or not self._comes_back():
                continue
            while not self.removed and not self.wake.is_set() and time.monotonic() < began_s + throttle_s:
                time.sleep(0.05)
            self.wake.set()
        self.gone.set()

    def _comes_back(self) -> bool:
        keep = self.job.get("KeepAlive", False)
        if isinstance(keep, bool):
            return keep
        return bool(keep.get("SuccessfulExit")) == (self.last_exit == 0) if "SuccessfulExit" in keep else False

    def _start(self) -> subprocess.Popen[bytes]:
        job = self.job
        soft = job.get("SoftResourceLimits", {}).get("NumberOfFiles", 256)
        hard = job.get("HardResourceLimits", {}).get("NumberOfFiles", soft)
        account = pwd.getpwnam(job.get("UserName", "root"))
        group = grp.getgrnam(job["GroupName"]).gr_gid if "GroupName" in job else account.pw_gid

        def become() -> None:
            """Limits first: an ordinary account could not raise them."""
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            except (ValueError, OSError):  # a container may not let even root do it
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, limit), limit))
            os.setgroups([])
            os.setgid(group)
            os.setuid(account.pw_uid)

        with (
            open(job.get("StandardOutPath", os.devnull), "ab") as output,
            open(job.get("StandardErrorPath", os.devnull), "ab") as errors,
        ):
            return subprocess.Popen(
                job["ProgramArguments"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=job.get("WorkingDirectory", "/"),
                env={"PATH": SYSTEM_PATH} | job.get("EnvironmentVariables", {}),
                umask=job.get("Umask", 0o022),
                start_new_session=True,
                preexec_fn=become,
            )

    def send(self, number: int) -> None:
        if self.process is None:
            raise Refusal(NO_PROCESS, "Could not send signal: 3: No such process")
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after ExitTimeOut; returns at once."""
        process, patience_s = self.process, self.job.get("ExitTimeOut", DEFAULT_EXIT_S)

        def end() -> None:
            if process is None:
                return
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()

        threading.Thread(target=end, daemon=True).start()

    def remove(self) -> None:
        self.removed = True
        self.stop()
        self.wake.set()


class Launchd:
    """All jobs of the system domain."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.disabled: set[str] = set()

    def answer(self, verb: str, *arguments: str) -> str:
        """What one launchctl command prints. Raises Refusal."""
        commands = {
            "bootstrap": self.bootstrap,
            "bootout": self.bootout,
            "kickstart": self.kickstart,
            "kill": self.kill,
            "print": self.show,
            "list": self.list,
            "enable": lambda target: self.disabled.discard(label_of(target)),
            "disable": lambda target: self.disabled.add(label_of(target)),
        }
        if verb not in commands:
            raise Refusal(64, f"Unrecognized subcommand: {verb}")
        return commands[verb](*arguments) or ""

    def find(self, target: str) -> Job:
        job = self.jobs.get(label_of(target))
        if job is None:
            raise Refusal(NOT_FOUND, f'Could not find service "{label_of(target)}" in domain for system')
        return job

    def bootstrap(self, domain: str, path: str) -> None:
        if domain != "system":
            raise Refusal(64, "only the system domain is played here")
        job = read_job(Path(path))
        if job["Label"] in self.disabled:
            raise Refusal(DISABLED, "Bootstrap failed: 119: Service is disabled")
        if job["Label"] in self.jobs:
            raise Refusal(IO_ERROR, "Bootstrap failed: 5: Input/output error")
        self.jobs[job["Label"]] = Job(job)

    def bootout(self, target: str) -> None:
        if label_of(target) not in self.jobs:
            raise Refusal(NO_PROCESS, "Boot-out failed: 3: No such process")
        job = self.jobs[label_of(target)]
        job.remove()

        def forget() -> None:
            job.gone.wait()
            self.jobs.pop(label_of(target), None)

        threading.Thread(target=forget, daemon=True).start()

    def kickstart(self, *arguments: str) -> None:
        job = self.find(arguments[-1])
        if "-k" in arguments:
            job.stop()
        job.wake.set()

    def kill(self, number: str, target: str) -> None:
        self.find(target).send(
            int(number) if number.isdecimal() else signal.Signals[f"SIG{number.removeprefix('SIG')}"]
        )

    def show(self, target: str) -> str:
        job = self.find(target)
        lines = [f"{target} = {{", f"\tstate = {'running' if job.process else 'not running'}", f"\truns = {job.runs}"]
        if job.process:
            lines.append(f"\tpid = {job.process.pid}")
        lines.append(f"\tlast exit code = {'(never exited)' if job.last_exit is None else job.last_exit}")
        return "\n".join([*lines, "}"]) + "\n"

    def list(self) -> str:
        rows = [
            (job.process.pid if job.process else "-", job.last_exit or 0, label) for label, job in self.jobs.items()
        ]
        return "PID\tStatus\tLabel\n" + "".join("\t".join(map(str, row)) + "\n" for row in rows)


def label_of(target: str) -> str:
    """``system/LABEL`` -> ``LABEL``; a job file's path -> its label."""
    return (
        target.removeprefix("system/")
        if not target.startswith("/")
        else plistlib.loads(Path(target).read_bytes())["Label"]
    )


def daemon() -> None:
    launchd = Launchd()
    Path(SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                try:
                    reply = {"code": 0, "out": launchd.answer(*json.loads(stream.readline())), "err": ""}
                except Refusal as refusal:
                    reply = {"code": refusal.code, "out": "", "err": f"{refusal}\n"}
                except (TypeError, ValueError, KeyError) as error:
                    reply = {"code": 64, "out": "", "err": f"usage: {error!r}\n"}
                stream.write(json.dumps(reply))


def control(arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(SOCKET)
        with connection.makefile("rw") as stream:
            stream.write(json.dumps(arguments) + "\n")
            stream.flush()
            connection.shutdown(socket.SHUT_WR)
            reply = json.loads(stream.read())
    sys.stdout.write(reply["out"])
    sys.stderr.write(reply["err"])
    return int(reply["code"])


if __name__ == "__main__":
    if sys.argv[1] == "daemon":
        daemon()
    sys.exit(control(sys.argv[2:]))
