"""Names to paths: what is a path, what is a hub id, and what the hub's failures are called."""

import errno
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from camshaft.core.errors import ModelNotFoundError
from camshaft.frontend import hub
from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.testing.tiny import write_tiny_llama

REPO = "someone/tiny-model"
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights", "tokenizer.json": b"{}",
         "generation_config.json": b"{}", "pytorch_model.bin": b"pickle", "modeling.py": b"code",
         "consolidated.safetensors": b"twice", "original/params.json": b"{}", "README.md": b"#"}
COMMIT = "a" * 40


def test_existing_paths_are_returned_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "engine.json").write_text("{}")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    assert hub.resolve_model(str(engine)) == engine
    assert hub.resolve_model(gguf) == gguf
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_model("engine") == Path("engine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve_model("~/m.gguf") == gguf


@pytest.mark.parametrize("name", [
    "/no/such", "./model", "../model", "~/model", "model.gguf", "org/model.gguf", "a/b/c", "models/", "C:\\models\\x",
    "c:/x", "", Path("org/name"), "org/model.safetensors"])
def test_a_missing_path_is_never_taken_for_a_hub_id(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFoundError, match=r"an existing folder, \.gguf file or engine folder.*Check the path"):
        hub.resolve_model(name)


@pytest.mark.parametrize("name", ["gpt2", "org/na me", "org/", "-org/name", "org/name?x"])
def test_names_that_are_neither(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFoundError):
        hub.resolve_model(name)


def test_a_mistyped_folder_under_an_existing_one_is_not_fetched(monkeypatch, tmp_path):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFoundError, match=r"folder 'models' here.*hf download models/lama"):
        hub.resolve_model("models/lama")


