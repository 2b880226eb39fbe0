"""What `recipe_checks` and `objective_checks` report."""

from dataclasses import dataclass

from launcher.recipe_yaml import Path


@dataclass(frozen=True)
class Problem:
    """What is wrong at `path`, and what to do about it."""

    path: Path
    what: str
    remedy: str
