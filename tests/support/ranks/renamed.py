"""DeepSpeed with other private names than those that we use. For `run_ranks`."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import deepspeed
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero import stage3

from encoder_core.errors import LibraryChanged
from encoder_core.train import deepspeed_internals as internals
from encoder_core.train.rehearsal import verify_gradient_sums
from encoder_core.train.settings import EngineConfig

DIVISOR = "_gradient_averaging_world_size"
Case = tuple[int, str, str, str]
"""Stage, precision, whose name it is, and the name."""


SETTINGS = ((0, "fp32"), *((stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")))


def cases(rank: int, world: int) -> list[Case]:
    """Every name that is looked up, at every stage and precision that uses it. `other`: names of what an engine and its
    optimizer hold."""
    resolve, found = internals.resolve, dict[Case, None]()
    for stage, precision in SETTINGS:

        def noted(owner: Any, name: str, setting: tuple[int, str] = (stage, precision)) -> Any:
            kind = "engine" if isinstance(owner, deepspeed.DeepSpeedEngine) else "other"
            found[*setting, "optimizer" if isinstance(owner, ZeROOptimizer) else kind, name] = None
            return resolve(owner, name)

        with patch.object(internals, "resolve", noted), patch("encoder_core.train.engine.resolve", noted):
            _outcome(stage, precision)
    return list(found)


class _Renamed:
    """Another object that answers to all names but one."""

    def __init__(self, real: Any, name: str) -> None:
        self.__dict__.update(_real=real, _name=name)

    def __getattr__(self, name: str) -> Any:
        if name == self.__dict__["_name"]:
            raise AttributeError(name)
        return getattr(self.__dict__["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_real"], name, value)

    def __call__(self, *inputs: Any) -> Any:
        return self.__dict__["_real"](*inputs)


@contextmanager
def without(owner: str, name: str) -> Iterator[None]:
    """Engines that are made here lack the name, once DeepSpeed has built them."""
    initialize = deepspeed.initialize

    def renamed(**given: Any) -> tuple[Any, ...]:
        engine, *rest = initialize(**given)
        if owner == "engine":
            engine = _Renamed(engine, name)
        elif owner == "optimizer":
            engine.optimizer = _Renamed(engine.optimizer, name)
        return engine, *rest

    with patch.object(deepspeed, "initialize", renamed):
        yield


def each(rank: int, world: int, given: list[Case]) -> list[str]:
    """What each case comes to: the error's text, or the norm's relative error."""
    found = []
    for stage, precision, owner, name in given:
        with without(owner, name):
            found.append(_outcome(stage, precision))
    return found


def _outcome(stage: int, precision: str) -> str:
    try:
        return f"{verify_gradient_sums(EngineConfig(stage, precision, None)):.0e}"  # type: ignore[arg-type]
    except LibraryChanged as error:
        return error.problem


def upstream(rank: int, world: int, old_stays: bool, precisions: list[str]) -> list[str]:
    """A release of DeepSpeed whose stage 3 takes its divisor elsewhere; the old method is gone, or left behind."""
    source = inspect.getsource(stage3)
    changed = source.replace(DIVISOR, "_divisor_of_the_mean")
    assert changed.count("_divisor_of_the_mean") == 3
    exec(compile(changed, stage3.__file__, "exec"), stage3.__dict__)
    if old_stays:
        setattr(stage3.DeepSpeedZeroOptimizer_Stage3, DIVISOR, lambda self, params, world: world)
    return [_outcome(3, precision) for precision in precisions]


def idle(rank: int, world: int, given: list[tuple[int, str, str]]) -> list[str]:
    """Names that stay, of methods that DeepSpeed has no more use for: what replaces them is never called."""
    replace, found = internals.replace_method, []

    for stage, precision, name in given:

        def deaf(owner: Any, replaced: str, by: Any, name: str = name) -> Any:
            return getattr(owner, replaced) if replaced == name else replace(owner, replaced, by)

        with (
            patch.object(internals, "replace_method", deaf),
            patch("encoder_core.train.overlap.replace_method", deaf),
        ):
            found.append(_outcome(stage, precision))
    return found