def test_a_revision_of_a_local_path(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"revision='v2'.*local path"):
        hub.resolve_model(tmp_path, revision="v2")


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The few routes of the hub that a download uses; ``server.asked`` collects the paths."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def log_message(self, *args):
        """Quiet."""

    def answer(self, *, body):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.server.asked.append(path)
        if self.headers.get("Authorization") != self.server.token_needed:
            return self.send(401, b"{}", {"X-Error-Code": "GatedRepo"} if self.server.gated else {}, body)
        if path.startswith(f"/api/models/{REPO}/tree/"):
            return self.send(200, json.dumps([{"type": "file", "path": name, "size": len(data), "oid": oid(data)}
                                              for name, data in self.server.files.items()]).encode(), {}, body)
        if path.startswith(f"/api/models/{REPO}/revision/nope"):
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        if path.startswith(f"/api/models/{REPO}"):
            siblings = [{"rfilename": name} for name in self.server.files]
            return self.send(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode(), {}, body)
        name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        if name in self.server.files:
            data = self.server.files[name]
            return self.send(200, data, {"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT}, body)
        return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def send(self, status, data, headers, body):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def oid(data):
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """A hub on this machine, and an empty cache for it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.asked, server.files, server.gated, server.token_needed = [], dict(FILES), False, None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    huggingface_hub.utils.reset_sessions() if hasattr(huggingface_hub.utils, "reset_sessions") else None
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_download_holds_the_model_and_nothing_else(fake_hub):
    folder = hub.resolve_model(REPO)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")}
    assert not any(name in path for path in fake_hub.asked for name in (".bin", ".py", "original", "consolidated"))


def test_offline_serves_the_cache_and_asks_nobody(fake_hub, monkeypatch):
    folder = hub.resolve_model(REPO)
    fake_hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.resolve_model(REPO) == folder
    assert hub.cached_model(REPO) == folder
    assert fake_hub.asked == []
    with pytest.raises(ModelNotFoundError, match=r"local cache, as HF_HUB_OFFLINE is set.*Unset HF_HUB_OFFLINE"):
        hub.resolve_model("someone/other")
    assert hub.cached_model("someone/other") is None
    assert fake_hub.asked == []


def test_unknown_gated_private_and_revision(fake_hub):
    with pytest.raises(ModelNotFoundError, match=r"neither was found.*Check the name"):
        hub.resolve_model("someone/no-such-model")
    with pytest.raises(ModelNotFoundError, match=r"revision='nope'.*branch, tag or commit of someone/tiny-model"):
        hub.resolve_model(REPO, revision="nope")
    fake_hub.token_needed = "Bearer hf_secret"
    with pytest.raises(ModelNotFoundError, match=r"set HF_TOKEN to a token that may read it"):
        hub.resolve_model(REPO)
    fake_hub.gated = True
    with pytest.raises(ModelNotFoundError, match=rf"gated.*Accept its licence at https://huggingface\.co/{REPO}"):
        hub.resolve_model(REPO)
    assert (hub.resolve_model(REPO, token="hf_secret") / "config.json").is_file()


@pytest.mark.parametrize(("missing", "message"), [
    ("config.json", r"with config\.json.*GGUF"), ("model.safetensors", "Pickled weights are not read")])
def test_repositories_without_what_is_needed(fake_hub, missing, message):
    del fake_hub.files[missing]
    with pytest.raises(ModelNotFoundError, match=message):
        hub.resolve_model(REPO)


def test_headers_alone_make_a_folder_of_the_same_sizes(fake_hub, tmp_path):
    real = write_tiny_llama(tmp_path / "real", num_shards=2)
    fake_hub.files = {path.name: path.read_bytes() for path in real.iterdir()}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    folder = hub.resolve_headers(REPO, scratch)
    assert folder == scratch
    before, now = (open_checkpoint(path).tensors for path in (real, folder))
    assert {name: (weight.shape, weight.dtype) for name, weight in now.items()} == {
        name: (weight.shape, weight.dtype) for name, weight in before.items()}
    assert not any(bool(weight.read().any()) for weight in now.values()), "no weight was fetched"
    assert hub.cached_model(REPO) is None


def test_headers_of_a_model_that_is_here_are_the_model(fake_hub, tmp_path):
    folder = hub.resolve_model(REPO)
    fake_hub.asked.clear()
    assert hub.resolve_headers(REPO, tmp_path) == folder
    assert hub.resolve_headers(folder, tmp_path) == folder
    assert fake_hub.asked == []
    with pytest.raises(ModelNotFoundError, match="an existing folder"):
        hub.resolve_headers("./nowhere", tmp_path)


def test_a_repository_without_safetensors_has_no_headers(fake_hub, tmp_path):
    del fake_hub.files["model.safetensors"]
    with pytest.raises(ModelNotFoundError):
        hub.resolve_headers(REPO, tmp_path)


def response(status):
    client = pytest.importorskip(errors.HfHubHTTPError.__mro__[1].__module__.split(".")[0])
    if not hasattr(client, "Request"):
        pytest.skip("the hub's client stands on another HTTP library")
    return client.Response(status, request=client.Request("GET", "https://huggingface.co"))


def hub_error(kind, status):
    return kind("the client's own words", response=response(status))


FAILURES = {
    "forbidden": (lambda: hub_error(errors.HfHubHTTPError, 403), r"refuses access \(403\).*HF_TOKEN"),
    "disabled": (lambda: hub_error(errors.DisabledRepoError, 403), r"refuses access \(403\)"),
    "hub down": (lambda: hub_error(errors.HfHubHTTPError, 503), "failed with status 503.*later"),
    "gated": (lambda: hub_error(errors.GatedRepoError, 403), "Accept its licence"),
    "offline": (lambda: errors.OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE is set"),
    "no network": (lambda: ConnectionError("name or service not known"), "reachable Hugging Face hub.*proxy.*PyPI"),
    "disk full": (lambda: OSError(errno.ENOSPC, "No space left on device"), "No space left.*Free disk space.*HF_HOME"),
    "bad id": (lambda: errors.HFValidationError("two dots"), r"valid hub id \(two dots\)"),
}


@pytest.mark.parametrize("case", sorted(FAILURES))
@pytest.mark.parametrize("wrapped", [False, True])
def test_failures_in_words(case, wrapped, monkeypatch, tmp_path):
    make, message = FAILURES[case]

    def fail(*args, **options):
        if not wrapped:
            raise make()
        raise errors.LocalEntryNotFoundError("nothing cached") from make()

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        hub.resolve_model(REPO)
    assert re.search(r"model='someone/tiny-model'", str(caught.value))


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)])
def test_what_counts_as_offline(value, expected, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert hub.is_offline() is expected
