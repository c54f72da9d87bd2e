"""Where the token for the Hub comes from, what is said where there is none, and that no text ever holds it."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest
from helpers import HOLD_SECONDS
from huggingface_hub import constants
from huggingface_hub.utils import _auth, _runtime

from colabtrain import hub_token
from colabtrain.hub_token import NoToken, find_token, token_fault
from colabtrain.mmjev.hub_files import ModelFiles

pytestmark = pytest.mark.colab

TOKEN = "hf_TheTokenThatNobodyMaySee"
PAGE = "https://huggingface.co/settings/tokens"
CLAIMS = {
    "nowhere": "there is no Hugging Face token. Make",
    "no secret": "Colab's Secrets have none under the name HF_TOKEN",
    "refused": "Colab refuses this notebook access to the secret HF_TOKEN",
    "timed out": "did not hand over the secret HF_TOKEN in time",
    "failed": "Colab's Secrets failed when asked for HF_TOKEN",
    "asked earlier": "Colab's Secrets were asked earlier in this session and gave none",
    "thread": "answer on the main thread only, and this is another thread",
    "malformed": "has characters in it that no token has",
    "expired": "the stored login of huggingface_hub has expired and could not be renewed",
    "look-up": "the look-up of the Hugging Face token failed",
}


class Colab:
    """google.colab, as far as Secrets go: `answer` is the secret or the error; who asked, and on which thread, is kept.

    The errors descend as the real ones do: access refused is no google.colab.errors.Error.
    """

    def __init__(self) -> None:
        self.answer: str | Callable[[], Exception] = TOKEN
        self.threads: list[threading.Thread] = []
        self.free = threading.Event()  # cleared: nobody answers, ever
        self.free.set()
        self.Error: type[Exception] = type("Error", (Exception,), {})
        self.MessageError: type[Exception] = type("MessageError", (self.Error,), {})
        self.userdata = ModuleType("google.colab.userdata")
        for name, base, text in (
            ("NotebookAccessError", Exception, "Notebook does not have access to secret HF_TOKEN"),
            ("SecretNotFoundError", self.Error, "Secret HF_TOKEN does not exist."),
            (
                "TimeoutException",
                self.Error,
                "Requesting secret HF_TOKEN timed out. Secrets can only be fetched when running from the Colab UI.",
            ),
        ):
            made = type(name, (base,), {"__str__": lambda _, text=text: text})
            setattr(self.userdata, name, made)
            setattr(self, name, made)
        self.userdata.get = self._get  # type: ignore[attr-defined]

    def _get(self, key: str) -> str:
        assert key == "HF_TOKEN"
        self.threads.append(threading.current_thread())
        assert self.free.wait(HOLD_SECONDS)
        if isinstance(self.answer, str):
            return self.answer
        raise self.answer()

    def will_raise(self, name: str, *args: str) -> None:
        self.answer = lambda: getattr(self, name)(*args)


@pytest.fixture(autouse=True)
def nothing_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A machine and a session without a token; and whatever a test does, the token is neither printed nor logged."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "VERTEX_PRODUCT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "stored_tokens"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_runtime, "_is_google_colab", False)
    fresh = {"_IS_GOOGLE_COLAB_CHECKED": False, "_GOOGLE_COLAB_SECRET": None, "_OAUTH_REFRESH_CACHE": None, "_OAUTH_REFRESH_WARNED": False}
    for name, value in fresh.items():
        monkeypatch.setattr(_auth, name, value)
    monkeypatch.setattr(hub_token, "_answer", "")
    logger = logging.getLogger(_auth.__name__)
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    assert not logger.filters
    for text in (*capfd.readouterr(), caplog.text):
        assert TOKEN not in text


@pytest.fixture
def colab(monkeypatch: pytest.MonkeyPatch) -> Colab:
    made = Colab()
    google, package, errors = (ModuleType(name) for name in ("google", "google.colab", "google.colab.errors"))
    google.colab, package.userdata, package.errors, errors.Error = package, made.userdata, errors, made.Error  # type: ignore[attr-defined]
    for module in (google, package, errors, made.userdata):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_runtime, "_is_google_colab", True)
    return made


def told(claim: str) -> str:
    """What find_token() says; it is `claim` and no other, has the remedies, and the token is nowhere about the error."""
    with pytest.raises(NoToken) as caught:
        find_token()
    error, text = caught.value, str(caught.value)
    assert [name for name, words in CLAIMS.items() if words in text] == [claim]
    for remedy in (PAGE, "write access", "HF_TOKEN", "key icon", "huggingface_hub.login()"):
        assert remedy in text
    assert "\n" not in text and TOKEN not in text and error.args == (text,)
    assert error.__cause__ is None and error.__context__ is None
    frames = [entry.frame for entry in caught.traceback if str(entry.path) == hub_token.__file__]
    assert frames
    for frame in frames:  # some tracebacks show these
        assert TOKEN not in repr(frame.f_locals)
    return text


def on_another_thread(function: Callable[[], Any]) -> Any:
    """What `function` returns or raises there; it must come back."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(function())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HOLD_SECONDS)
    assert result, "it hangs"
    return result[0]


