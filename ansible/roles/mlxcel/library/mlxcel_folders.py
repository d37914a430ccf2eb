"""Ansible module: the folders of a home, with their owners and modes."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: mlxcel_folders
short_description: The folders of a server's home
description:
  - Code and settings belong to root; only what the server itself writes belongs to its account.
options:
  home: {type: path, required: true, description: the home}
  account: {type: str, required: true, description: account and group of the server}
"""

# Name, whether the account owns it, mode.
FOLDERS = (
    ("", False, 0o755),
    ("releases", False, 0o755),
    ("generations", False, 0o750),
    ("models", False, 0o750),
    ("run", True, 0o750),
    ("log", True, 0o750),
    ("cache", True, 0o750),
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={"home": {"type": "path", "required": True}, "account": {"type": "str", "required": True}},
        supports_check_mode=True,
    )
    try:
        uid, gid = pwd.getpwnam(module.params["account"]).pw_uid, grp.getgrnam(module.params["account"]).gr_gid
    except KeyError:
        if module.check_mode:  # it would have been made by now
            module.exit_json(changed=True)
        raise
    changed = []
    for name, is_its_own, mode in FOLDERS:
        folder = Path(module.params["home"]) / name
        wanted = (uid if is_its_own else 0, gid, mode)
        if folder.is_dir():
            stat = folder.stat()
            if (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777) == wanted:
                continue
        changed.append(str(folder))
        if not module.check_mode:
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, *wanted[:2])
            folder.chmod(mode)
    module.exit_json(changed=bool(changed), folders=changed)


if __name__ == "__main__":
    main()
