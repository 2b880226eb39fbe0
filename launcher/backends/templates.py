"""Fills the templates of infra/. A value enters a template through a filter that quotes it, or is a number."""

import json
import shlex
import sysconfig
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_CHECKOUT = Path(__file__).parents[2] / "infra"


def folder() -> Path:
    """infra/ of a checkout, or where an installed wheel puts its templates."""
    installed = Path(sysconfig.get_path("data")) / "share" / "maskfleet" / "infra"
    return _CHECKOUT if _CHECKOUT.is_dir() else installed


def render(name: str, **values: object) -> str:
    """The template infra/`name`. Filters: `shell` quotes a word for a shell, `yaml` any value for YAML, `pod` too for
    the value of a pod's variable (where `$(X)` would be replaced), `mib` turns bytes into whole MiB."""
    environment = Environment(
        loader=FileSystemLoader(folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "shell": shlex.quote,
        "yaml": json.dumps,
        "pod": lambda text: json.dumps(text.replace("$(", "$$(")),
        "mib": lambda size: size >> 20,
    }
    return environment.get_template(name).render(**values)
