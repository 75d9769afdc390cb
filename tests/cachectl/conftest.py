"""cachectl, run against a worker that speaks the real protocol."""

import pytest
from fake_control import FakeWorker

from cachectl.main import main


@pytest.fixture
def worker(tmp_path):
    worker = FakeWorker(tmp_path)
    yield worker
    worker.close()


@pytest.fixture
def cachectl(worker, tmp_path, capsys):
    """Run cachectl against the worker: exit code, what it printed, what it complained about."""

    def run(*argv):
        code = main(["--run-dir", str(tmp_path), *argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
