"""The README lists every setting, with the default that the code has."""

from pathlib import Path

import pytest

from protocol.settings import describe_default, process_settings

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SETTINGS = [(process, name) for process, cls in process_settings().items() for name in cls.model_fields]


@pytest.mark.parametrize(("process", "name"), SETTINGS)
def test_a_setting_is_in_the_readme_with_its_default(process, name):
    rows = [line for line in README.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1, f"{name} has {len(rows)} rows in the README's table of settings"
    if name != "run_dir":  # its default depends on the user
        assert f"`{describe_default(process_settings()[process], name)}`" in rows[0]


def test_the_readme_lists_no_setting_that_is_gone():
    names = {name for _, name in SETTINGS}
    start = README.index("| setting |")
    table = README[start : README.index("\n\n", start)]
    listed = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert listed == names
