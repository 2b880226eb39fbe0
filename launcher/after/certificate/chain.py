"""The certificate of a run: a chain of digests of what its store keeps.

    {"format": 2, "chain": [{"what": "run.json", "sha256": ["..."], "digest": "..."}, ...]}

A link holds the SHA-256 of every 4 MiB of an object, or of every segment of an attempt's log, and its `digest` covers
the link before it. So the last digest stands for everything. A later certificate of the run appends links, and still
holds the digests of the earlier ones.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from data_service.formats import NEWER_REMEDY, is_newer, newer_text, parse_json
from launcher.errors import CertificateError

CERTIFICATE = "certificate.json"  # key in the run's store
CHUNK_BYTES = 4 << 20

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digests = tuple[Sha256, ...]
"""Digests of an object's chunks of `CHUNK_BYTES`, or of a log's segments, which may be packed later, in order."""


class _Strict(BaseModel, frozen=True, extra="forbid"): ...


class Link(_Strict, frozen=True):
    """A link of the chain. `what`: key of the object, or prefix of the log; its newest link holds."""

    what: str
    sha256: Digests
    digest: Sha256


class Certificate(_Strict, frozen=True):
    format: Literal[2] = 2
    chain: Annotated[tuple[Link, ...], Field(min_length=1)]

    @property
    def digest(self) -> str:
        """The digest of the last link, which stands for the whole certificate."""
        return self.chain[-1].digest

    @property
    def newest(self) -> dict[str, Digests]:
        return {link.what: link.sha256 for link in self.chain}


def extend_chain(former: Certificate | None, found: Mapping[str, Digests]) -> Certificate:
    """Return the certificate of what was found, which continues `former`, an earlier one of the run. What is no longer
    there gets a link without digests."""
    chain = list(former.chain) if former else []
    known = former.newest if former else {}
    for what in sorted({*known, *found}):
        digests = found.get(what, ())
        if known.get(what) != digests:
            digest = _link_digest(chain[-1].digest if chain else "", what, digests)
            chain.append(Link(what=what, sha256=digests, digest=digest))
    return Certificate(chain=tuple(chain))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def encode(certificate: Certificate) -> bytes:
    return _canonical(certificate.model_dump()) + b"\n"


def decode(data: bytes, where: str) -> Certificate:
    """Return the certificate in `data`, the bytes of `where`, after checking its chain.

    Raises CertificateError: it was changed after it was written, is no certificate, or of another version.
    """
    try:
        certificate = Certificate.model_validate(parse_json(data))
    except ValueError as error:
        if is_newer(data, 2, error if isinstance(error, ValidationError) else None):
            raise CertificateError(newer_text(where), remedy=NEWER_REMEDY) from error
        raise _damaged(where, "a field is missing or wrong") from error
    before = ""
    for number, link in enumerate(certificate.chain):
        if _link_digest(before, link.what, link.sha256) != link.digest:
            raise _damaged(where, f"link {number} of its chain ({link.what}) does not match its digest")
        before = link.digest
    if encode(certificate) != data:
        raise _damaged(where, "it is not written as maskfleet writes it")
    return certificate


def _link_digest(before: str, what: str, digests: Digests) -> str:
    return sha256(_canonical([before, what, digests]))


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _damaged(where: str, reason: str) -> CertificateError:
    return CertificateError(
        f"{where} is no whole certificate of this version: {reason}",
        remedy="move it away, and maskfleet runs certify RUN writes a new one; "
        "a certificate of a version before 0.3.0 is read by maskfleet 0.2.0",
    )
