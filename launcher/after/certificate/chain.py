"""The certificate of a run: a hash chain over the objects and logs in its store.

    {"format": 2, "chain": [{"what": "run.json", "sha256": ["..."], "digest": "..."}, ...]}

A link holds the SHA-256 of every 4 MiB of an object, or of every segment (stored part) of an attempt's log. An attempt
is one start of training. A link's `digest` is a hash of these and of the `digest` of the link before, so the last
`digest` covers the whole chain. A later certificate of the run keeps the earlier links and appends new ones.

The signature is Ed25519 over the certificate's bytes: 64 bytes, which `openssl pkeyutl -verify -rawin` checks too.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from data_service.formats import NEWER_REMEDY, is_from_newer_version, newer_version_message, parse_json
from launcher.errors import CertificateError, import_optional

CERTIFICATE_KEY = "certificate.json"  # key in the run's store
DIGEST_CHUNK_BYTES = 4 << 20  # bytes of an object under one SHA-256

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digests = tuple[Sha256, ...]
"""Digests, in order, of an object's chunks of `DIGEST_CHUNK_BYTES`, or of a log's segments."""


class _StrictModel(BaseModel, frozen=True, extra="forbid"): ...


class ChainLink(_StrictModel, frozen=True):
    """A link of the chain: the digests of one object or log. `what`: key of the object, or prefix of the log's keys. A
    later link with the same `what` replaces the earlier one."""

    what: str
    sha256: Digests
    digest: Sha256


class Certificate(_StrictModel, frozen=True):
    format: Literal[2] = 2
    chain: Annotated[tuple[ChainLink, ...], Field(min_length=1)]

    @property
    def digest(self) -> str:
        """The digest of the last link, which covers the whole chain."""
        return self.chain[-1].digest

    @property
    def newest_digests(self) -> dict[str, Digests]:
        """The digests in the newest link of each object or log, by its key or prefix."""
        return {link.what: link.sha256 for link in self.chain}


def extend_chain(previous: Certificate | None, object_digests: Mapping[str, Digests]) -> Certificate:
    """Return `previous` (None: an empty chain) with a new link for each object or log whose digests changed. A deleted
    object gets a link without digests."""
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


def encode_certificate(certificate: Certificate) -> bytes:
    return _canonical_json(certificate.model_dump()) + b"\n"


def decode_certificate(data: bytes, certificate_uri: str) -> Certificate:
    """Return the certificate in `data`, the bytes of `certificate_uri`, after checking its chain.

    Raises CertificateError: `data` was changed after it was written, is not a certificate, or has another version.
    """
    try:
        certificate = Certificate.model_validate(parse_json(data))
    except ValueError as error:
        if is_from_newer_version(data, 2, error if isinstance(error, ValidationError) else None):
            raise CertificateError(newer_version_message(certificate_uri), remedy=NEWER_REMEDY) from error
        raise _damaged_error(certificate_uri, "a field is missing or wrong") from error
    before = ""
    for number, link in enumerate(certificate.chain):
        if _link_digest(before, link.what, link.sha256) != link.digest:
            raise _damaged_error(certificate_uri, f"link {number} of its chain ({link.what}) does not match its digest")
        before = link.digest
    if encode_certificate(certificate) != data:
        raise _damaged_error(certificate_uri, "its JSON is not formatted as maskfleet formats it")
    return certificate


def _link_digest(previous_digest: str, key: str, digests: Digests) -> str:
    return sha256(_canonical_json([previous_digest, key, digests]))


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _damaged_error(certificate_uri: str, reason: str) -> CertificateError:
    return CertificateError(
        f"{certificate_uri} is damaged, or not a certificate of this version: {reason}",
        remedy="move the file away, and write a new one with maskfleet runs certify RUN; "
        "use maskfleet 0.2.0 for a certificate of a version before 0.3.0",
    )


SIGNATURE_KEY = "certificate.sig"  # key in the run's store
_PRIMITIVES_PACKAGE = "cryptography.hazmat.primitives"  # the package with Ed25519 keys


def read_key(path: Path, kind: Literal["private", "public"]) -> Any:
    """Return the key in a PEM file without a password, an `Ed25519PrivateKey` or `Ed25519PublicKey`.

    Raises:
        CertificateError: the file cannot be read, or holds no such key.
        MissingPackage: `cryptography` is not installed.
    """
    names = ("serialization", "asymmetric.ed25519")
    serialization, ed25519 = (
        import_optional(f"{_PRIMITIVES_PACKAGE}.{name}", "a signed certificate", "sign") for name in names
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
        remedy="make a key pair: openssl genpkey -algorithm ed25519 -out key.pem; "
        "openssl pkey -in key.pem -pubout -out public.pem",
    ) from cause


def check_signature(data: bytes, signature: bytes | None, public_key: Any, certificate_uri: str) -> None:
    """Raise CertificateError unless the owner of the public `public_key` signed `data`, the bytes of
    `certificate_uri`."""
    from cryptography.exceptions import InvalidSignature

    try:
        public_key.verify(signature or b"", data)
    except InvalidSignature as error:
        reason = "has no signature" if signature is None else "was not signed by this key"
        raise CertificateError(
            f"{certificate_uri} is not trusted: it {reason}",
            remedy="ask its author for the certificate, its signature and the public key again",
        ) from error
