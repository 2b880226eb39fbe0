"""Every family's recipe in its small form, whole: init, train through Ray on two ranks with ZeRO-2, a rank killed on
the way, losses below chance, export, reload in transformers. Minutes each.

`infra/test -m long tests/cluster/test_every_family.py -rP` shows each one's figures beside chance.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import transformers
from compare import prepare, read_comparisons, tokenizer_kind

from checkpoints.hf.load import load_pretrained
from launcher.app.cli.demo_path import write_documentation
from launcher.observe.inspect.baselines import load_or_compute_baselines
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.tiny import tiny
from launcher.runtime.run.record import open_run
from tests.support.checks.command import maskfleet
from tests.support.data.translated import LANGUAGES as KNOWN
from tests.support.data.translated import prepare_translations, source_settings
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.train_command import committed, kill, output, training, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

LANGUAGES = "xlm-mlm-tlm-base"  # which trains on several, and on translations
FAMILIES = read_comparisons().rows["families"].recipes.values()
NAMED = (*(one.recipe for one in FAMILIES), "deberta-base-sop", LANGUAGES)
FAMILY = {  # from the text: to check all recipes takes a second of every collection
    name: re.search(r"^  family: (\w+)", text, re.MULTILINE)[1]  # type: ignore[index]
    for name, text in sorted(bundled().items())
}
FIRST = {family: name for name, family in reversed(FAMILY.items())}
REACHED = {FAMILY[name] for name in NAMED}
WHOLE = (*NAMED, *(name for family, name in sorted(FIRST.items()) if family not in REACHED))
"""One a family and objective; the others are of the same small forms."""
PAIRS = "contrastive-base"  # which trains on no plain text
NATS = 0.1  # what counts as clearly below the loss of guessing tokens by frequency
BITS = 0.01  # and, in nats, below that of guessing one of two classes


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's documentation, with a tokenizer and a corpus of each kind."""
    folder = tmp_path_factory.mktemp("text")
    write_documentation(folder / "text.jsonl")
    for kind in sorted({tokenizer_kind(load(name)) for name in bundled()}):
        prepare([str(folder / "text.jsonl")], folder, 2048, kind, 0.05)
    lines = (line for text in (folder / "text.jsonl").open() for line in json.loads(text)["text"].splitlines())
    sentences = dict.fromkeys(line.strip() for line in lines if len(line.split()) > 3)
    (folder / "translated").mkdir()
    prepare_translations(folder / "translated", [*sentences], vocabulary=2048, heldout=0.05, block_tokens=1 << 16)
    return folder


@pytest.mark.parametrize(
    ("name", "further"),
    [
        *((name, ()) for name in WHOLE),
        *(("roberta-base", (f"optimizer={{{name}: {{lr: 1.5e-3}}}}",)) for name in ("stableadamw", "muon")),
    ],
)
def test_a_recipe_learns_survives_and_goes_on_to_transformers(
    name: str, further: tuple[str, ...], inputs: Path, tmp_path: Path
) -> None:
    uri, undisturbed = (create(name, inputs, tmp_path / run, *further) for run in ("run", "undisturbed"))
    with training(uri) as process:
        wait_for(process, lambda: committed(uri) > 0, timeout=900)
        kill(process, "ray::RankProcess as rank")
        assert process.wait(1500) == 0, output(process)
    assert [event["kind"] for event in small_runs.history(uri).events].count("resume") == 1

    until = 150 + next(event["step"] for event in small_runs.history(uri).events if event["kind"] == "resume")
    finish(undisturbed, 2, stop_at=until, timeout=1500)
    assert small_runs.losses(uri)[:until] == small_runs.losses(undisturbed)[:until]

    figures = small_runs.history(uri).evaluations[-1]
    unigram = load_or_compute_baselines(open_run(uri)).unigram
    compared = against_chance(figures, unigram)
    assert compared
    for figure, value, chance in compared:
        print(f"{name}: {figure} {value:.3f}, chance {chance:.3f}")
    for figure, value, chance in compared:
        assert value < chance - (NATS if chance > 1 else BITS), figure
    if "rtd_accuracy" in figures:
        print(f"{name}: rtd_accuracy {figures['rtd_accuracy']:.4f}, majority {1 - figures['rtd_replaced']:.4f}")
        assert figures["rtd_accuracy"] > 1 - figures["rtd_replaced"], "no better than never flagging any"

    maskfleet("checkpoints", "export", uri, "--out", str(tmp_path / "model"))
    for config in sorted((tmp_path / "model").rglob("config.json")):
        reload(config.parent)


@pytest.mark.parametrize("name", sorted(bundled().keys() - {*WHOLE, PAIRS}))
def test_every_other_recipe_runs_a_few_steps(name: str, inputs: Path, tmp_path: Path) -> None:
    """The other sizes of a family have the same small form; what is theirs is in their files."""
    few = json.dumps([phase.model_dump(mode="json") | {"steps": 4} for phase in tiny(load(name)).phases])
    uri = create(name, inputs, tmp_path / "run", f"phases={few}", "schedule.warmup=1")
    finish(uri, 2)
    maskfleet("checkpoints", "export", uri, "--out", str(tmp_path / "model"))
    for config in sorted((tmp_path / "model").rglob("config.json")):
        reload(config.parent)


def create(name: str, inputs: Path, run: Path, *further: str) -> str:
    folder = inputs / tokenizer_kind(load(name))
    weighed = name.startswith("mmbert")  # whose phases name the sources
    sources = {text: {"uri": f"{folder}/corpus"} for text in (load(name).corpus.sources if weighed else ("text",))}
    corpus = f"corpus={json.dumps({'sources': sources, 'heldout': {'fraction': 0.05}})}"
    if name == LANGUAGES:
        folder = inputs / "translated"
        corpus = source_settings(folder, heldout=0.05)
        further = (f"model.languages=[{', '.join(KNOWN)}]", *further)
    settings = (
        corpus,
        f"tokenizer.uri={folder}/tokenizer",
        "zero=2",
        "trainers=2",
        "logging={flush_seconds: 5, tensorboard: false}",
        *further,
    )
    maskfleet("init", name, str(run), "--tiny", *(part for value in settings for part in ("--set", value)))
    return str(run)


def against_chance(figures: Mapping[str, float], unigram: float) -> list[tuple[str, float, float]]:
    """(loss, its value, what guessing achieves) of every term of an objective.

    Hidden tokens are guessed by their frequency, the two classes of a pair by a coin, and whether a token was
    replaced by the share of tokens that were.
    """
    share = figures.get("rtd_replaced", 0.5)
    chances = {
        "mlm_loss": unigram,
        "plm_loss": unigram,
        "sbo_loss": unigram,
        "denoise_loss": unigram,
        "nsp_loss": math.log(2),
        "sop_loss": math.log(2),
        "rtd_loss": -share * math.log(share) - (1 - share) * math.log(1 - share),
    }
    return [(name, figures[name], chance) for name, chance in chances.items() if name in figures]


def reload(folder: Path) -> None:
    """In the class that the folder names, with every weight in its place, and its tokenizer. A family that transformers
    does not know is read back by ours."""
    if json.loads((folder / "config.json").read_text())["model_type"] not in transformers.CONFIG_MAPPING:
        load_pretrained(folder)
        return
    config = transformers.AutoConfig.from_pretrained(folder)
    (architecture,) = config.architectures
    loaded = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    transformers.AutoTokenizer.from_pretrained(folder)
