"""The certificate of a run: an in-toto statement whose predicate is a chain of digests.

    {"_type": "https://in-toto.io/Statement/v1",
     "subject": [{"name": "checkpoints/step-00000800-a000001/manifest.json", "digest": {"sha256": "..."}}, ...],
     "predicateType": "urn:maskfleet:certificate:v1",
     "predicate": {"run": ..., "chunk": 4194304, "chain": [...], "files": {...}, "segments": {...}}}

A link of the chain states facts about one thing (the record of the run, a corpus, a start, a commit ...), and its
digest covers the link before it. So the last digest stands for everything. A later certificate of the same run keeps
the links of the former one and appends what is new. Format of the statement: in-toto attestation framework, v1
(https://github.com/in-toto/attestation).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
)

from checkpoints.layout import CheckpointName
from data_service.formats import REMEDY, foreign_json, newer
from launcher.errors import CertificateError

CERTIFICATE = "certificate.json"
"""Key of the certificate in the run's store."""

TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PREDICATE: Literal["urn:maskfleet:certificate:v1"] = "urn:maskfleet:certificate:v1"
CHUNK = 4 << 20  # bytes of a file that one digest covers: damage is named by this range

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Facts = dict[str, JsonValue]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Digest(_Strict):
    """A digest set of in-toto, with one algorithm."""

    sha256: Sha256


class Subject(_Strict):
    """A thing that the statement is about: its name, and its digest."""

    name: str
    digest: Digest


class Link(_Strict):
    """A link of the chain.

    Attributes:
        what: what the facts are about. The newest link about a thing holds.
        facts: the facts.
        digest: `link_digest` of the link before, `what` and `facts`.
    """

    what: str
    facts: Facts
    digest: Sha256


class CertifiedFile(_Strict):
    """An object of the run's store. `size`: in bytes; `sha256`: digest of every `CHUNK` bytes, in order."""

    size: NonNegativeInt
    sha256: tuple[Sha256, ...]


class Predicate(_Strict):
    """What the statement says.

    Attributes:
        run: name of the run.
        chunk: number of bytes that a digest of `files` covers.
        chain: the links. The last one holds the digest of `files` and `segments`.
        files: the objects of the run's store by key, without segments of the log and the ranks' files of checkpoints,
            whose hashes are in the checkpoints' manifests.
        segments: digest of every segment of the log in order, by its prefix, whether it is packed or not.
    """

    run: str
    chunk: Literal[4194304] = 4194304
    chain: Annotated[tuple[Link, ...], Field(min_length=1)]
    files: dict[str, CertifiedFile]
    segments: dict[str, tuple[Sha256, ...]]


class Statement(_Strict):
    """The whole certificate."""

    kind: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[Subject, ...]
    predicate_type: Literal["urn:maskfleet:certificate:v1"] = Field(alias="predicateType")
    predicate: Predicate

    @property
    def digest(self) -> str:
        """The digest of the last link, which stands for the whole certificate."""
        return self.predicate.chain[-1].digest

    @property
    def newest(self) -> dict[str, Facts]:
        """The facts that hold, by what they are about."""
        return {link.what: link.facts for link in self.predicate.chain}


FILES = "files"  # the last link: what `files` and `segments` hold


def certified(
    run: str,
    entries: Iterable[tuple[str, Facts]],
    files: dict[str, CertifiedFile],
    segments: dict[str, tuple[Sha256, ...]],
    *,
    former: Statement | None,
) -> Statement:
    """Return the certificate of these facts.

    Args:
        run: name of the run.
        entries: facts, and what they are about, in order.
        files, segments: as in `Predicate`.
        former: an earlier certificate of the run. Its links are kept; entries that hold there are not repeated.
    """
    chain = list(former.predicate.chain) if former else []
    known = former.newest if former else {}
    listed: Facts = {"sha256": _contents(files, segments)}
    new = [(what, facts) for what, facts in entries if known.get(what) != facts]
    if new or known.get(FILES) != listed:
        for what, facts in (*new, (FILES, listed)):
            before = chain[-1].digest if chain else ""
            chain.append(Link(what=what, facts=facts, digest=link_digest(before, what, facts)))
    predicate = Predicate(run=run, chain=tuple(chain), files=files, segments=segments)
    return Statement(_type=TYPE, subject=subjects(run, chain), predicateType=PREDICATE, predicate=predicate)


