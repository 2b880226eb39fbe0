"""Mistakes of a beginner, given to the command as processes: what is said, and how soon.

python -m tests.bench.mistakes            prints the table of RESULTS-runs.md
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.checks.silence import SeenCommand, seen

MACHINES = "--nodes 2 --cpus-per-node 4 --memory 8GiB"
MISTAKES = {
    # What is typed, and what the answer must name. Braces: places that `prepare` makes; `new` and `gone` are not there.
    "trian {run}": "train",
    "watch {run}": "runs watch",
    "train": "RUN",
    "train {gone}": "init",
    "train {corpus}": "no run at",
    "train {run} --learning-rate 1e-4": "--set",
    "train {run} --set lr=1e-4": "optimizer",
    "train {run} --set zero": "a.b=value",
    "train {run} --set zero=7": "zero",
    "train {run} --set model.layers=3": "runs fork",
    "train {run} --nodes 0": "--nodes",
    "init roberta-bse {new}": "roberta-base",
    "init quickstart": "RUN",
    "init roberta-base {new}": "--corpus",
    "init quickstart {new} --corpus {gone}": "corpus build",
    "init quickstart {new} --corpus {text}": "no corpus at",
    "init quickstart {run} --corpus {corpus}": "exists|already",
    "init {broken} {new}": "line",
    "init quickstart {new} --corpus {corpus} --tokenizer {gone}": "tokenizer",
    "tokenizer train {gone} --out {new}": "no such file",
    "tokenizer train {picture} --out {new}": ".txt",
    "tokenizer train {latin} --out {new}": "--encoding",
    "tokenizer train {empty} --out {new}": "text",
    "tokenizer train {text} --out {tokenizer}": "--replace",
    "tokenizer train {text}": "--out",
    "tokenizer train {text} --out {new} --kind bpe2": "byte_bpe",
    "tokenizer check {gone} {text}": "tokenizer",
    "corpus build {text} --out {new}": "--tokenizer",
    "corpus build {text} --out {new} --tokenizer {gone}": "tokenizer train",
    "corpus build {records} --out {new} --tokenizer {tokenizer} --text-field content": "content",
    "corpus build {text} --out {new} --tokenizer {tokenizer} --heldout 5": "--heldout",
    "corpus build {records} --out {corpus} --tokenizer {tokenizer}": "--out|another|other",
    "corpus build s3://your-bucket/text --out {new} --tokenizer {tokenizer}": "your-bucket is a placeholder",
    "corpus stats {run}": "no corpus at",
    "corpus show {corpus} --index 99999": "99,?999|documents",
    "recipe show roberta-base --set optimizer.adam.lr=1": "adamw",
    "estimate roberta-base --gpu H100": "--gpus-per-node",
    "estimate roberta-base --nodes 1 --gpus-per-node 8 --gpu RTX4090": "H100",
    "estimate roberta-base --nodes 1 --gpus-per-node 8 --gpu H100 --text lots": "160GB",
    "show {run} --step 999999": "step",
    "checkpoints export {run} --out {new}": "train",
    "runs status {gone}": "no run",
    "runs fork {run} {new}": "checkpoint",
    f"launch slurm {{run}} {MACHINES} --time tomorrow": "24:00:00",
    "launch slurm {run} --nodes 2 --cpus-per-node 4 --memory lots": "--memory",
    "finetune {gone} sst2": "no folder",
    "finetune {model} sst3": "sst2",
    "finetune {model} sst2 --out {new}": "--data",
    "embed eval {gone} stsb --data {new}": "no folder|--data",
    "evaluate {model} glue": "--results",
    "corpus build {text} --tokenizer {tokenizer}": "--out",
    "report {gone}": "no run",
    "tasks check {broken}": "line|mine.yaml|broken.yaml",
}
_TOLD = 72  # characters of an answer that the table shows


@dataclass(frozen=True)
class Answer:
    """To a mistake: the command as it was typed, and what came of it."""

    typed: str
    seen: SeenCommand

    @property
    def told(self) -> tuple[str, str]:
        """What is wrong, and what to do, a line each."""
        boxed = re.sub(r"[│╭╮╰╯─]+", " ", self.seen.text)
        words = " ".join(boxed.replace(" Error ", " error: ", 1).split())
        error, _, remedy = (words.partition("error: ")[2] or words).partition("remedy: ")
        return error.strip(), remedy.strip() or "--help"


def prepare(folder: Path) -> dict[str, str]:
    """Text, a tokenizer, a corpus, a run that has not trained yet, and things that are none of these, by name."""
    from tests.support.runs.small_runs import new_run, prepare_corpus

    prepare_corpus(folder)
    (folder / "text.txt").write_text("Some text of one's own. And a second sentence.\n" * 50)
    (folder / "latin.txt").write_bytes("Grüße aus Köln. Schöne Wörter überall.\n".encode("latin-1") * 50)
    (folder / "empty.txt").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n")
    (folder / "broken.yaml").write_text("name: mine\nmodel: {family: roberta\n")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "bert"}')
    named = {name: str(folder / name) for name in ("corpus", "tokenizer", "model", "new", "gone")}
    files = {"text": "text.txt", "latin": "latin.txt", "empty": "empty.txt", "picture": "picture.png"}
    files |= {"broken": "broken.yaml", "records": "text.jsonl"}
    return {
        **named,
        **{name: str(folder / file) for name, file in files.items()},
        "run": new_run(folder, str(folder / "run")),
    }


def answer(typed: str, places: dict[str, str], folder: Path) -> Answer:
    """Types it, in `folder`, without a cloud's metadata service."""
    words = [word.format(**places) for word in typed.split()]
    alone = {"AWS_EC2_METADATA_DISABLED": "true", "COLUMNS": "200"}
    return Answer(typed, seen([sys.executable, "-m", "maskfleet", *words], cwd=folder, env=alone))


def row(one: Answer, places: dict[str, str]) -> str:
    """Of the table. Places are named shortly."""

    def short(told: str) -> str:
        for name, place in sorted(places.items(), key=lambda item: -len(item[1])):
            told = told.replace(place, name.upper())
        cut = told if len(told) <= _TOLD else f"{told[:_TOLD].rstrip()} ..."
        return cut.replace("|", "\\|")

    typed = re.sub(r"\{(\w+)\}", lambda found: found[1].upper(), one.typed)
    error, remedy = one.told
    cells = (typed, short(error), short(remedy), f"{one.seen.seconds:.1f}", f"{one.seen.cpu:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        places, answers = prepare(Path(name)), []
        print("| `maskfleet` ... | error | remedy | s | s of a CPU |\n|---|---|---|---|---|")
        for typed in MISTAKES:
            answers.append(answer(typed, places, Path(name)))
            print(row(answers[-1], places), flush=True)
        slowest = max(answers, key=lambda one: one.seen.cpu)
        print(f"\nThe slowest: {row(slowest, places)}")


if __name__ == "__main__":
    main()
