"""Compiled kernels are used again only where all their sources are as they were."""

from worker import main


def test_kernels_of_other_sources_lie_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "__file__", str(tmp_path / "main.py"))
    (tmp_path / "kernels.py").write_text("from numba import njit\nfrom worker.parts import part\n")
    (tmp_path / "parts.py").write_text("from numba.extending import intrinsic\n")
    (tmp_path / "other.py").write_text("import torch\n")
    before = main.kernel_cache()
    (tmp_path / "other.py").write_text("import torch  # changed\n")
    assert main.kernel_cache() == before
    (tmp_path / "parts.py").write_text("from numba.extending import intrinsic  # changed\n")
    assert main.kernel_cache() != before
    assert before.parent == main.kernel_cache().parent
