"""`maskfleet embed`: trains sentence embeddings from a checkpoint, and measures them."""

from contextlib import AbstractContextManager
from typing import Annotated

import typer

from launcher.app.cli.corpus_options import PositiveFieldOption, QueryFieldOption
from launcher.app.cli.long_commands import show_logs
from launcher.app.cli.options import (
    DataOption,
    InputsArgument,
    JsonOption,
    LicenceOption,
    StepOption,
    print_json,
    require_model,
)
from launcher.progress import work

group = typer.Typer(no_args_is_help=True, help="Train and measure sentence embeddings (Sentence-BERT).")

_ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run, or a folder in the transformers or SentenceTransformer format.")
]
_PoolingOption = Annotated[
    str | None,
    typer.Option("--pooling", help="cls, mean, weighted_mean, last_token, max; default: the folder's, or mean."),
]
_MaxLengthOption = Annotated[int | None, typer.Option("--max-length", help="Most tokens of a text. Default: model's.")]
_BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Texts per batch.")]


@group.command()
def train(
    model: _ModelArgument,
    settings: Annotated[
        str, typer.Argument(metavar="SETTINGS", help="A YAML file of settings, or bundled ones: nli, stsb, pairs.")
    ],
    out: Annotated[str, typer.Option("--out", help="Folder or s3:// URI for the trained model.")],
    data: DataOption = None,
    step: StepOption = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one of the settings.")
    ] = None,
    licence: LicenceOption = None,
) -> None:
    """Train sentence embeddings, and export the folder that `SentenceTransformer(...)` loads.

    Sentence-BERT's two steps: `maskfleet embed train RUN nli --data glue/ --out nli-model`, then `maskfleet embed train
    nli-model stsb --data glue/ --out sts-model`.
    """
    from launcher.after.embed.settings import load_settings

    training = load_settings(settings, assignments or [], data)
    require_model(model)
    with work("loading libraries"):
        from checkpoints.hf.folder import replaceable_files
        from data_service.store.open import open_store
        from launcher.after.embed.train import export_embeddings, train_embeddings
        from launcher.after.finetune.pretrained import open_pretrained

    with show_logs("launcher.after.embed"), _quiet_libraries():
        replaceable_files(open_store(out))  # raises ExportError before hours of training
        with open_pretrained(model, step) as pretrained:
            trained = train_embeddings(pretrained, training)
            export_embeddings(trained, pretrained, training, out, licence)
    typer.echo(f"trained {trained.steps:,} steps on {trained.rows:,} rows; exported to {out}")
    for name, value in trained.dev.items():
        typer.echo(f"  {name.replace('_', ' ')}: {100 * value:.2f} (x 100)")


@group.command("eval")
def evaluate(
    model: _ModelArgument,
    tasks: Annotated[
        list[str],
        typer.Argument(metavar="TASK...", help="Tasks of the kinds similarity, pair regression and retrieval."),
    ],
    data: DataOption = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="Split of the tasks; default: dev if there is one, else test."),
    ] = None,
    step: StepOption = None,
    pooling: _PoolingOption = None,
    max_length: _MaxLengthOption = None,
    batch: _BatchOption = 32,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's vectors: STS by rank correlation, retrieval by nDCG@10, MRR and recall.

    Nothing is downloaded. `maskfleet tasks list` says which tasks there are and where their files are published.
    """
    from rich.table import Table

    from launcher.after.embed.settings import EncodingSettings
    from launcher.after.tasks.task import load_task
    from launcher.app.cli.options import validate_options as checked
    from launcher.output import print_table

    checked(EncodingSettings, pooling=pooling, max_length=max_length)
    chosen = [load_task(name, data) for name in tasks]
    require_model(model)
    with work("loading libraries"):
        from launcher.after.embed.evaluate import VectorMeasureSettings, measure_checkpoint_vectors
        from launcher.after.finetune.pretrained import open_pretrained
    cell = checked(VectorMeasureSettings, split=split, pooling=pooling, max_length=max_length, batch=batch)
    table = Table("task", "split", "metric", "x 100", box=None, pad_edge=False)
    with show_logs("launcher.after.embed"), _quiet_libraries(), open_pretrained(model, step) as pretrained:
        for task in chosen:
            where = cell.split or ("dev" if "dev" in task.splits else "test")
            metrics = measure_checkpoint_vectors(pretrained, task, cell)
            if as_json:
                found = {"model": model, "step": pretrained.step, "task": task.name, "split": where}
                print_json([{**found, "metrics": metrics}])
            for name, value in metrics.items():
                table.add_row(task.name, where, name, f"{100 * value:.2f}")
    if not as_json:
        print_table(table)


@group.command()
def negatives(
    model: _ModelArgument,
    inputs: InputsArgument,
    out: Annotated[str, typer.Option("--out", help="File or s3:// URI (.jsonl) for the pairs; it must not exist.")],
    count: Annotated[int, typer.Option("--negatives", min=1, help="Negatives per pair.")] = 1,
    share: Annotated[
        float, typer.Option("--share", help="Largest cosine of a negative, as a share of the positive's cosine.")
    ] = 0.95,
    query_field: QueryFieldOption = None,
    positive_field: PositiveFieldOption = None,
    step: StepOption = None,
    pooling: _PoolingOption = None,
    max_length: _MaxLengthOption = None,
    batch: _BatchOption = 32,
) -> None:
    """Add hard negatives to pairs of texts: positives of other pairs that MODEL finds similar to the query.

    Example: `maskfleet embed negatives RUN pairs.jsonl --negatives 1 --out mined.jsonl`, then `maskfleet corpus build
    mined.jsonl --texts pairs --negatives 1 ...` for a run that continues from RUN.
    """
    from data_service.ingest.options import BuildOptions
    from launcher.after.embed.settings import MiningSettings
    from launcher.app.cli.options import validate_options as checked
    from launcher.app.cli.texts import list_text_files

    mining = checked(MiningSettings, negatives=count, share=share, pooling=pooling, max_length=max_length, batch=batch)
    fields = {"query": query_field, "positive": positive_field}
    pairs = {name: value for name, value in fields.items() if value is not None}
    options = checked(BuildOptions, pairs=pairs)
    listing = list_text_files(inputs)
    require_model(model)
    with work("loading libraries"):
        from launcher.after.embed.model import load_model
        from launcher.after.embed.negatives import (
            mine_negatives,
            read_pair_examples,
            require_new_file,
            write_pair_examples,
        )
        from launcher.after.finetune.pretrained import open_pretrained

    with show_logs("launcher.after.embed"), _quiet_libraries():
        require_new_file(out)
        examples = read_pair_examples(listing, options)
        with open_pretrained(model, step) as pretrained:
            found = mine_negatives(load_model(pretrained, mining), examples, mining)
        write_pair_examples(found, out)
    typer.echo(f"{len(found):,} pairs, negatives per pair: {count}; written to {out}")


@group.command("settings")
def show_settings(
    name: Annotated[str, typer.Argument(metavar="NAME", help="nli, stsb or pairs.")],
) -> None:
    """Print bundled settings, as a template for your own file."""
    from launcher.after.embed.settings import read_bundled_settings

    typer.echo(read_bundled_settings(name), nl=False)


def _quiet_libraries() -> AbstractContextManager[None]:
    """Return a context in which transformers and its libraries print nothing. Raises MissingPackage."""
    from launcher.after.finetune.model import silence_transformers
    from launcher.errors import EVALUATE_EXTRA, import_optional

    import_optional("sentence_transformers", "maskfleet embed", EVALUATE_EXTRA)
    return silence_transformers("maskfleet embed")
