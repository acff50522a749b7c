"""Hub ids through the real huggingface_hub, against a small hub that runs inside the test."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from checkpoint_bytes import ARCHITECTURE, entry, gguf, pair, safetensors, u32
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from moestro.checkpoints import hub, open_checkpoint
from moestro.core.errors import CheckpointError, InvalidRequest

WEIGHTS = safetensors({"t": entry("U8", [3], 0, 3)}, b"abc")
OTHER = safetensors({"u": entry("U8", [2], 0, 2)}, b"de")
INDEX = json.dumps({"weight_map": {"t": "w-1.safetensors", "u": "w-2.safetensors"}}).encode()
CONFIG = b'{"model_type": "mixtral"}'
EXTRAS = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}", "README.md": b"read me"}


def split(number: int) -> bytes:
    pairs = [ARCHITECTURE, pair("split.no", 4, u32(number)), pair("split.count", 4, u32(2))]
    return gguf(pairs)


REPOS = {
    "org/single": {"config.json": CONFIG, "model.safetensors": WEIGHTS, **EXTRAS}
    | {"original/consolidated.safetensors": WEIGHTS, "pytorch_model.bin": b"x"},
    "org/sharded": {"config.json": CONFIG, "model.safetensors.index.json": INDEX}
    | {"w-1.safetensors": WEIGHTS, "w-2.safetensors": OTHER, "extra.safetensors": WEIGHTS},
    "org/ggufs": {"config.json": CONFIG, "a.gguf": gguf(), "b.gguf": gguf(), "README.md": b"x"},
    "org/one-gguf": {"a.gguf": gguf()},
    "org/split": {"sub/m-00001-of-00002.gguf": split(0), "sub/m-00002-of-00002.gguf": split(1)},
    "org/nothing": {"config.json": CONFIG, "pytorch_model.bin": b"x"},
    "org/packed": {"moestro.json": b"{}", "config.json": CONFIG, "shared.safetensors": WEIGHTS}
    | {"experts-000.bin": b"x", "experts-001.bin": b"y", "notes.bin": b"z"},
    "org/evil": {"model.safetensors.index.json": b'{"weight_map": {"t": "../../x"}}'},
}


class Hub(ThreadingHTTPServer):
    """The few endpoints of the hub that a download uses; remembers which files were fetched."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fetched: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]  # then owner, name, kind, revision, file
        owner, model, kind, revision = [*parts[2 * api :], "revision", "main"][:4]
        repo = f"{owner}/{model}"
        files = REPOS.get(repo)
        sha = hashlib.sha1(repo.encode()).hexdigest()
        if repo == "org/gated":
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if files is None:
            return self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", "v1", sha):
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if api and kind == "revision":
            names = [{"rfilename": name} for name in files]
            body = {"id": repo, "sha": sha, "siblings": names, "private": False, "tags": []}
            return self.answer(200, json.dumps(body).encode())
        if api and kind == "tree":
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in files.items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        name = "/".join(parts[4:])
        if name not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.server.fetched.add(name)
        etag = hashlib.sha1(files[name]).hexdigest()
        self.answer(200, files[name], {"X-Repo-Commit": sha, "ETag": f'"{etag}"'})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub_server = Hub()
    thread = threading.Thread(target=hub_server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
    template = hub_server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    huggingface_hub.utils.disable_progress_bars()
    yield hub_server
    hub_server.shutdown()
    thread.join()
    hub_server.server_close()


def test_single_file_repository_fetches_only_what_is_needed(server: Hub) -> None:
    opened = open_checkpoint("org/single")
    assert opened.architecture == "mixtral"
    assert bytes(opened.read("t").tolist()) == b"abc"
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert server.fetched == wanted
    assert (opened.path / "chat_template.jinja").read_bytes() == b"{{ x }}"


def test_shards_are_those_of_the_index(server: Hub) -> None:
    opened = open_checkpoint("org/sharded", revision="v1")
    assert opened.names() == ["t", "u"]
    assert "extra.safetensors" not in server.fetched
    assert "w-2.safetensors" in server.fetched


def test_a_packed_model_is_fetched_whole(server: Hub) -> None:
    directory = hub.fetch("org/packed")
    assert server.fetched == set(REPOS["org/packed"]) - {"notes.bin"}
    assert {path.name for path in directory.iterdir()} == server.fetched


def test_cached_models_open_offline(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for hub_id in ("org/single", "org/sharded", "org/one-gguf", "org/split", "org/ggufs:b.gguf"):
        names = open_checkpoint(hub_id).names()
        server.fetched.clear()
        assert open_checkpoint(hub_id, offline=True).names() == names
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert open_checkpoint(hub_id).names() == names
        monkeypatch.delenv("HF_HUB_OFFLINE")
        assert not server.fetched


def test_offline_without_a_cached_copy(server: Hub) -> None:
    for hub_id in ("org/single", "org/ggufs:a.gguf"):
        with pytest.raises(
            CheckpointError, match=r"local hub cache does not have.*without offline"
        ):
            open_checkpoint(hub_id, offline=True)
    assert not server.fetched


def test_offline_with_half_a_copy(server: Hub) -> None:
    path = open_checkpoint("org/sharded").path
    (path / "w-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"w-2\.safetensors|cache does not have"):
        open_checkpoint("org/sharded", offline=True)
    path = open_checkpoint("org/single").path
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"local cache has of it holds neither.*without off"):
        open_checkpoint("org/single", offline=True)


def test_one_gguf_by_name(server: Hub) -> None:
    opened = open_checkpoint("org/ggufs:b.gguf")
    assert opened.path.name == "b.gguf"
    assert server.fetched == {"b.gguf"}


def test_all_parts_of_a_split_gguf(server: Hub) -> None:
    opened = open_checkpoint("org/split:sub/m-00001-of-00002.gguf")
    assert opened.container == "gguf"
    assert len(server.fetched) == 2


def test_a_repository_of_one_gguf_is_that_model(server: Hub) -> None:
    assert open_checkpoint("org/one-gguf").container == "gguf"
    assert open_checkpoint("org/split").container == "gguf"


def test_a_repository_of_several_ggufs_lists_them(server: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"2 GGUF models; .* org/ggufs:a\.gguf, org/ggufs:b"):
        open_checkpoint("org/ggufs")


@pytest.mark.parametrize(
    ("hub_id", "revision", "message"),
    [
        ("org/absent", None, "org/absent is neither a path on disk nor a repository"),
        ("org/gated", None, r"org/gated needs its terms accepted at .*hf auth login"),
        ("org/single", "v9", "org/single at v9 has no such revision"),
        ("org/ggufs:c.gguf", None, r"org/ggufs has no file c\.gguf; see https://.*/tree/main"),
        ("org/nothing", None, r"holds neither model\.safetensors"),
        ("org/evil", None, "plain file names beside the index"),
        ("org/a..b", None, "neither a path on disk nor a valid hub id"),
    ],
)
def test_errors(server: Hub, hub_id: str, revision: str | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(hub_id, revision=revision)
    assert "\n" not in str(caught.value)


def test_no_network(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    open_checkpoint("org/single")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert open_checkpoint("org/single").names() == ["t"], "the cache serves without a network"
    with pytest.raises(CheckpointError, match=r"org/sharded is not on disk.*check the network"):
        open_checkpoint("org/sharded")


def test_connection_lost_between_files(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nmore lines")

    monkeypatch.setattr(hub, "hf_hub_download", lost)
    for hub_id, file in (("org/single", "model.safetensors"), ("org/ggufs:a.gguf", "a.gguf")):
        with pytest.raises(CheckpointError, match=rf"{file} can be had neither.*reach the hub; ch"):
            open_checkpoint(hub_id)


def test_a_failing_disk_is_reported(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "snapshot_download", full)
    with pytest.raises(CheckpointError, match=r"could not be fetched.*No space left on device"):
        open_checkpoint("org/single")


def test_only_gguf_files_can_be_chosen(server: Hub) -> None:
    with pytest.raises(InvalidRequest, match=r"only \.gguf files can be chosen"):
        open_checkpoint("org/single:model.safetensors")


def test_disk_wins_over_the_hub(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "org" / "single").mkdir(parents=True)
    (tmp_path / "org" / "single" / "model.safetensors").write_bytes(OTHER)
    assert open_checkpoint("org/single").names() == ["u"]
    assert not server.fetched


def test_what_counts_as_a_hub_id() -> None:
    yes = [
        "org/name",
        "Qwen/Qwen3-30B-A3B",
        "a/b.c_d",
        "a/b:c.gguf",
        "a/b:q4/c-00001-of-00002.gguf",
    ]
    no = [
        "name",
        "/a/b",
        "./a",
        "../a",
        "a/b/c",
        "a/b.gguf",
        "a/",
        "a/b:",
        "a/b:c:d",
        "~/a",
        "a b/c",
    ]
    assert all(map(hub.is_hub_id, yes))
    assert not any(map(hub.is_hub_id, no))