# Where it comes from


def test_the_order_is_that_of_huggingface_hub(colab: Colab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)  # this is about requests without a token
    (tmp_path / "token").write_text("hf_stored\n")
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_old")
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    assert find_token() == TOKEN
    monkeypatch.delenv("HF_TOKEN")
    assert find_token() == "hf_old"
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN")
    assert find_token() == "hf_stored"
    assert not colab.threads, "Colab is asked last"
    (tmp_path / "token").unlink()
    assert find_token() == find_token() == TOKEN
    assert colab.threads == [threading.main_thread()], "and once"


def test_without_colab() -> None:
    told("nowhere")


def test_colab_enterprise_has_no_secrets(colab: Colab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTEX_PRODUCT", "COLAB_ENTERPRISE")
    told("nowhere")
    assert str(on_another_thread(find_token)) == hub_token.NOWHERE
    assert not colab.threads


# What Colab's Secrets answer


@pytest.mark.parametrize(
    ("error", "claim"),
    [("SecretNotFoundError", "no secret"), ("NotebookAccessError", "refused"), ("TimeoutException", "timed out"), ("Error", "failed")],
)
def test_each_answer_has_its_sentence_and_keeps_it(colab: Colab, error: str, claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub says it once a session and asks no more, even after the person did as told: the sentence says so."""
    colab.will_raise(error)
    text = told(claim)
    colab.answer = TOKEN
    assert told(claim) == text and len(colab.threads) == 1
    for words in ("once a session", "restart the session", 'os.environ["HF_TOKEN"] = userdata.get("HF_TOKEN")'):
        assert words in text
    code = text.split("`")[-2]
    monkeypatch.setenv("HF_TOKEN", "")  # so that it is taken back
    exec(code, {})
    assert os.environ["HF_TOKEN"] == find_token() == TOKEN


def test_an_empty_secret(colab: Colab) -> None:
    colab.answer = " \n"
    assert "or it is empty" in told("no secret")


@pytest.mark.parametrize("error", ["Error", "MessageError"])
def test_an_error_of_colab_is_quoted_without_what_may_be_the_token(colab: Colab, error: str) -> None:
    colab.will_raise(error, f"the frontend\nis gone; payload: '{TOKEN}'")
    assert "'the frontend is gone; payload: '[not shown]''" in told("failed")


def test_an_error_that_huggingface_hub_does_not_know(colab: Colab) -> None:
    colab.answer = lambda: AttributeError(f"'NoneType' object has no attribute 'get' {TOKEN}")
    assert "(AttributeError: 'NoneType' object has no attribute 'get' [not shown])" in told("look-up")
    colab.answer = TOKEN
    assert find_token() == TOKEN, "it asks anew"


def test_others_asked_before(colab: Colab) -> None:
    colab.will_raise("NotebookAccessError")
    with pytest.warns(UserWarning, match="has not been granted"):
        assert huggingface_hub.get_token() is None
    assert "no access for this notebook" in told("asked earlier")
    assert len(colab.threads) == 1


def test_a_colab_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runtime, "_is_google_colab", True)
    for name in ("google.colab", "google.colab.userdata"):
        monkeypatch.setitem(sys.modules, name, None)
    told("nowhere")


def test_an_interrupt_while_the_pop_up_is_open_is_an_interrupt(colab: Colab) -> None:
    colab.answer = KeyboardInterrupt  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        find_token()
    colab.answer = TOKEN
    assert find_token() == TOKEN


def test_warnings_of_others_pass(colab: Colab) -> None:
    def answer() -> Exception:
        warnings.warn("something else", DeprecationWarning, stacklevel=1)
        return colab.NotebookAccessError()  # type: ignore[attr-defined]

    colab.answer = answer
    with pytest.warns() as caught:
        told("refused")
    assert [(str(warning.message), warning.category) for warning in caught] == [("something else", DeprecationWarning)]


# Threads


def test_colab_is_never_asked_on_another_thread(colab: Colab) -> None:
    colab.free.clear()
    error = on_another_thread(find_token)
    assert isinstance(error, NoToken) and CLAIMS["thread"] in str(error) and "call from a cell" in str(error)
    assert not colab.threads
    colab.free.set()
    assert find_token() == TOKEN
    assert on_another_thread(find_token) == TOKEN, "huggingface_hub has it now, and asks no more"
    assert colab.threads == [threading.main_thread()]


@pytest.mark.parametrize("place", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "token"])
def test_another_thread_may_find_what_is_not_colabs(colab: Colab, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for there, empty in ((TOKEN, False), (" \n", True)):
        if place == "token":
            (tmp_path / "token").write_text(there)
        else:
            monkeypatch.setenv(place, there)
        found = on_another_thread(find_token)
        assert (isinstance(found, NoToken) and CLAIMS["thread"] in str(found)) if empty else found == TOKEN
    assert not colab.threads


# A token that is none


@pytest.mark.parametrize("bad", ["\x00", " and more", "é", "\u200b", '"', "…", "\x7f", "\n\tx", "=x"])
def test_characters_that_no_token_has(colab: Colab, bad: str) -> None:
    colab.answer = TOKEN + bad + TOKEN
    text = told("malformed")
    colab.answer = TOKEN
    assert "once a session" in text and told("malformed") == text
    with pytest.raises(ValueError, match="has characters") as caught:
        ModelFiles("owner/model", token=TOKEN + bad + TOKEN)
    assert str(caught.value) == text == token_fault(f"{TOKEN}{bad}x")


def test_a_wrong_token_that_is_not_colabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"<{TOKEN}>")
    assert told("malformed") == hub_token.MALFORMED


@pytest.mark.parametrize("good", ["", TOKEN, "hf_oauth_eyJhbGciOi.eyJzdWIi-_x.c2ln==", "api_org_x"])
def test_characters_that_tokens_have(good: str) -> None:
    assert token_fault(good) == ""


@pytest.mark.parametrize("kind", ["folder", "bytes"])
def test_a_stored_login_that_cannot_be_read(kind: str, tmp_path: Path) -> None:
    if kind == "folder":
        (tmp_path / "token").mkdir()
        assert "IsADirectoryError" in told("look-up")
    else:
        (tmp_path / "token").write_bytes(TOKEN.encode() + b"\xff")  # the decoder's error holds all of it
        assert "UnicodeDecodeError" in told("look-up")


# A login through the browser


class Renewal(BaseHTTPRequestHandler):
    status, answer = 400, dict[str, Any]()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps(self.answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def renewal(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Renewal]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Renewal)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield Renewal
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def log_in(folder: Path, expires_in_seconds: float) -> None:
    (folder / "token").write_text(TOKEN)
    expires_at = int(time.time() + expires_in_seconds)
    (folder / "stored_tokens").write_text(f"[mine]\nhf_token = {TOKEN}\nrefresh_token = hf_renew\nexpires_at = {expires_at}\n")


def test_a_login_that_has_expired(renewal: type[Renewal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(tmp_path, -60)
    monkeypatch.setattr(renewal, "answer", {"error": "invalid_grant", "error_description": f"revoked: {TOKEN}"})
    assert told("expired") == told("expired")
    log_in(tmp_path, 7 * 24 * 3600)  # what login() does
    assert find_token() == TOKEN


def test_a_login_that_has_expired_while_the_hub_is_out_of_reach(tmp_path: Path) -> None:
    log_in(tmp_path, -60)
    told("expired")
    huggingface_hub.close_session()


def test_a_login_is_renewed(renewal: type[Renewal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(tmp_path, -60)
    monkeypatch.setattr(renewal, "status", 200)
    monkeypatch.setattr(renewal, "answer", {"access_token": "hf_renewed", "expires_in": 8 * 3600})
    assert find_token() == "hf_renewed"


def test_a_login_that_is_not_renewed_is_good_to_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_in(tmp_path, 3600)
    assert find_token() == TOKEN
    assert "Could not refresh your Hugging Face access token" in caplog.text
    huggingface_hub.close_session()


@pytest.mark.parametrize("damage", [f"hf_token = {TOKEN}\n", f"[mine]\n{TOKEN}\n", f"[mine]\nhf_token = {TOKEN}\nexpires_at = soon\n"])
def test_a_damaged_file_of_logins_is_not_shown(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "stored_tokens").write_text(damage)
    assert find_token() == TOKEN
    assert ("[not shown]" in caplog.text) == ("soon" not in damage)
