"""The signature of a certificate: Ed25519 over its bytes, 64 bytes that `openssl pkeyutl -verify -rawin` checks too."""

from pathlib import Path
from typing import Any, Literal

from launcher.errors import CertificateError, optional

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
        optional(f"{_LIBRARY}.{name}", "a signed certificate", "sign") for name in names
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
