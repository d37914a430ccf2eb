"""Ansible module: one generation, a folder that never changes and holds a release's link and all that configures it."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: mlxcel_generation
short_description: One release with one configuration, as an immutable folder
description:
  - Its name is a digest of the release and of every file. Equal wishes give the same folder, any change a new one.
  - A new one is checked with C(serve --check) by its own release before it gets its name.
options:
  home: {type: path, required: true, description: the folder that holds releases/ and generations/}
  release: {type: str, required: true, description: name of the release}
  group: {type: str, required: true, description: group that may read the files}
  files: {type: dict, required: true, description: name to content}
  secret: {type: list, elements: str, default: [], description: files whose content is never shown}
  executable: {type: list, elements: str, default: [], description: files that are run}
"""


def digest_of(release: str, files: dict[str, str]) -> str:
    """Twelve hex digits."""
    digest = hashlib.sha256(release.encode())
    for name, content in sorted(files.items()):
        digest.update(f"\0{name}\0{content}".encode())
    return digest.hexdigest()[:12]


def diff_of(home: Path, files: dict[str, str], secret: list[str]) -> list[dict[str, str]]:
    """Against what is current, secrets left out."""
    rows = []
    for name, content in sorted(files.items()):
        old = home / "current" / name
        before = old.read_text() if old.is_file() else ""
        if before != content:
            shown = (before, content) if name not in secret else ("", "(secret, changed)\n")
            rows.append({"before_header": name, "after_header": name, "before": shown[0], "after": shown[1]})
    return rows


def write(module: AnsibleModule, folder: Path) -> None:
    """All files and the link to the release, in a folder nobody uses yet."""
    given = module.params
    for name, content in given["files"].items():
        path = folder / name
        path.write_text(content)
        path.chmod(0o750 if name in given["executable"] else 0o640)
        shutil.chown(path, "root", given["group"])
    (folder / "release").symlink_to(f"../../releases/{given['release']}")
    folder.chmod(0o750)
    shutil.chown(folder, "root", given["group"])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "home": {"type": "path", "required": True},
            "release": {"type": "str", "required": True},
            "group": {"type": "str", "required": True},
            "files": {"type": "dict", "required": True, "no_log": False},
            "secret": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "executable": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    home = Path(given["home"])
    identity = digest_of(given["release"], given["files"])
    folder = home / "generations" / identity
    if folder.is_dir():
        module.exit_json(changed=False, id=identity)
    diff = diff_of(home, given["files"], given["secret"])
    if module.check_mode:
        module.exit_json(changed=True, id=identity, diff=diff)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A neighbour of its final place, so that links are right and the rename is atomic.
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        write(module, draft)
        command = [str(draft / "run"), str(draft / "release/bin/mlxcel"), "serve", "--check"]
        code, output, error = module.run_command(command, cwd="/")
        if code != 0:
            module.fail_json(msg=f"the settings are not accepted: {error.strip() or output.strip()}", id=identity)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    module.exit_json(changed=True, id=identity, checked=output.splitlines()[-1], diff=diff)


if __name__ == "__main__":
    main()
