"""`maskfleet runs certify` and `maskfleet runs verify`: the certificate of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.options import JsonOption, RunArgument, print_json, require_run

if TYPE_CHECKING:
    from launcher.after.certificate.examine import CertificateCheck

KeyOption = Annotated[Path | None, typer.Option("--key", metavar="PEM", help="Private Ed25519 key for a signature.")]
PublicKeyOption = Annotated[
    Path | None, typer.Option("--public-key", metavar="PEM", help="Ed25519 key to verify the signature.")
]


def certify(run: RunArgument, key: KeyOption = None) -> None:
    """Write a certificate into a run: a chain of digests of all stored files of the run.

    A later certificate continues the existing one. If files that must not change have changed since then, nothing is
    written, and the exit code is 1.

    Example: `maskfleet runs certify s3://bucket/runs/base --key key.pem`
    """
    require_run(run)
    from launcher.after.certificate.chain import read_key
    from launcher.after.certificate.examine import certify as write

    certificate, found = write(run, None if key is None else read_key(key, "private"))
    _print_check(found)
    if certificate is None:
        raise typer.Exit(1)
    typer.echo(f"certificate {certificate.digest}, {len(certificate.chain):,} links")


def verify(run: RunArgument, public_key: PublicKeyOption = None, as_json: JsonOption = False) -> None:
    """Compare every byte of a run with its certificate, and name the place of each change.

    The exit code is 1 if anything has changed, or if there is no certificate.

    Example: `maskfleet runs verify s3://bucket/runs/base --public-key public.pem`
    """
    require_run(run)
    from launcher.after.certificate.chain import read_key
    from launcher.after.certificate.examine import compare_with_certificate, read_certificate

    known = read_certificate(run, None if public_key is None else read_key(public_key, "public"))
    if known is None:
        typer.echo("no certificate: maskfleet runs certify RUN writes one", err=True)
        raise typer.Exit(1)
    found = compare_with_certificate(run, known)
    if as_json:
        problems = [{"place": place, "what": what} for place, what in found.problems]
        print_json([{"certificate": known.digest, "problems": problems, "notes": found.notes}])
    else:
        _print_check(found)
        typer.echo(f"certificate {known.digest}")
    if found.problems:
        raise typer.Exit(1)


def _print_check(found: "CertificateCheck") -> None:
    for line in (*found.notes, *(f"{place}: {what}" for place, what in found.problems)):
        typer.echo(line)
