"""Writes the certificate of a run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from data_service.store.open import open_store
from launcher.after.certificate.examine import Begin, Examination, examine, silent
from launcher.after.certificate.signature import ENVELOPE, sign
from launcher.after.certificate.statement import CERTIFICATE, Statement, certified, encode
from launcher.after.certificate.stored import certificate_of
from launcher.runtime.run.outline import open_outline

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def certify(
    uri: str,
    *,
    key: "Ed25519PrivateKey | None" = None,
    corpora: Mapping[str, str] | None = None,
    begin: Begin = silent,
) -> tuple[Statement | None, Examination]:
    """Examine the run at `uri` and write its certificate into it, unless a problem was found.

    A certificate that is there is continued: what it says of commits, starts and log must still be true.

    Args:
        key: key that signs the certificate. None: it is not signed.
        corpora, begin: as for `examine`.

    Returns:
        The certificate that was written, None if there are problems; and what was found.

    Raises:
        CertificateError: the certificate that is there is damaged, or not signed by `key` although it is signed.
        RunError, StoreError: as `examine`.
    """
    name, store = open_outline(uri).name, open_store(uri)
    former = certificate_of(uri, key.public_key() if key else None)
    found = examine(uri, former, renewing=True, corpora=corpora, begin=begin)
    if found.problems:
        return None, found
    statement = certified(name, found.entries, found.files, found.segments, former=former)
    data = encode(statement)
    if key is None:
        store.delete(ENVELOPE)  # it would be of another certificate
    else:
        store.put(ENVELOPE, sign(data, key))
    store.put(CERTIFICATE, data)
    return statement, found
