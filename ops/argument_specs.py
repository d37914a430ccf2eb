"""Writes the Ansible role's argument_specs out of the settings: ``python -m ops.argument_specs``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BeforeValidator

from app.setting_types import WORD
from app.settings import Settings, is_secret, variable

ROLE = Path(__file__).parent.parent / "ansible/roles/mlxcel"
HEAD = "---\n# Written by `make docs` from app/settings.py and fleet_options.yml; a test keeps it equal to them.\n"
TYPES = {bool: "bool", int: "int", float: "float", tuple: "list"}


class IndentedDumper(yaml.SafeDumper):
    """Writes list items deeper than their key, as Ansible's linter wants them."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def parts_of(annotation: Any) -> list[Any]:
    """A type and everything nested in it."""
    return [annotation, *(part for inner in get_args(annotation) for part in parts_of(inner))]


def option_of(name: str) -> dict[str, Any]:
    """The Ansible option of one setting. What has a text form of its own (64M, auto) is text."""
    field = Settings.model_fields[name]
    parts = parts_of(field.annotation)
    has_text_form = any(isinstance(part, BeforeValidator) and part is not WORD for part in [*parts, *field.metadata])
    words = next((list(get_args(part)) for part in parts if get_origin(part) is Literal), None)
    kind = next((TYPES[part] for part in (get_origin(part) or part for part in parts) if part in TYPES), "str")
    option: dict[str, Any] = {"type": "str" if words or (has_text_form and kind != "list") else kind}
    if option["type"] == "list":
        option["elements"] = "str"
    if words and kind == "str":
        option["choices"] = words
    if is_secret(name):
        option["no_log"] = True
    return option | {"description": f"{variable(name)}: {field.description}"}


def render_specs() -> str:
    """The text of meta/argument_specs.yml."""
    own = yaml.safe_load((ROLE / "meta/fleet_options.yml").read_text())
    settings = {variable(name).lower(): option_of(name) for name in Settings.model_fields}
    main = {
        "short_description": "One server of the fleet, brought to a release and settings, verified or restored",
        "options": own | settings,
    }
    return HEAD + yaml.dump({"argument_specs": {"main": main}}, Dumper=IndentedDumper, sort_keys=False, width=120)


if __name__ == "__main__":
    sys.stdout.write(render_specs())
