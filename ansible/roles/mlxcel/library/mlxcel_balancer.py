"""Ansible module: take a server out of HAProxy until nobody is served by it, or put it back in."""

from __future__ import annotations

import csv
import io
import socket
import time

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: mlxcel_balancer
short_description: State of one server in HAProxy, by its runtime socket
description:
  - C(drain) sends no new request to the server and waits, for a bounded time, until no session is left on it.
  - C(ready) lets it serve again. A server that HAProxy does not know is an error; a balancer that is not there is not.
options:
  socket: {type: path, required: true, description: the runtime socket}
  backend: {type: str, required: true, description: name of the backend}
  server: {type: str, required: true, description: name of the server in it}
  state: {type: str, required: true, choices: [drain, ready], description: what it is brought to}
  timeout: {type: float, default: 300, description: seconds to wait for sessions to end}
"""


def talk(path: str, command: str) -> str:
    """The answer to one command. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(command.encode() + b"\n")
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces).decode()


def row_of(path: str, backend: str, server: str) -> dict[str, str] | None:
    """The server's line in HAProxy's statistics."""
    rows = csv.DictReader(io.StringIO(talk(path, "show stat").lstrip("# ")))
    return next((row for row in rows if (row["pxname"], row["svname"]) == (backend, server)), None)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "socket": {"type": "path", "required": True},
            "backend": {"type": "str", "required": True},
            "server": {"type": "str", "required": True},
            "state": {"type": "str", "required": True, "choices": ["drain", "ready"]},
            "timeout": {"type": "float", "default": 300},
        },
        supports_check_mode=True,
    )
    path, backend, server, state, timeout_s = (
        module.params[name] for name in ("socket", "backend", "server", "state", "timeout")
    )
    try:
        row = row_of(path, backend, server)
    except OSError as error:
        # Without a balancer there is nothing to take the server out of, and a dead one sends nobody.
        module.exit_json(changed=False, sessions=0, msg=f"no HAProxy at {path}: {error.strerror}")
    if row is None:
        module.fail_json(msg=f"HAProxy has no server {backend}/{server}: name it as the inventory does")
    is_drained = row["status"].startswith("DRAIN")
    changed = is_drained != (state == "drain")
    if changed and not module.check_mode:
        told = talk(path, f"set server {backend}/{server} state {state}").strip()
        if told:
            module.fail_json(msg=f"HAProxy: {told}")
    deadline = time.monotonic() + timeout_s
    sessions = int(row["scur"] or 0)
    while state == "drain" and not module.check_mode and sessions and time.monotonic() < deadline:
        time.sleep(0.2)
        row = row_of(path, backend, server)
        sessions = int(row["scur"] or 0) if row else 0
    module.exit_json(changed=changed, sessions=sessions, status=row["status"] if row else "")


if __name__ == "__main__":
    main()
