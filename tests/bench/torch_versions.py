"""Do a run's weights depend on the release of torch: python tests/bench/torch_versions.py PYTHON PYTHON...

Each PYTHON is that of an environment with Maskfleet's dependencies and a torch of its own. In each, the same tiny runs
train on one core: families with their objectives, optimizers and dropout, layers computed by Python, and compiled where
there is a C++ compiler. Each step's loss and gradient norm, and all weights at the end, are compared with those of the
first environment.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from program import BenchError, note, run
from torch import Tensor

ROOT = Path(__file__).parents[2]
RECIPES = {
    "RoBERTa, MLM": "roberta-base",
    "BERT, MLM and NSP": "bert-base",
    "ALBERT, MLM and SOP": "albert-base",
    "ELECTRA, RTD": "electra-base",
    "DeBERTa v3, RTD": "deberta-v3-base",
    "XLNet, PLM": "xlnet-base",
    "ModernBERT, MLM": "modernbert-base",
    "BART, denoising": "bart-base",
}
MODES = {"Python": "false", "compiled": "true"}
STEPS = 20
_LARGEST_S = 1800.0  # of one environment
_VERSION = "import torch; print(torch.__version__)"


@dataclass(frozen=True)
class Compared:
    """One run in two environments, or why it is in one only.

    Attributes:
        first: number of the first step whose loss or gradient norm differs; None if none does.
        weights: largest difference of a weight at the end.
    """

    first: int | None = None
    weights: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        if self.first is None and not self.weights:
            return "equal"
        return f"from step {self.first or STEPS}, {self.weights:.0e} at the end"


def main(
    pythons: Annotated[list[Path], typer.Argument(help="Of environments; the first is compared with.")],
    family: Annotated[list[str] | None, typer.Option(help="All, unless some are named.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Python or compiled; both, unless named.")] = None,
    train: Annotated[Path | None, typer.Option(hidden=True, help="Train the runs in this folder.")] = None,
) -> None:
    """Print the table, in markdown."""
    if train is not None:
        _train(sorted(train.iterdir()))
        return
    if unknown := {*(family or ())} - RECIPES.keys() | {*(mode or ())} - MODES.keys():
        raise BenchError(f"unknown: {', '.join(unknown)}", remedy=f"choose of {[*RECIPES]} and {[*MODES]}")
    with tempfile.TemporaryDirectory() as name:
        _table(pythons, family or [*RECIPES], mode or [*MODES], Path(name))


def _table(pythons: list[Path], families: list[str], modes: list[str], folder: Path) -> None:
    corpus(folder)
    places, titles = [], []
    for number, python in enumerate(pythons):
        titles.append(_asked(python, "-c", _VERSION))
        places.append(folder / f"{number}")
        for title in families:
            for mode in modes:
                create(folder, places[-1], title, mode)
        note(f"torch {titles[-1]}: {len(families) * len(modes)} runs")
        _asked(
            python,
            str(Path(__file__)),
            str(python),
            "--train",
            str(places[-1]),
            home=folder / f"home{number}",
        )
    print(f"| run | layers |{''.join(f' torch {title} |' for title in titles)}\n|---|---|{'---|' * len(titles)}")
    for title in families:
        for mode in modes:
            name = _name(title, mode)
            cells = [compared(places[0] / name, place / name, compiled=mode == "compiled") for place in places]
            print(f"| {title} | {mode} | {' | '.join(map(str, cells))} |", flush=True)


def corpus(folder: Path) -> None:
    """Sentences of our own making, with a tokenizer that every family can use, in `folder`."""
    from data_service.ingest.build import build_corpus
    from data_service.ingest.options import BuildOptions
    from data_service.tokenizers.load import save_tokenizer
    from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
    from tests.support.data.made_up import scripts_text

    text = folder / "text.jsonl"
    lines = [scripts_text(seed, "latin", 8) for seed in range(200)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), "utf-8")
    save_tokenizer(train_tokenizer("wordpiece", lines, 600, TokenizerOptions(specials="bert")), f"{folder}/tokenizer")
    options = BuildOptions(heldout_fraction=0.1, block_tokens=1024)
    build_corpus([str(text)], f"{folder}/corpus", f"{folder}/tokenizer", options, lambda progress: None)


def _name(title: str, mode: str) -> str:
    return f"{RECIPES[title]}-{mode}"


def create(folder: Path, place: Path, title: str, mode: str) -> None:
    """A run of the base recipe as `maskfleet init --tiny` makes it, but with dropout, and of `STEPS` steps."""
    from launcher.runtime.recipe.load import load, with_assignments
    from launcher.runtime.recipe.tiny import tiny
    from launcher.runtime.run.create import create_run

    settings = (
        f"corpus={{sources: {{text: {{uri: {folder}/corpus, weight: auto}}}}, heldout: {{fraction: 0.1}}}}",
        f"tokenizer.uri={folder}/tokenizer",
        "model.vocab=null",
        "model.dropout=0.1",
        "model.attention_dropout=0.1",
        f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 16}}}}]",
        "schedule={warmup: 2, decay: constant}",
        f"checkpoint={{every: {{steps: {STEPS}}}, keep_last: 1}}",
        f"evaluation={{every: {{steps: {STEPS}}}, samples: 16}}",
        "logging={flush_seconds: 1000, tensorboard: false}",
        f"compile={MODES[mode]}",
    )
    create_run(
        with_assignments(tiny(load(RECIPES[title])), settings),
        str(place / _name(title, mode)),
        datetime.now(UTC),
    )


def _asked(python: Path, *arguments: str, home: Path | None = None) -> str:
    """What a command of another environment prints. Raises BenchError: it failed."""
    own = {} if home is None else {"HOME": str(home)}  # where compiled code is kept
    environment = os.environ | own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ran = subprocess.run(
        [python, *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        timeout=_LARGEST_S,
        check=False,
    )
    if ran.returncode:
        raise BenchError(f"{python} ended with {ran.returncode}", remedy="pip install -e . with that torch there")
    return ran.stdout.strip()


def _train(runs: list[Path]) -> None:
    """In this environment, one after the other, on one core."""
    from tests.support.ranks.run_group import run_group

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    for place in runs:
        ended = run_group(str(place), 1, timeout=_LARGEST_S)
        note(f"{place.name}: exit code {ended.codes[0]}")
        if ended.codes != [0]:
            note(ended.output)


def compared(there: Path, here: Path, *, compiled: bool) -> Compared:
    """Losses and gradient norms of all steps, and the weights at the end. A run that failed, or did not compile, says
    so."""
    for place in (there, here):
        if failure := _failure(place, compiled=compiled):
            return Compared(failure=failure)
    pairs = zip(figures(there), figures(here), strict=True)
    first = next((number for number, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs), None)
    return Compared(first, largest_difference(weights(there), weights(here)))


def figures(place: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step: a weight that differs by a bit shows in them."""
    from launcher.runtime.run.record import open_run
    from tests.support.runs.small_runs import step_records

    return [(one["loss"], one["grad_norm"]) for one in step_records(open_run(str(place)).store)]


def _failure(place: Path, *, compiled: bool) -> str:
    from tests.support.runs.small_runs import events

    if (steps := len(figures(place))) < STEPS:
        return f"failed after step {steps}"
    found = events(str(place), "compilation") if compiled else []
    return next((f"not compiled: {one['failure'] or one['why']}" for one in found if not one["compiled"]), "")


def weights(place: Path) -> dict[str, Tensor]:
    """Those of the last step, fp32, by name."""
    from checkpoints.load import CheckpointReader
    from launcher.runtime.run.record import open_run, select_checkpoint

    opened = open_run(str(place))
    with CheckpointReader(opened.store, select_checkpoint(opened, STEPS)) as reader:
        return {name: reader.read_full(name) for name in reader.manifest.shapes}


def largest_difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Of any weight. NaN, which equals nothing, is a difference."""
    assert some.keys() == others.keys()
    different = [name for name in some if not torch.equal(some[name], others[name])]
    return max((float((some[name] - others[name]).abs().max()) for name in different), default=0.0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # tests.support
    run(main)
