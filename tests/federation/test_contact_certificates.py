"""Advice about certificates that this machine's clock finds expired or not valid yet."""

import http.client
import ssl
from pathlib import Path
from typing import Any

import pytest

from halfmoon import UserError
from halfmoon.federation.transport import contact


@pytest.mark.parametrize(
    ("code", "message"), [(10, "federation rotate FOLDER --server"), (9, "clock"), (20, "--ca must be")]
)
def test_the_advice_fits_the_reason(monkeypatch: pytest.MonkeyPatch, code: int, message: str) -> None:
    def fail(*args: Any, **options: Any) -> None:
        error = ssl.SSLCertVerificationError("failed")
        error.verify_code = code
        error.verify_message = "the reason"
        raise error

    monkeypatch.setattr(contact, "tls_context", lambda ca: ssl.create_default_context())
    monkeypatch.setattr(http.client.HTTPSConnection, "request", fail)
    with pytest.raises(UserError, match=r"not to be trusted \(the reason\)") as caught:
        contact.check_server(contact.Address("server", 8443), Path("ca.pem"))
    assert message in str(caught.value)
