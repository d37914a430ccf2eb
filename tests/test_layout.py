"""The shape of the tree: who may import whom, how long a module may be, which names are not used, and README's map."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "app").rglob("*.py"))
MAX_LINES = 300

# A unit is a module of app/ or one of its folders; inside a folder imports are free.
MAY_IMPORT = {
    "errors": set(),
    "request": {"errors"},
    "kv": {"errors"},
    "scheduler": {"errors", "request", "kv"},
    "engine": {"errors", "request", "scheduler.plan"},
    "text": {"errors"},
    "setting_types": set(),
    "variables": {"errors", "setting_types"},
    "settings": {"errors", "setting_types", "variables"},
    "logs": {"errors", "settings"},
    "errands": {"errors", "request", "scheduler"},
    "pipeline": {"errors", "scheduler"},
    "worker": {"errors", "request", "scheduler", "errands", "pipeline"},
    "completion": {"errors", "request", "scheduler.plan", "text", "errands", "worker"},
    "service": {"errors", "request", "scheduler.snapshot", "text", "worker", "completion"},
    "metrics": {"scheduler.snapshot", "service"},
    "recordings": {"errors", "scheduler"},
    "traces": {"completion", "api.delivery"},
    "api": {
        "errors",
        "request",
        "scheduler.snapshot",
        "text.tool_calls",
        "completion",
        "service",
        "settings",
        "metrics",
    },
    "runtime": {
        "errors",
        "request",
        "kv",
        "scheduler",
        "text",
        "worker",
        "service",
        "metrics",
        "recordings",
        "traces",
        "api",
        "settings",
        "engine",
    },
    "serve": {"errors", "settings"},
    "charts": {"errors", "scheduler"},
    "screen": {"logs", "completion"},
    "local": {"logs", "api", "completion", "runtime", "screen", "settings"},
    "conversation": {"api"},
    "once": {"api", "completion", "local", "screen", "settings"},
    "repl": {"errors", "conversation", "local", "screen"},
    "commands": {
        "errors",
        "settings",
        "logs",
        "serve",
        "runtime",
        "engine",
        "scheduler",
        "charts",
        "screen",
        "local",
        "conversation",
        "once",
        "repl",
        "api",
    },
    "cli": {"errors", "setting_types", "serve", "screen", "commands"},
    "__main__": {"cli"},
    "__init__": set(),
}
# Packages from outside that belong to one place. The engine thread owns MLX, and settings own the environment.
ONLY_IN = {
    "mlx": "engine",
    "mlx_lm": "engine",
    "numpy": "engine",
    "transformers": "engine",
    "llguidance": "text",
    "granian": "serve",
    "prometheus_client": "metrics",
    "matplotlib": "charts",
    "opentelemetry": "traces",
}
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|core|common|base|managers?|helpers?|misc)($|_)", re.IGNORECASE)


def unit_of(module: str) -> str:
    """``app/kv/sizing.py`` -> ``kv``, ``app/serve.py`` -> ``serve``."""
    return Path(module).parts[1].removesuffix(".py")


def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


def imports_of(module: str) -> list[str]:
    """Every module that is imported anywhere in the file, also inside functions; ``from app import x`` is ``app.x``."""
    names = []
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            source = node.module or ""
            is_folder = (ROOT / source.replace(".", "/")).is_dir()
            names += [f"{source}.{alias.name}" for alias in node.names] if is_folder else [source]
    return names


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    unit = unit_of(module)
    for name in imports_of(module):
        top, _, inner = name.partition(".")
        if top == "app":
            allowed = inner.split(".")[0] == unit or any(
                inner == one or inner.startswith(f"{one}.") for one in MAY_IMPORT[unit]
            )
            assert allowed, f"{module} must not import {name}"
        else:
            assert ONLY_IN.get(top, unit) == unit, f"{module} must not import {name}: it belongs to app/{ONLY_IN[top]}"


@pytest.mark.parametrize("module", ["app/runtime.py", *(name for name in MODULES if unit_of(name) == "commands")])
def test_the_engine_is_imported_only_inside_functions(module: str) -> None:
    tree = tree_of(module)
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("app.engine"):
            assert node in guarded, f"line {node.lineno} imports the engine while the module is read"


@pytest.mark.parametrize("name", ["app.api.app", "app.runtime", "app.cli"])
def test_nothing_above_the_engine_pulls_mlx_in(name: str) -> None:
    program = f"import sys, {name}; print(*sorted({{'mlx', 'mlx.core', 'mlx_lm', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("module", MODULES)
def test_the_environment_is_read_in_settings_only(module: str) -> None:
    """Writing is free: a library's own variables have to be set somewhere."""
    if module != "app/settings.py":
        nodes = list(ast.walk(tree_of(module)))
        written = {
            node.value
            for node in nodes
            if (isinstance(node, ast.Attribute) and node.attr == "update")
            or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
        }
        reads = [
            node.lineno
            for node in nodes
            if isinstance(node, ast.Attribute | ast.Name)
            and ast.unparse(node) in ("os.environ", "environ", "os.getenv", "getenv")
            and node not in written
        ]
        assert not reads, f"{module} reads the environment in lines {reads}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_short_enough_to_be_read(module: str) -> None:
    assert len((ROOT / module).read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", MODULES)
def test_names_say_what_a_thing_is(module: str) -> None:
    names = list(Path(module).with_suffix("").parts)
    names += [
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not [name for name in names if FORBIDDEN_NAMES.search(name)]


@pytest.mark.parametrize("module", MODULES)
def test_no_abstract_base_classes(module: str) -> None:
    assert "abc" not in imports_of(module)


@pytest.mark.parametrize("module", [module for module in MODULES if not module.endswith("__init__.py")])
def test_every_module_says_what_it_is(module: str) -> None:
    assert ast.get_docstring(tree_of(module))


def test_readme_maps_the_tree() -> None:
    """Each file of app/ has its line and its comment in README, and README names no file that is gone."""
    block = re.search(r"```\n(app/\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    mapped, folder = {}, ""
    for line in block[1].splitlines():
        name, _, comment = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        if name.endswith("/"):
            folder = name if depth == 0 else "app/" + name
        else:
            mapped[(folder if depth == 2 else "app/") + name] = comment.strip()
    assert sorted(mapped) == [module for module in MODULES if not module.endswith("__init__.py")]
    assert [name for name, comment in mapped.items() if not comment] == []
