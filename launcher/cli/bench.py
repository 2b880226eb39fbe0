"""`maskfleet bench`: measurements against a peer in the same run."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.options import InputsArgument

group = typer.Typer(no_args_is_help=True, help="Measure Maskfleet against a peer, in the same run.")


class Size(StrEnum):
    SMALL = "small"
    BASE = "base"


class Family(StrEnum):
    BERT = "bert"
    ROBERTA = "roberta"
    ALBERT = "albert"
    SPANBERT = "spanbert"
    ELECTRA = "electra"
    DEBERTA = "deberta"
    DEBERTA_V2 = "deberta_v2"
    XLNET = "xlnet"


class Lengths(StrEnum):
    FULL = "full"
    MIXED = "mixed"


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="bench", rich_help_panel="Look after it")


@group.command()
def step(
    family: Annotated[Family, typer.Argument(help="Which family.")] = Family.ROBERTA,
    size: Annotated[
        Size, typer.Option(help="4 layers of 256 at length 128, or the family's base at length 512.")
    ] = Size.SMALL,
    lengths: Annotated[
        Lengths, typer.Option(help="Rows all equally long, or from an eighth of that to all of it.")
    ] = Lengths.FULL,
    layers: Annotated[int | None, typer.Option(min=1, help="Only so many layers of it.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each side.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each side.")] = 1,
) -> None:
    """A training step against transformers' class of the family: same weights, batch, threads and optimizer.

    Also shown: the peer with its head on masked positions only. Needs transformers (the dev extra).
    """
    from launcher.bench.step import bench_step, render, setting

    chosen = setting(family.value, size.value, lengths.value, layers=layers, rounds=rounds, threads=threads)
    typer.echo(render(bench_step(chosen, lambda line: typer.echo(line, err=True))))


@group.command()
def masking(
    length: Annotated[int, typer.Option(min=8, help="Tokens in a row.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each side.")] = 5,
) -> None:
    """Masking against transformers' MLM collator, on the same rows, one core each.

    Needs transformers (the dev extra).
    """
    from launcher.bench.masking import bench_masking, render

    typer.echo(render(bench_masking(length, rounds, lambda line: typer.echo(line, err=True))))


@group.command()
def plan(
    tokens: Annotated[
        int, typer.Option(min=1_000_000, help="Tokens of the synthetic manifest; no data is behind it.")
    ] = 40_000_000_000,
) -> None:
    """What a data plan costs at scale: making it, a seek to any sample, the counting pass, the first batch."""
    from launcher.bench.plan import bench_plan, render

    typer.echo(render(bench_plan(tokens, progress=lambda line: typer.echo(line, err=True))))


@group.command()
def data(
    uri: Annotated[
        str | None,
        typer.Argument(metavar="S3_URI", help="Where to write shards. Default: a server of its own."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes of each side.")] = 2,
) -> None:
    """Shards in object storage to masked microbatches, against MosaicML Streaming with transformers' collator.

    CPU seconds per million tokens, of all processes. Needs the peer installed; says how if it is not.
    """
    from launcher.bench.data import bench_data, render

    typer.echo(render(bench_data(uri, workers, lambda line: typer.echo(line, err=True))))


@group.command()
def recipes(
    texts: InputsArgument,
    task: Annotated[str, typer.Option(help="A task of classification for the probe: its name or YAML file.")],
    out: Annotated[
        Path, typer.Option(help="Folder for corpora, runs and results; an interrupted bench goes on.")
    ],
    data: Annotated[str | None, typer.Option(help="Folder or s3:// URI that holds the task's files.")] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", help="A recipe to measure; again for more. Default: one a family."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe.")] = 3,
    tokens: Annotated[int, typer.Option(min=1000, help="Training tokens, for the first table.")] = 2_000_000,
    cpu_seconds: Annotated[
        float, typer.Option(min=1, help="CPU seconds of training, for the second.")
    ] = 60.0,
    vocabulary: Annotated[int, typer.Option(min=500, help="Ids of each kind of tokenizer.")] = 4096,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, of one thread each.")] = 2,
) -> None:
    """The small forms of recipes side by side: held-out losses, and a linear probe against untrained weights."""
    from launcher.bench.recipes import RECIPES, bench_recipes, prepare, render

    names = recipe or list(RECIPES)
    prepare(texts, out, vocabulary, names)
    equal_tokens, equal_time = bench_recipes(
        names, seeds, tokens, cpu_seconds, out, task, data, processes, lambda line: typer.echo(line, err=True)
    )
    typer.echo(render(f"At about {tokens:,} tokens", equal_tokens))
    typer.echo()
    typer.echo(render(f"At about {cpu_seconds:,.0f} CPU seconds", equal_time))
