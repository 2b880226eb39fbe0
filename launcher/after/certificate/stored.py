"""Reads the certificate that a run or a local file holds."""

from pathlib import Path
from typing import TYPE_CHECKING

from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from launcher.after.certificate.signature import ENVELOPE, opened
from launcher.after.certificate.statement import CERTIFICATE, Statement, decode
from launcher.errors import CertificateError, OutputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def certificate_of(uri: str, key: "Ed25519PublicKey | None" = None) -> Statement | None:
    """Return the certificate in the run at `uri`; None if it has none.

    `key`: public key that must have signed it, if the run has a signed one.

    Raises:
        CertificateError: it is damaged, of a newer version, or not signed by `key`.
        StoreError: the run cannot be read.
    """
    store = open_store(uri)
    data, envelope = _get(uri, CERTIFICATE), _get(uri, ENVELOPE)
    if data is None and envelope is None:
        return None
    where = f"{store.uri.rstrip('/')}/{CERTIFICATE if data is not None else ENVELOPE}"
    if key is not None and envelope is not None:
        signed = opened(envelope, key, f"{store.uri.rstrip('/')}/{ENVELOPE}")
        if data is not None and data != signed:
            raise CertificateError(
                f"{where} is not the certificate that was signed: {ENVELOPE} holds another one",
                remedy=f"delete {CERTIFICATE}: the signed one is complete without it",
            )
        data = signed
    if data is None:
        raise CertificateError(
            f"{where} is signed, and {CERTIFICATE} is missing",
            remedy="give the public key by which it was signed: --public-key",
        )
    return decode(data, where)


def given_certificate(path: Path, key: "Ed25519PublicKey | None" = None) -> Statement:
    """Return the certificate in a local file, signed or not.

    `key`: public key that must have signed it.

    Raises:
        OutputError: the file cannot be read.
        CertificateError: it holds no whole certificate, or is not signed by `key`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {error.strerror}", remedy="give the file that holds the certificate"
        ) from error
    return decode(opened(data, key, str(path)) if key is not None else data, str(path))


def _get(uri: str, name: str) -> bytes | None:
    try:
        return open_store(uri).get(name)
    except KeyMissing:
        return None
