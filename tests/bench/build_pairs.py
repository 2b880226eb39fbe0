"""CPU seconds of `corpus build`, in turn with an earlier commit and with `datasets.map` over `tokenizers`, one worker.

    git worktree add --detach /tmp/earlier d927f24e
    python tests/bench/build_pairs.py TEXT... --earlier /tmp/earlier --megabytes 600

The text is repeated until it has the wanted size; in each repetition every tenth word is another, so that none is a
copy. A tokenizer of each kind is trained on it first. Each measurement is a process of its own, and start-up counts;
tokens are counted, not compared. Where the time goes is said by `--profile`.
"""

import argparse
import gzip
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

KINDS = {"byte_bpe": 50_000, "wordpiece": 30_000, "unigram": 32_000}
_TRAINED_BYTES = 20_000_000

_BUILD = """
import resource, shutil, sys
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
source, tokenizer, output = sys.argv[1:4]
shutil.rmtree(output, ignore_errors=True)
built = build_corpus([source], output, tokenizer, BuildOptions(workers=1), lambda progress: None)
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, int(built.train.tokens.sum() + built.heldout.tokens.sum()))
"""
_DATASETS = """
import resource, shutil, sys
import datasets, tokenizers
source, tokenizer, output = sys.argv[1:4]
shutil.rmtree(output, ignore_errors=True)  # else the second run takes what the first has written
datasets.disable_progress_bars()
codec = tokenizers.Tokenizer.from_file(tokenizer + "/tokenizer.json")
text = datasets.load_dataset("json", data_files=source, split="train", cache_dir=output)
encode = lambda batch: {"ids": [e.ids for e in codec.encode_batch_fast(batch["text"], add_special_tokens=False)]}
found = text.map(encode, batched=True, remove_columns=text.column_names)
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, sum(map(len, found.with_format("numpy")["ids"])))
"""
_PROFILED = "import cProfile, pstats\nprofile = cProfile.Profile()\nprofile.enable()\n{}\nprofile.disable()\n"
_PROFILED += "pstats.Stats(profile, stream=sys.stderr).sort_stats('tottime').print_stats(30)\n"


def _documents(paths: Sequence[Path]) -> list[str]:
    lines = (
        line
        for path in paths
        for line in (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8")
    )
    return [json.loads(line)["text"] for line in lines]


def varied(documents: Sequence[str], megabytes: float) -> Iterator[str]:
    """Yield documents until they have so many megabytes, in each repetition with other words in some places."""
    size = 0
    words = sorted({word for text in documents[:50] for word in text.split() if word.isalpha()})
    for repetition in range(1_000_000):
        drawn = random.Random(repetition)
        for text in documents:
            if repetition:
                pieces = text.split(" ")
                for place in range(drawn.randrange(10), len(pieces), 10):
                    pieces[place] = drawn.choice(words)
                text = " ".join(pieces)
            size += len(text.encode())
            yield text
            if size >= megabytes * 1e6:
                return


def _measured(program: str, arguments: Sequence[str], tree: Path | None) -> tuple[float, float, int]:
    """Return (CPU seconds, megabytes of memory at the most, tokens) of a process. `tree`: the checkout it imports."""
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if tree is not None:
        environment["PYTHONPATH"] = f"{tree}:{tree}/launcher"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        cwd=tree,  # which comes before PYTHONPATH
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds, memory, tokens = done.stdout.split()[-3:]
    return float(seconds), float(memory), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="+", type=Path, help="JSON lines with a text each, also compressed")
    parser.add_argument("--earlier", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--megabytes", type=float, default=600)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--datasets", action="store_true", help="beside datasets.map, too")
    parser.add_argument("--profile", action="store_true", help="then profile a build")
    options = parser.parse_args()
    from data_service.tokenizers.load import save_tokenizer
    from data_service.tokenizers.train import train_tokenizer

    documents, here = _documents(options.text), Path(__file__).parents[2]
    print(f"{platform.machine()}, {os.cpu_count()} cores; {options.megabytes:g} MB of text", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "text.jsonl")
        with source.open("w") as file:
            file.writelines(
                json.dumps({"text": text}) + "\n" for text in varied(documents, options.megabytes)
            )
        for kind in options.kinds:
            tokenizer = f"{folder}/{kind}"
            trained = varied(documents, _TRAINED_BYTES / 1e6)
            save_tokenizer(train_tokenizer(kind, trained, KINDS[kind]), tokenizer)
            ways: dict[str, tuple[str, Path | None]] = {"now": (_BUILD, here)}
            if options.earlier:
                ways["earlier"] = (_BUILD, options.earlier.resolve())
            if options.datasets:
                ways["datasets.map"] = (_DATASETS, None)
            found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
            for _ in range(options.pairs):
                for way, (program, tree) in ways.items():
                    arguments = [str(source), tokenizer, f"{folder}/out-{way}"]
                    found[way].append(_measured(program, arguments, tree))
                    print(f"  {kind} {way}: {found[way][-1]}", file=sys.stderr, flush=True)
            now = statistics.median(seconds for seconds, *_ in found["now"])
            for way, measured in found.items():
                seconds = statistics.median(one[0] for one in measured)
                print(
                    f"{kind:10} {way:13} {seconds:8.1f} CPU s, {options.megabytes / seconds:6.2f} MB/s a core, "
                    f"{seconds / now:5.2f} x now, {max(one[1] for one in measured):5.0f} MB of memory, "
                    f"{measured[-1][2]:,} tokens",
                    flush=True,
                )
            if options.profile:
                _measured(_PROFILED.format(_BUILD), [str(source), tokenizer, f"{folder}/out"], here)


if __name__ == "__main__":
    main()
