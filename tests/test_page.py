"""The page's files over HTTP: open, complete, under their policy, and gone when turned off."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app.api.page import FILES, FOLDER
from tests.scripted import call, make_app

ROOT = Path(__file__).parent.parent
VENDORED = "markdown-it.min.js"
OWN = [path for path in sorted(FOLDER.iterdir()) if not path.name.startswith("markdown-it")]


def test_every_file_is_served_without_a_key_and_nothing_else_is() -> None:
    app = make_app(api_keys=("secret",))
    for path, file in FILES.items():
        response = call(app, "GET", path)
        assert (response.status_code, response.content) == (200, file.data)
        assert response.headers["content-type"] == file.kind
    assert call(app, "POST", "/").status_code == 405
    for path in (
        "/page/",
        "/page/index.html",
        "/page/none.js",
        "/page/../settings.py",
        "/slots",
        "/metrics",
        "/v1/config",
    ):
        assert call(app, "GET", path).status_code == 401
        assert call(app, "GET", path, headers={"authorization": "Bearer secret"}).status_code in (200, 404)


def test_turned_off_it_is_not_there() -> None:
    app = make_app(ui=False)
    assert {call(app, "GET", path).status_code for path in FILES} == {404}
    assert call(app, "GET", "/slots").status_code == 200


def test_the_policy_lets_nothing_in_from_elsewhere_and_nothing_inline_run() -> None:
    for path in FILES:
        headers = call(make_app(), "GET", path).headers
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules.pop("require-trusted-types-for") == "'script'"
        assert rules.pop("trusted-types") == "'none'"
        assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
        assert set(rules.values()) == {"'none'", "'self'"}
        assert headers["x-content-type-options"] == "nosniff"


def test_a_file_that_has_not_changed_is_not_sent_again() -> None:
    for path in FILES:
        tag = call(make_app(), "GET", path).headers["etag"]
        again = call(make_app(), "GET", path, headers={"if-none-match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert call(make_app(), "GET", path, headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_files_name_only_each_other_and_no_other_host(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', text) if path.suffix == ".html" else []
    named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {f"/{name}" for name in named} <= FILES.keys()
    assert set(re.findall(r"\w+://[^\s\"'/]+", text)) <= {"http://www.w3.org"}  # SVG's name, which nobody fetches
    assert not re.search(r"\son\w+=|style=|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_the_library_is_the_one_that_its_licence_names() -> None:
    told = (FOLDER / "markdown-it.LICENSE.txt").read_text()
    assert hashlib.sha256((FOLDER / VENDORED).read_bytes()).hexdigest() in told
    for part in ("markdown-it 15.0.3", "linkify-it", "mdurl", "uc.micro", "punycode.js", "entities"):
        assert part in told


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "app", source / "app", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run([*build, "-w", str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("app/page/")}
    assert packed == {f"app/page/{path.name}" for path in FOLDER.iterdir()}
