"""Set before torch is imported: its threads sleep while they wait, or they take the cores from one another."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
