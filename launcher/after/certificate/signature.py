"""The signed form of a certificate: a DSSE envelope with an Ed25519 signature, which in-toto's tools read.

    {"payloadType": "application/vnd.in-toto+json", "payload": base64 of the certificate,
     "signatures": [{"keyid": sha256 of the public key (DER), "sig": base64}]}

Source of the format: DSSE, https://github.com/secure-systems-lab/dsse, protocol 1.0.2.
"""

import base64
import binascii
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from launcher.errors import CertificateError, optional

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ENVELOPE = "certificate.dsse.json"
"""Key of the signed certificate in the run's store."""

_PAYLOAD = "application/vnd.in-toto+json"
_USE, _EXTRA = "a signed certificate", "sign"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Signature(_Strict):
    keyid: str
    sig: str


class _Envelope(_Strict):
    payloadType: str
    payload: str
    signatures: tuple[_Signature, ...]


def read_private_key(path: Path) -> "Ed25519PrivateKey":
    """Return the Ed25519 key in a PEM file (PKCS 8, without a password).

    Raises:
        CertificateError: the file cannot be read, or holds no such key.
        MissingPackage: `cryptography` is not installed.
    """
    serialization, ed25519 = _modules()
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, "private key", error) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _unreadable(path, "private key", "it is a key of another kind")
    return cast("Ed25519PrivateKey", key)


def read_public_key(path: Path) -> "Ed25519PublicKey":
    """Return the public Ed25519 key in a PEM file. Raises as `read_private_key`."""
    serialization, ed25519 = _modules()
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(path, "public key", error) from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _unreadable(path, "public key", "it is a key of another kind")
    return cast("Ed25519PublicKey", key)


def sign(certificate: bytes, key: "Ed25519PrivateKey") -> bytes:
    """Return the envelope that holds `certificate` and its signature."""
    signature = _Signature(
        keyid=key_id(key.public_key()), sig=base64.b64encode(key.sign(_signed(certificate))).decode()
    )
    payload = base64.b64encode(certificate).decode()
    envelope = _Envelope(payloadType=_PAYLOAD, payload=payload, signatures=(signature,))
    return (envelope.model_dump_json() + "\n").encode()


def opened(envelope: bytes, key: "Ed25519PublicKey", where: str) -> bytes:
    """Return the certificate in an envelope, after checking that the owner of `key` signed it.

    Raises CertificateError: the bytes of `where` are no envelope, or have no valid signature by this key.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        found = _Envelope.model_validate_json(envelope)
        payload = base64.b64decode(found.payload, validate=True)
        signatures = [base64.b64decode(one.sig, validate=True) for one in found.signatures]
    except (ValidationError, binascii.Error) as error:
        raise _refused(where, "it is no signed certificate") from error
    for signature in signatures if found.payloadType == _PAYLOAD else ():
        try:
            key.verify(signature, _signed(payload))
        except InvalidSignature:
            continue
        return payload
    raise _refused(where, f"it has no valid signature by the key {key_id(key)[:16]}")


def key_id(key: "Ed25519PublicKey") -> str:
    """Return the sha256 of a public key in DER form, in hexadecimal."""
    serialization, _ = _modules()
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _signed(certificate: bytes) -> bytes:
    """Return what is signed: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(certificate), certificate)


def _modules() -> tuple[Any, Any]:
    name = "cryptography.hazmat.primitives"
    return optional(f"{name}.serialization", _USE, _EXTRA), optional(
        f"{name}.asymmetric.ed25519", _USE, _EXTRA
    )


def _unreadable(path: Path, what: str, reason: object) -> CertificateError:
    return CertificateError(
        f"{path} cannot be read as an Ed25519 {what}: {reason}",
        remedy="make a pair: openssl genpkey -algorithm ed25519 -out key.pem; "
        "openssl pkey -in key.pem -pubout -out public.pem",
    )


def _refused(where: str, reason: str) -> CertificateError:
    return CertificateError(
        f"{where} is not trusted: {reason}",
        remedy="ask its author for the certificate and the public key again",
    )
