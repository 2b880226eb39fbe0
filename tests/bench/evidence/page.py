"""The page: what was held equal, what was found, with n and spread, and what that shows."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from .figures import Figures, Seen, Source
from .measuring import DOMAIN
from .settings import Comparison
from .tables import curve, figure, table

_CLEAR = 3  # seeds at least
_INTRODUCTION = """\
# Evidence: does what is pretrained know anything?

Made by `python tests/bench/evidence` (what is compared: `tests/bench/evidence/comparison.yaml`). A figure is the mean
over n seeds, with the smallest and the largest in brackets. "Clearly" means: three seeds or more, and the worst of them
better than the best without pretraining. Everything else is said as it is. These are networks of two layers, trained
for minutes: the page tells whether training works, not how good a published model is."""


def render(comparison: Comparison, found: Figures, failures: Mapping[str, str]) -> str:
    """Markdown, of all that is there by now. `failures`: what each failed job said last."""
    names = [name for name in comparison.families if found.runs.get(name)]
    parts = [
        _INTRODUCTION,
        _equal(comparison, found),
        _summary(comparison, found, names),
        _losses(comparison, found, names),
        _probe(comparison, found, names),
        _similarity(comparison, found, names),
        _domain(found, names),
        _vectors(comparison, found),
        _published(found),
        _failures(failures),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _equal(comparison: Comparison, found: Figures) -> str:
    wanted = comparison.pretraining
    tokens = [run.tokens for runs in found.runs.values() for run in runs.values()]
    span = f"{min(tokens):,} to {max(tokens):,}" if tokens else "none yet"
    weights = ", ".join(f"{share:.0%} {kind}" for kind, share in comparison.weights.items())
    technical, reviews = (f"{found.basis.text[kind] / 1e6:.1f} MB" for kind in ("technical", "reviews"))
    lines = [
        "## What was held equal",
        "",
        f"- Text: {technical} of technical prose, and the sentences of SST-2's training split "
        f"without labels ({reviews}); {weights} of what is trained on. No sentence of SST-2's "
        "dev or test split, and no proposal that a dev or test passage is from, is in it.",
        f"- Tokens: {wanted.tokens:,} for each run, {wanted.batch:,} a step, {wanted.steps:,} steps (on record: "
        f"{span}). Rows have {wanted.short.length} tokens in the first {wanted.short.share:.0%} of the steps, "
        f"{wanted.length} after that; XLNet's always {wanted.length}, half of them those of the row before.",
        "- Network: the small form of each family's recipe (two layers of 128), "
        f"{comparison.vocabulary:,} pieces.",
        f"- Fine-tuning: {_settings(comparison)}; the epoch is chosen on dev, the figure is of test. From scratch: the "
        "same network with the weights that its run began with, everything else the same.",
        f"- Machine: {os.cpu_count()} cores ({_processor()}), one for each run; fp32.",
    ]
    return "\n".join(lines)


def _summary(comparison: Comparison, found: Figures, names: Sequence[str]) -> str:
    """For each measure, the families that are clearly better for their pretraining, and the others."""
    last = comparison.pretraining.steps
    pairs = {
        "linear probe of SST-2": {
            name: (found.frozen(name, last, _PROBE), found.frozen(name, 0, _PROBE)) for name in names
        }
    }
    for task in DOMAIN:
        pairs[f"fine-tuned on `{task}`"] = {
            name: (found.finetuned(name, task, trained=True), found.finetuned(name, task, trained=False))
            for name in names
        }
    rows = []
    for measure, by_family in pairs.items():
        sorted_by = {verdict: list[str]() for verdict in ("clearly", "mean", "not", "few")}
        for name, (trained, untrained) in by_family.items():
            if trained and untrained:
                sorted_by[_verdict(trained, untrained)].append(name)
        rows.append([measure, *(", ".join(sorted_by[verdict]) or "-" for verdict in sorted_by)])
    heads = [
        "measure",
        "clearly better",
        "better in the mean only",
        "not better",
        "fewer than 3 seeds so far",
    ]
    return "## What is better for its pretraining\n\n" + table(heads, rows)


def _verdict(trained: Seen, untrained: Seen) -> str:
    if min(trained.n, untrained.n) < _CLEAR:
        return "few"
    if trained.low > untrained.high:
        return "clearly"
    return "mean" if trained.mean > untrained.mean else "not"


_PROBE = "probe sst2 accuracy"


def _losses(comparison: Comparison, found: Figures, names: Sequence[str]) -> str:
    steps = sorted({step for name in names for run in found.runs[name].values() for step in run.losses})
    rows = []
    for name in names:
        runs = list(found.runs[name].values())
        counted = [run.counted for run in runs if run.counted is not None]
        seen = [found.loss(name, step) for step in steps]
        bigram = f"{counted[0].bigram:.2f}" if counted else "-"
        unigram = f"{counted[0].unigram:.2f}" if counted else "-"
        detection = [run.detection for run in runs if run.detection is not None]
        judged = (
            f"{_mean([d.right for d in detection]):.1%} ({_mean([d.original for d in detection]):.1%})"
            if detection
            else ""
        )
        rows.append([name, str(len(runs)), unigram, bigram, *(_loss(one) for one in seen[:-1])])
        rows[-1] += [figure(seen[-1], "{:.2f}") if seen else "", curve(seen), judged]
    batch = comparison.pretraining.batch
    heads = ["family", "n", "unigrams", "bigrams", *(f"{step * batch / 1e6:.1f} M" for step in steps)]
    text = (
        "## Held-out loss by tokens trained on\n\n"
        "Nats for each hidden token; losses of different tokenizers and kinds of masks cannot be compared with each "
        "other, so each stands beside what counting achieves on the same targets. Of ELECTRA and DeBERTa v3 it is the "
        "generator's; `detection` is the share of tokens that the discriminator judges right (that calling all of them "
        "original judges right). Held-out rows are the long ones; positions that short rows do not have are learned at "
        "the end.\n\n"
    )
    return text + table([*heads, "curve", "detection"], rows) if names else ""


def _loss(seen: Seen) -> str:
    return f"{seen.mean:.2f}" if seen else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _probe(comparison: Comparison, found: Figures, names: Sequence[str]) -> str:
    return (
        "## Linear probe of SST-2 by tokens trained on\n\n"
        "Accuracy on the test split (1,821 sentences), of logistic regression on the mean states of all layers, fitted "
        "on the whole training split. At 0 M: the same network with its initial weights.\n\n"
        + _by_step(comparison, found, names, _PROBE)
    )


def _similarity(comparison: Comparison, found: Figures, names: Sequence[str]) -> str:
    parts = []
    for task in found.basis.sts:
        for form in ("raw", "whitened"):
            title = f"{task}, vectors {'as they are' if form == 'raw' else 'whitened'}:"
            parts += [title, _by_step(comparison, found, names, f"similarity {task} {form}")]
    if not parts:
        return ""
    return "\n\n".join(
        [
            "## Similarity by tokens trained on",
            "Spearman's correlation (x 100) of cosines with people's scores; vectors are the mean of the last layer. "
            "Without training they are almost a bag of words, which suits headlines that share words.",
            *parts,
        ]
    )


def _by_step(comparison: Comparison, found: Figures, names: Sequence[str], what: str) -> str:
    wanted = comparison.pretraining
    rows = []
    for name in names:
        seen = [found.frozen(name, step, what) for step in wanted.measured]
        rows.append([name, str(seen[-1].n), *(figure(one, "{:.1f}", 100) for one in seen)])
        rows[-1] += [curve(seen), figure(seen[-1].gain(seen[0]), "{:+.1f}", 100)]
    heads = [
        "family",
        "n",
        *(f"{step * wanted.batch / 1e6:.1f} M" for step in wanted.measured),
        "curve",
        "gain",
    ]
    return table(heads, rows)


def _domain(found: Figures, names: Sequence[str]) -> str:
    parts = [
        "## Fine-tuned on tasks of the text's own domain, against fine-tuned from scratch",
        "`section`: which of eleven sections a passage begins (accuracy). `proposal`: whether two passages are of one "
        "proposal. `order`: whether two consecutive passages are in order. `markup`: which words are code, or names of "
        "authors (F1 of entities). All x 100, on passages of proposals that nobody was trained on. By chance alone, an "
        "accuracy of 1,000 passages has a standard error of up to 1.6.",
    ]
    for task in DOMAIN:
        rows = []
        for name in names:
            trained, scratch = (found.finetuned(name, task, trained=which) for which in (True, False))
            if trained:
                gain = trained.gain(scratch)
                cells = [figure(scratch, "{:.1f}", 100), figure(trained, "{:.1f}", 100)]
                rows.append([name, str(trained.n), *cells, figure(gain, "{:+.1f}", 100)])
        if rows:
            parts += [
                f"`{task}`, {found.basis.examples[task]}:",
                table(["family", "n", "from scratch", "pretrained", "gain"], rows),
            ]
    return "\n\n".join(parts) if len(parts) > 2 else ""


def _vectors(comparison: Comparison, found: Figures) -> str:
    wanted = comparison.vectors
    rows = []
    for family in (name for name in wanted.families if name in found.runs):
        for task in found.basis.sts:
            seen = [found.similarity(family, task, source) for source in get_args(Source)]
            if any(seen):
                n = max(one.n for one in seen)
                rows.append([family, task, str(n), *(figure(one, "{:.1f}", 100) for one in seen)])
    if not rows:
        return ""
    heads = ["family", "sentences", "n", "untrained", "pretrained", "after SimCSE", "after pairs"]
    return (
        "## Vectors of text, before and after contrastive training\n\n"
        f"Spearman's correlation (x 100), mean pooling. {wanted.steps:,} steps of {wanted.batch} examples from the "
        "last checkpoint: SimCSE on sentences of the same text; pairs of what a section is called and how it "
        "begins.\n\n" + table(heads, rows)
    )


def _published(found: Figures) -> str:
    published = found.published
    if published is None:
        return ""
    rows = [
        [task, f"{100 * both.ours:.2f}", f"{100 * both.theirs:.2f}"]
        for task, both in published.figures.items()
    ]
    return (
        "## A published model, measured here\n\n"
        f"The model of the folder `{published.model}`: Spearman's correlation (x 100) by our evaluation and by "
        "sentence-transformers' own, on the same machine. One model and no draws, so n is 1.\n\n"
        + table(["sentences", "ours", "sentence-transformers"], rows)
    )


def _failures(failures: Mapping[str, str]) -> str:
    rows = [[name, reason] for name, reason in failures.items()]
    return "## What failed\n\n" + table(["job", "reason"], rows) if rows else ""


def _settings(comparison: Comparison) -> str:
    chosen = comparison.finetuning.model_dump(mode="json", exclude_defaults=True)
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
