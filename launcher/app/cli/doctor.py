"""`maskfleet doctor` and `maskfleet preflight`: check this machine, or a node for a run, before a long run begins."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.options import JsonOption, print_json, refuse_without_effect, require_run_or_recipe

if TYPE_CHECKING:
    from rich.table import Table

    from launcher.runtime.preflight.findings import Finding
    from launcher.runtime.preflight.kernels import KernelVerdict


def doctor(
    stores: Annotated[
        list[str] | None,
        typer.Argument(help="Folders or URIs (s3://, gs://, az://) that a run will read or write."),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Test only the attention kernels here, and print a table for a bug report."),
    ] = False,
    imports: Annotated[
        bool,
        typer.Option("--imports", help="Also measure what a rank imports: how long it takes, and from where."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: versions, cores, memory, shared memory, GPUs, limits, ports, clock, and stores.

    A store is tested with a small object, which is removed again. Exit code 1 if any finding would stop a run.

    Example: `maskfleet doctor s3://bucket/runs`
    """
    from launcher.output import print_table
    from launcher.runtime.preflight.doctor import examine_machine

    if gpu:
        refuse_without_effect("--gpu", {"STORES": stores, "--imports": imports})
        _check_kernels(as_json)
        return
    findings = list(examine_machine(stores or [], imports=imports))
    if as_json:
        print_json(vars(finding) for finding in findings)
    else:
        print_table(findings_table(findings))
    if any(finding.verdict == "failure" for finding in findings):
        raise typer.Exit(1)


def _check_kernels(as_json: bool) -> None:
    """Compare every attention kernel with a reference computation, and time it on a GPU.

    Without a GPU, the CPU's kernels are compared, and a finding says so.
    """
    import torch

    from launcher.output import print_table
    from launcher.runtime.preflight.findings import missing_gpu_finding
    from launcher.runtime.preflight.kernels import examine_attention_forms

    found = list(examine_attention_forms())
    if as_json:
        print_json({"recipe": name} | verdict.model_dump(mode="json") for name, verdict in found)
    else:
        print_table(_kernel_table(found))
        if not torch.cuda.is_available():
            print_table(findings_table([missing_gpu_finding(torch.__version__, torch.version.cuda)]))
    if any(one.failure or not one.right for _, verdict in found for one in verdict.tried):
        raise typer.Exit(1)


def _kernel_table(verdicts: "Iterable[tuple[str, KernelVerdict]]") -> "Table":
    from rich.table import Table

    table = Table("", "network", "kernel", "dropout", "gradients off", "may be", "ms", box=None, pad_edge=False)
    for name, verdict in verdicts:
        for one in verdict.tried:
            table.add_row(
                "[green]right[/]" if one.right else "[red]WRONG[/]",
                name,
                one.kernel,
                "yes" if one.dropped else "",
                one.failure or ("-" if one.error is None else f"{one.error:.1e}"),
                f"{one.bound:.1e}",
                "" if one.seconds is None else f"{1e3 * one.seconds:.2f}",
            )
    return table


def findings_table(findings: "Iterable[Finding]") -> "Table":
    """Return findings as a table for a person."""
    from rich.table import Table

    table = Table("", "check", "found", "remedy", box=None, pad_edge=False)
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failure": "[red]FAILURE[/]"}
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.what, finding.found, finding.remedy)
    return table


def preflight(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[RUN|RECIPE]", help="The run that will train here, or the recipe of a future run."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this node as `train` does before it begins: memory, /dev/shm, limits, GPUs, stores, clock, disk space.

    Takes three seconds at most. Exit code 1 if ranks could not run on this node.

    Example: `maskfleet preflight s3://bucket/runs/base`
    """
    if target is not None:
        require_run_or_recipe(target)
    from launcher.output import print_table
    from launcher.runtime.preflight.findings import worst_verdict
    from launcher.runtime.preflight.measure import raise_open_files, read_subject, run_checks
    from launcher.runtime.recipe.summary import has_automatic_microbatch

    raise_open_files()
    what = read_subject(target) if target is not None else None
    findings = run_checks(what)
    if what is not None and has_automatic_microbatch(what.recipe):
        from launcher.runtime.rank.microbatch_size import microbatch_finding

        findings.append(microbatch_finding(what.recipe))
    if as_json:
        print_json(vars(finding) for finding in findings)
    else:
        print_table(findings_table(findings))
    if worst_verdict(findings) == "failure":
        raise typer.Exit(1)
