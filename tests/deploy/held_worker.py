"""A worker process whose passes wait while the file named first is there: what a hung device looks like."""

import sys
import time
from pathlib import Path

from worker.main import main
from worker.model_runner import ModelRunner


def held(run, file):
    def wait_and_run(self, *args):
        while file.exists():
            time.sleep(0.01)
        return run(self, *args)

    return wait_and_run


if __name__ == "__main__":
    hold = Path(sys.argv.pop(1))
    ModelRunner.prefill = held(ModelRunner.prefill, hold)
    ModelRunner.decode = held(ModelRunner.decode, hold)
    sys.exit(main())
