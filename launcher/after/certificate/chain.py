"""The certificate of a run: a chain of digests of what its store keeps.

    {"format": 2, "chain": [{"what": "run.json", "sha256": ["..."], "digest": "..."}, ...]}

A link holds the SHA-256 of every 4 MiB of an object, or of every segment of an attempt's log, and its `digest` covers
the link before it. So the last digest stands for everything. A later certificate of the run appends links, and still
holds the digests of the earlier ones.

Its signature is Ed25519 over its bytes, 64 bytes that `openssl pkeyutl -verify -rawin` checks too.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from data_service.formats import NEWER_REMEDY, is_newer, newer_version_message, parse_json
from launcher.errors import CertificateError, import_optional

CERTIFICATE_KEY = "certificate.json"  # key in the run's store
CHUNK_BYTES = 4 << 20

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digests = tuple[Sha256, ...]
"""Digests of an object's chunks of `CHUNK_BYTES`, or of a log's segments, which may be packed later, in order."""


class _Strict(BaseModel, frozen=True, extra="forbid"): ...


class ChainLink(_Strict, frozen=True):
    """A link of the chain. `what`: key of the object, or prefix of the log; its newest link holds."""

    what: str
    sha256: Digests
    digest: Sha256


class Certificate(_Strict, frozen=True):
    format: Literal[2] = 2
    chain: Annotated[tuple[ChainLink, ...], Field(min_length=1)]

    @property
    def digest(self) -> str:
        """The digest of the last link, which stands for the whole certificate."""
        return self.chain[-1].digest

    @property
    def newest_digests(self) -> dict[str, Digests]:
        return {link.what: link.sha256 for link in self.chain}


def extend_chain(previous: Certificate | None, object_digests: Mapping[str, Digests]) -> Certificate:
    """Return the certificate of what was found, which continues `previous`, an earlier one of the run. What is no
    longer there gets a link without digests."""
    chain = list(previous.chain) if previous else []
    known = previous.newest_digests if previous else {}
    for what in sorted({*known, *object_digests}):
        digests = object_digests.get(what, ())
        if known.get(what) != digests:
            digest = _link_digest(chain[-1].digest if chain else "", what, digests)
            chain.append(ChainLink(what=what, sha256=digests, digest=digest))
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
            raise CertificateError(newer_version_message(where), remedy=NEWER_REMEDY) from error
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


SIGNATURE = "certificate.sig"  # key in the run's store
_LIBRARY = "cryptography.hazmat.primitives"


def read_key(path: Path, kind: Literal["private", "public"]) -> Any:
    """Return the key in a PEM file without a password, an `Ed25519PrivateKey` or `Ed25519PublicKey`.

    Raises:
        CertificateError: the file cannot be read, or holds no such key.
        MissingPackage: `cryptography` is not installed.
    """
    names = ("serialization", "asymmetric.ed25519")
    serialization, ed25519 = (
        import_optional(f"{_LIBRARY}.{name}", "a signed certificate", "sign") for name in names
    )
    cause: Exception = TypeError("it is a key of another kind")
    try:
        if kind == "private":
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        else:
            key = serialization.load_pem_public_key(path.read_bytes())
        if isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey):
            return key
    except (OSError, ValueError, TypeError) as error:
        cause = error
    raise CertificateError(
        f"{path} cannot be read as an Ed25519 {kind} key: {cause}",
        remedy="make a pair: openssl genpkey -algorithm ed25519 -out key.pem; "
        "openssl pkey -in key.pem -pubout -out public.pem",
    ) from cause


def check_signature(data: bytes, signature: bytes | None, key: Any, where: str) -> None:
    """Raise CertificateError unless the owner of the public `key` signed `data`, the bytes of `where`."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature or b"", data)
    except InvalidSignature as error:
        reason = "has no signature" if signature is None else "was not signed by this key"
        raise CertificateError(
            f"{where} is not trusted: it {reason}",
            remedy="ask its author for the certificate, its signature and the public key again",
        ) from error
