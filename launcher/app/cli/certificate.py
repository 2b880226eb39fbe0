"""`maskfleet runs certify` and `maskfleet runs verify`: the certificate of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.options import JsonOption, RunArgument, print_json, require_run
from launcher.app.cli.runs import group

if TYPE_CHECKING:
    from launcher.after.certificate.examine import Examination
    from launcher.after.certificate.retrain import Retrained
    from launcher.progress import Work

_CorporaOption = Annotated[
    list[str] | None,
    typer.Option(
        "--corpus",
        metavar="NAME=URI",
        help="Where a source's corpus lies now, if it was moved. May be repeated.",
    ),
]
_CertificateOption = Annotated[
    Path | None,
    typer.Option(
        "--certificate", metavar="FILE", help="A certificate that you keep elsewhere. Default: the run's own."
    ),
]
_PublicKeyOption = Annotated[
    Path | None,
    typer.Option("--public-key", metavar="PEM", help="Public Ed25519 key by which it must be signed."),
]


def register(app: typer.Typer) -> None:
    group.command()(certify)
    group.command()(verify)


def certify(
    run: RunArgument,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="PEM", help="Private Ed25519 key that signs the certificate."),
    ] = None,
    corpora: _CorporaOption = None,
) -> None:
    """Verify a run, and write its certificate into it: a chain of digests of its record, corpora, tokenizer, starts,
    commits and log, as an in-toto statement.

    A later certificate continues the one that is there. With problems nothing is written, and the code is 1.

    Example: `maskfleet runs certify s3://bucket/runs/base --key key.pem`
    """
    require_run(run)
    moved = _moved(corpora or ())
    from launcher.after.certificate.certify import certify as write
    from launcher.after.certificate.signature import read_private_key
    from launcher.progress import BYTES, work

    private = None if key is None else read_private_key(key)
    with work("verifying", unit=BYTES) as now:
        statement, found = write(run, key=private, corpora=moved, begin=_begin(now))
    for line in _described(found):
        typer.echo(line)
    if statement is None:
        raise typer.Exit(1)
    typer.echo(f"certificate {statement.digest}, {len(statement.predicate.chain)} links")


def verify(
    run: RunArgument,
    certificate: _CertificateOption = None,
    public_key: _PublicKeyOption = None,
    corpora: _CorporaOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Of checkpoints and corpora the sizes only, not every byte.")
    ] = False,
    again: Annotated[
        int,
        typer.Option(
            "--retrain",
            min=0,
            metavar="STEPS",
            help="Also train so many steps again, and compare them bit for bit.",
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Check every byte of a run and of its corpora, and name the place of each change. Exit code 1 if one is found.

    Without a certificate, what has no hash of its own (the log, the record, the recipe) is not checked.

    `--retrain 50` trains 50 steps after a commit drawn at random, in a temporary folder, by as many ranks as trained
    it. On a GPU they are equal with the recipe's `deterministic: true`.

    Example: `maskfleet runs verify s3://bucket/runs/base --public-key public.pem`
    """
    require_run(run)
    moved = _moved(corpora or ())
    from launcher.after.certificate.examine import examine
    from launcher.after.certificate.signature import read_public_key
    from launcher.after.certificate.stored import certificate_of, given_certificate
    from launcher.progress import BYTES, work

    key = None if public_key is None else read_public_key(public_key)
    known = certificate_of(run, key) if certificate is None else given_certificate(certificate, key)
    with work("verifying", unit=BYTES) as now:
        found = examine(run, known, corpora=moved, quick=quick, begin=_begin(now))
    trained = _retrained(run, again) if again and not found.problems else None
    wrong = bool(found.problems) or (trained is not None and bool(trained.differences))
    digest = None if known is None else known.digest
    if as_json:
        print_json([_as_record(found, trained, digest)])
    for line in () if as_json else (*_described(found), *_compared(trained), _named(digest)):
        typer.echo(line)
    if wrong:
        raise typer.Exit(1)


def _named(digest: str | None) -> str:
    return f"certificate {digest}" if digest else "no certificate: maskfleet runs certify RUN writes one"


def _moved(corpora: "list[str] | tuple[str, ...]") -> dict[str, str]:
    found = {}
    for text in corpora:
        name, equals, uri = text.partition("=")
        if not (name and equals and uri):
            raise typer.BadParameter(
                f"{text!r} is not NAME=URI, as in news=s3://bucket/news", param_hint="--corpus"
            )
        found[name] = uri
    return found


def _begin(now: "Work") -> Callable[[str, int], Callable[[int], None]]:
    def begin(name: str, size: int) -> Callable[[int], None]:
        now.begin(name, size)
        return now.advance

    return begin


def _retrained(run: str, steps: int) -> "Retrained":
    from random import Random

    from launcher.after.certificate.retrain import retrain
    from launcher.progress import work
    from launcher.runtime.run.record import open_run

    with work(f"training {steps:,} steps again"):
        return retrain(open_run(run), steps, Random())


def _described(found: "Examination") -> list[str]:
    from launcher.output import human_bytes

    read = f"{len(found.files):,} files, {sum(map(len, found.segments.values())):,} segments of the log"
    lines = [
        f"{len(found.commits):,} commits, {len(found.corpora):,} corpora, {read}: {human_bytes(found.bytes)} compared",
        *found.notes,
    ]
    return [*lines, *(f"{problem.place}: {problem.what}" for problem in found.problems)]


def _compared(trained: "Retrained | None") -> list[str]:
    if trained is None:
        return []
    steps = f"steps {trained.first:,} to {trained.stop - 1:,}, trained again by {trained.ranks} ranks"
    equal = (
        "are equal bit for bit"
        if not trained.differences
        else f"differ in {len(trained.differences):,} steps"
    )
    return [f"{steps}, {equal}", *trained.differences]


def _as_record(found: "Examination", trained: "Retrained | None", digest: str | None) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "certificate": digest,
        "problems": [asdict(problem) for problem in found.problems],
        "notes": found.notes,
        "commits": found.commits,
        "corpora": found.corpora,
        "bytes": found.bytes,
        "retrained": None if trained is None else asdict(trained),
    }
