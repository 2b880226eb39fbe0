"""Fills the templates of infra/. A value enters a template through a filter that quotes it, or is a number."""

import json
import shlex
import sysconfig
from importlib import metadata
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_CHECKOUT = Path(__file__).parents[2]


def folder() -> Path:
    """infra/ of a checkout, or where an installed wheel's templates are, which its own record knows."""
    if (_CHECKOUT / "pyproject.toml").is_file():
        return _CHECKOUT / "infra"
    for file in metadata.files("maskfleet") or ():
        if file.match("share/maskfleet/infra/ray_node.sh"):
            return Path(str(file.locate())).resolve().parent
    return Path(sysconfig.get_path("data")) / "share" / "maskfleet" / "infra"


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