def link_digest(before: str, what: str, facts: Mapping[str, JsonValue]) -> str:
    """Return the digest of a link: the sha256 of the digest before it ("" for the first), `what` and `facts`."""
    return sha256(canonical([before, what, dict(facts)]))


def canonical(value: object) -> bytes:
    """Return JSON without white space, keys sorted: the same bytes for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(data: bytes | memoryview) -> str:
    """Return the SHA-256 of `data`, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def encode(statement: Statement) -> bytes:
    """Return the bytes of the certificate: canonical JSON and the end of a line."""
    return canonical(statement.model_dump(mode="json", by_alias=True)) + b"\n"


def decode(data: bytes, where: str) -> Statement:
    """Return the certificate in `data`, the bytes of `where`, after checking that its chain is whole.

    Raises CertificateError: it is no certificate, was changed after it was written, or is of a newer version.
    """
    try:
        content = foreign_json(data)
        statement = Statement.model_validate(content)
    except ValidationError as error:
        if _is_newer(content):
            raise CertificateError(newer(where), remedy=REMEDY) from error
        first = error.errors(include_url=False)[0]
        raise _changed(where, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:
        raise _changed(where, str(error)) from error
    for problem in _flaws(statement, data):
        raise _changed(where, problem)
    return statement


def _is_newer(content: object) -> bool:
    kind = content.get("predicateType") if isinstance(content, dict) else None
    found = re.fullmatch(PREDICATE.removesuffix("1") + r"(\d+)", str(kind))
    return found is not None and int(found[1]) > 1


def _flaws(statement: Statement, data: bytes) -> Iterator[str]:
    before, predicate = "", statement.predicate
    for number, link in enumerate(predicate.chain):
        if link_digest(before, link.what, link.facts) != link.digest:
            yield f"link {number} of its chain ({link.what}) does not match its digest"
        before = link.digest
    last = predicate.chain[-1]
    if last.what != FILES or last.facts != {"sha256": _contents(predicate.files, predicate.segments)}:
        yield "its list of files does not match the digest in the last link of its chain"
    if statement.subject != subjects(predicate.run, predicate.chain):
        yield "its subjects are not those of its chain"
    if encode(statement) != data:
        yield "it is not written as maskfleet writes it"


def _contents(files: Mapping[str, CertifiedFile], segments: Mapping[str, tuple[str, ...]]) -> str:
    listed = {key: [file.size, *file.sha256] for key, file in files.items()}
    return sha256(canonical([listed, segments]))


COMMIT = "commit of step "  # what the links of commits are about: with the step, and the attempt


def name_of_commit(mark: CheckpointName) -> str:
    """Return what the link of a commit is about."""
    return f"{COMMIT}{mark.step}, attempt {mark.attempt}"


def subjects(run: str, chain: Iterable[Link]) -> tuple[Subject, ...]:
    """Return the subjects of a chain: the weights of every commit, and the run with the digest of the last link."""
    links = list(chain)
    newest = {link.what: link.facts for link in links}
    weights = [
        Subject(name=f"weights of {run}, {what}", digest=Digest(sha256=str(facts["weights"])))
        for what, facts in newest.items()
        if what.startswith(COMMIT)
    ]
    return (Subject(name=run, digest=Digest(sha256=links[-1].digest)), *weights)


def _changed(where: str, reason: str) -> CertificateError:
    return CertificateError(
        f"{where} is no whole certificate: {reason}",
        remedy="compare it with a copy that you keep elsewhere; maskfleet runs certify RUN writes a new one",
    )
