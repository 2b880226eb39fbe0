"""From a run to its report file."""

from datetime import datetime
from pathlib import Path

from launcher.diagnose.results import evaluated
from launcher.evaluate.page import kept_rows
from launcher.inspect.report.page import Subject, render
from launcher.output import write_file
from launcher.run.history import read_history
from launcher.run.record import Run


def write_report(run: Run, out: Path, *, with_baselines: bool, now: datetime) -> None:
    """Write the page about `run` to the local file `out`.

    Raises:
        CorpusError, StoreError: the baselines are asked for and the corpora cannot be read.
        OutputError: `out` cannot be written.
    """
    write_file(out, render(subject(run, with_baselines=with_baselines), read_history(run.store), now))


def subject(run: Run, *, with_baselines: bool) -> Subject:
    """What the page says about the run besides its history."""
    record = run.record
    corpora = {
        f"corpus {name}": f"{run.recipe.corpus.sources[name].uri} ({fingerprint[:12]})"
        for name, fingerprint in record.inputs.corpora.items()
    }
    tokenizer = {"tokenizer": f"{run.recipe.tokenizer.uri} ({record.inputs.tokenizer[:12]})"}
    origins = {
        f"forked from{'' if number == 1 else f' ({number})'}": f"{origin.run} at step {origin.step:,}"
        + (f", changed: {'; '.join(line[2:] for line in origin.changes)}" if origin.changes else "")
        for number, origin in enumerate(reversed(record.origins), start=1)
    }
    computed = None
    if with_baselines and run.recipe.objective.contrastive is None:  # which hides no tokens to guess
        from launcher.inspect.baselines import (
            baselines,  # loads DeepSpeed, which a page without them does not need
        )

        computed = baselines(run)
    return Subject(
        name=run.recipe.name,
        uri=run.uri,
        created=record.created,
        total_steps=run.recipe.total_steps,
        recipe=run.recipe.to_yaml(),
        facts={
            "run fingerprint": record.fingerprint[:12],
            **origins,
            **corpora,
            **tokenizer,
            **record.versions,
        },
        evaluated=kept_rows(run.store),
        baselines={"unigram": computed.unigram, "left bigram": computed.bigram} if computed else {},
        beside=tuple(evaluated(run.store)),
    )
