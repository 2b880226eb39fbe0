"""The `maskfleet` command. Each subcommand has a file in this folder; the help shows them in groups.

Subcommands import packages only when they run: `maskfleet --help` must not wait for torch, Ray or DeepSpeed.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.main
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from data_service.errors import UserError as DataError
from data_service.limits import check_process_limits
from data_service.printable import escape_controls, mask_secrets
from data_service.processes import temporary_root
from encoder_core.errors import UserError as ModelError
from launcher.app.cli import (
    certificate,
    checkpoints,
    corpus,
    demo,
    diagnose,
    doctor,
    embed,
    estimate,
    evaluate,
    fill,
    finetune,
    launch,
    recipe,
    runs,
    tasks,
    tokenizer,
    train,
)
from launcher.command import COMMANDS_WITH_SIGNAL_HANDLERS, needs_supervision, open_terminal_stream
from launcher.exit_codes import exit_code_for
from launcher.output import raise_output_errors
from launcher.progress import show_progress

_HELP = """
Pretrain encoder-only language models on clusters, from raw text to an exported model.

A run goes through four commands, each of which may be repeated safely:

    maskfleet tokenizer train books/ --out bpe-50k/
    maskfleet corpus build books/ --tokenizer bpe-50k/ --out s3://bucket/books
    maskfleet init roberta-base s3://bucket/runs/base --corpus s3://bucket/books
    maskfleet train s3://bucket/runs/base

`train` starts the run, or continues it after any interruption. Local paths and URIs (s3://, gs://, az://) work alike.
"""


class _HintingGroup(TyperGroup):
    """A command group whose errors say where a misplaced subcommand or setting belongs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            groups = [name for name, one in self.commands.items() if args[0] in getattr(one, "commands", ())]
            if groups and hasattr(error, "message"):
                found = " or ".join(f"maskfleet {name} {args[0]}" for name in groups)
                asked = error.message.partition(" Did you mean")[0]  # without Typer's suggestion
                error.message = f"{asked.rstrip('.')}: it is {found}"
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            context = getattr(error, "ctx", None)
            if context is not None and hasattr(error, "option_name") and hasattr(error, "message"):
                settings = next((one for one in context.command.params if "--set" in one.opts), None)
                if settings is not None:
                    error.message = f"{error.message.rstrip('.')}. Settings are given by --set: {settings.help}"
            raise


app = typer.Typer(
    cls=_HintingGroup,
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        typer.echo(f"maskfleet {metadata.version('maskfleet')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and exit."),
    ] = False,
) -> None:
    """Options that come before the command."""


_PREPARE, _TRAIN, _MAINTENANCE, _USE = "Prepare", "Train", "Look after it", "Use it"  # headings of the help's groups
_AFTER = "After pretraining"
app.command(rich_help_panel=_PREPARE)(demo.demo)
app.add_typer(tokenizer.group, name="tokenizer", rich_help_panel=_PREPARE)
app.add_typer(corpus.group, name="corpus", rich_help_panel=_PREPARE)
app.add_typer(recipe.group, name="recipe", rich_help_panel=_PREPARE)
app.add_typer(tasks.group, name="tasks", rich_help_panel=_PREPARE)
app.command(rich_help_panel=_PREPARE)(estimate.estimate)
app.command(rich_help_panel=_TRAIN)(train.init)
app.command(rich_help_panel=_TRAIN)(train.train)
app.command(rich_help_panel=_MAINTENANCE)(train.show)
app.command(rich_help_panel=_MAINTENANCE)(train.report)
app.add_typer(launch.group, name="launch", rich_help_panel=_TRAIN)
app.add_typer(runs.group, name="runs", rich_help_panel=_MAINTENANCE)
runs.group.command()(certificate.certify)
runs.group.command()(certificate.verify)
app.add_typer(checkpoints.group, name="checkpoints", rich_help_panel=_MAINTENANCE)
app.add_typer(embed.group, name="embed", rich_help_panel=_USE)
app.command(rich_help_panel=_MAINTENANCE)(diagnose.diagnose)
app.command(rich_help_panel=_MAINTENANCE)(doctor.doctor)
app.command(rich_help_panel=_MAINTENANCE)(doctor.preflight)
app.command(rich_help_panel=_MAINTENANCE)(fill.fill)
app.command("finetune", rich_help_panel=_AFTER)(finetune.fine_tune)
app.command(rich_help_panel=_AFTER)(evaluate.evaluate)


def main() -> None:
    """Run the command line. Our own errors are printed without a traceback; the exit code is 2 for a user's mistake,
    and 75 for an error that may pass (`launcher.exit_codes`)."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # CUDA numbers GPUs as nvidia-smi does
    _install_warning_handler()
    command = typer.main.get_command(app)
    try:
        with show_progress(_command_words(command, sys.argv[1:])), raise_output_errors():
            _run_command(command)
    except (DataError, ModelError) as error:
        console = Console(stderr=True, soft_wrap=True)
        problem, remedy = (escape_controls(mask_secrets(text)) for text in (error.problem, error.remedy))
        console.print(Text("error: ", style="bold red") + Text(problem, style="default"))
        console.print(Text("remedy: ", style="bold") + Text(remedy, style="default"))
        sys.exit(exit_code_for(error))
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library `tokenizers` raises it; it is no `Exception`
            raise
        print(
            f"error: a tokenizer's rules cannot be applied to a text: {escape_controls(str(error))}",
            file=sys.stderr,
        )
        print("remedy: give the tokenizer.json that was published with the model", file=sys.stderr)
        sys.exit(2)


def _run_command(command: Callable[[], object]) -> None:
    """Run the command. Raises EnvironmentUnusable if a process limit or TMPDIR explains a failure."""
    if needs_supervision(sys.argv[1:]):
        temporary_root()
        if sys.argv[1] in COMMANDS_WITH_SIGNAL_HANDLERS:  # not for `corpus` commands, which can run without Ray
            check_process_limits()
    try:
        command()
    except (DataError, ModelError):
        raise
    except Exception:
        check_process_limits()
        temporary_root()
        raise


def _command_words(command: Any, words: list[str]) -> str:
    """Return the first `words` of a command line, those that name the command and its subcommand."""
    found = []
    for word in words:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
        found.append(word)
    return " ".join(found) or "maskfleet"


def _install_warning_handler() -> None:
    """Print warnings of the store and of commands to standard error, one line each."""
    handler = logging.StreamHandler(open_terminal_stream(2))
    handler.setLevel(logging.WARNING)
    for name in (
        "data_service.store",
        "launcher.runtime.recipe.load",
        "launcher.runtime.run.record",
        "launcher.observe.inspect.baselines",
        "launcher.after.tasks",
    ):
        logging.getLogger(name).addHandler(handler)
