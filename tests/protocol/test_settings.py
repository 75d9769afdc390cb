"""Settings: which source wins, what is refused, and that flags carry every value to a child."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gateway.config import GatewaySettings, ServeSettings
from protocol.settings import describe_default, load_settings, process_settings, to_flags
from worker.config import WorkerSettings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("PREFIXD_"):
            monkeypatch.delenv(name)


def load(cls, *argv):
    return load_settings(cls, argv, "prefixd test", "")


def refusal(capsys, cls, *argv):
    """What is printed when these flags are refused."""
    with pytest.raises(SystemExit) as stopped:
        load(cls, *argv)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("prefixd test: error: ")
    assert printed.count("\n") == 1
    return printed


def test_flags_beat_environment_beats_file_beats_default(tmp_path, monkeypatch):
    config = tmp_path / "prefixd.toml"
    config.write_text("slots = 1\nmax_running = 1\nmax_waiting = 1\n")
    monkeypatch.setenv("PREFIXD_SLOTS", "2")
    monkeypatch.setenv("PREFIXD_MAX_RUNNING", "2")
    settings = load(WorkerSettings, "--config", str(config), "--slots", "3")
    assert (settings.slots, settings.max_running, settings.max_waiting) == (3, 2, 1)
    assert settings.dtype == "auto"


def test_the_file_may_be_named_by_the_environment(tmp_path, monkeypatch):
    config = tmp_path / "prefixd.toml"
    config.write_text('model = "m.gguf"\n')
    monkeypatch.setenv("PREFIXD_CONFIG", str(config))
    assert load(GatewaySettings).model == "m.gguf"


def test_one_file_serves_both_processes(tmp_path):
    config = tmp_path / "prefixd.toml"
    config.write_text('slots = 7\nport = 9000\nserved_model_name = ["a", "b"]\nkv_memory = "512MiB"\n')
    assert load(GatewaySettings, "--config", str(config)).port == 9000
    assert load(GatewaySettings, "--config", str(config)).served_model_name == ("a", "b")
    assert load(WorkerSettings, "--config", str(config)).slots == 7
    assert load(WorkerSettings, "--config", str(config)).kv_memory == 512 << 20


def test_the_environment_of_the_other_process_is_accepted(monkeypatch):
    monkeypatch.setenv("PREFIXD_SLOTS", "7")
    load(GatewaySettings)


def test_an_empty_variable_counts_as_not_set(monkeypatch):
    monkeypatch.setenv("PREFIXD_SLOTS", "")
    assert load(WorkerSettings).slots is None


def test_list_flags_repeat_and_variables_split_at_commas(monkeypatch):
    monkeypatch.setenv("PREFIXD_SERVED_MODEL_NAME", "a, b")
    assert load(GatewaySettings).served_model_name == ("a", "b")
    flags = ("--served-model-name", "c", "--served-model-name", "d,e")
    assert load(GatewaySettings, *flags).served_model_name == ("c", "d,e")


@pytest.mark.parametrize(
    ("text", "value"),
    [("auto", "auto"), ("2GiB", 2 << 30), ("1.5 gib", 3 << 29), ("64MB", 64_000_000), ("4096", 4096)],
)
def test_sizes_of_kv_memory(text, value):
    assert load(WorkerSettings, "--kv-memory", text).kv_memory == value


def test_booleans_have_both_flags():
    assert load(WorkerSettings, "--no-deterministic").deterministic is False
    assert load(GatewaySettings, "--strict-model").strict_model is True


@pytest.mark.parametrize(
    ("cls", "flags", "named"),
    [
        (WorkerSettings, ["--slots", "-1"], "slots"),
        (WorkerSettings, ["--slots", "many"], "slots"),
        (WorkerSettings, ["--kv-memory", "0"], "kv_memory"),
        (WorkerSettings, ["--kv-memory=-1"], "kv_memory"),
        (WorkerSettings, ["--kv-memory", "2 bananas"], "kv_memory"),
        (WorkerSettings, ["--threads", "0"], "threads"),
        (WorkerSettings, ["--max-waiting", "0"], "max_waiting"),
        (WorkerSettings, ["--max-model-len", "-5"], "max_model_len"),
        (WorkerSettings, ["--max-model-len", "1"], "max_model_len"),
        (WorkerSettings, ["--dtype", "float8"], "dtype"),
        (WorkerSettings, ["--model", ""], "model"),
        (WorkerSettings, ["--port", "1"], "--port"),
        (WorkerSettings, ["--slot", "1"], "--slot"),
        (WorkerSettings, ["--slots"], "--slots"),
        (GatewaySettings, ["--port", "65536"], "port"),
        (GatewaySettings, ["--grace-seconds", "nan"], "grace_seconds"),
        (GatewaySettings, ["--max-body-bytes", "0"], "max_body_bytes"),
        (GatewaySettings, ["stray"], "stray"),
    ],
)
def test_nonsense_is_refused_by_name(capsys, cls, flags, named):
    assert named in refusal(capsys, cls, *flags)


def test_a_refusal_names_where_the_value_came_from(capsys, tmp_path, monkeypatch):
    config = tmp_path / "prefixd.toml"
    config.write_text("slots = -2\n")
    assert str(config) in refusal(capsys, WorkerSettings, "--config", str(config))
    monkeypatch.setenv("PREFIXD_SLOTS", "x")
    assert "PREFIXD_SLOTS" in refusal(capsys, WorkerSettings)


@pytest.mark.parametrize("text", ["slotz = 1\n", "[worker]\nslots = 1\n", "slots = \n", "slots = true\n"])
def test_a_file_of_nonsense_is_refused(capsys, tmp_path, text):
    config = tmp_path / "prefixd.toml"
    config.write_text(text)
    refusal(capsys, WorkerSettings, "--config", str(config))


def test_a_missing_file_is_refused(capsys, tmp_path):
    assert "nowhere.toml" in refusal(capsys, WorkerSettings, "--config", str(tmp_path / "nowhere.toml"))


def test_a_variable_that_no_process_knows_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("PREFIXD_SLOTZ", "1")
    assert "PREFIXD_SLOTZ" in refusal(capsys, GatewaySettings)


@pytest.mark.parametrize("cls", [GatewaySettings, WorkerSettings, ServeSettings])
def test_help_shows_every_setting_with_its_default(capsys, cls):
    with pytest.raises(SystemExit) as stopped:
        load(cls, "--help")
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in cls.model_fields.items():
        assert "--" + name.replace("_", "-") in shown
        assert field.description
        assert f"(default: {describe_default(cls, name)})" in shown


def test_all_processes_are_found_by_their_entry_points():
    assert process_settings() == {"gateway": GatewaySettings, "worker": WorkerSettings, "serve": ServeSettings}


def test_settings_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        WorkerSettings().slots = 3  # type: ignore[misc]


text = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.builds(
        WorkerSettings,
        model=text,
        dtype=st.sampled_from(["auto", "float32", "int4"]),
        max_model_len=st.none() | st.integers(2, 10**6),
        kv_memory=st.just("auto") | st.integers(1, 1 << 40),
        slots=st.none() | st.integers(0, 10**6),
        deterministic=st.booleans(),
        threads=st.none() | st.integers(1, 64),
    )
)
def test_flags_carry_worker_settings_unchanged(given_settings):
    assert load(WorkerSettings, *to_flags(given_settings, WorkerSettings)) == given_settings


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.builds(
        GatewaySettings,
        served_model_name=st.lists(text).map(tuple),
        strict_model=st.booleans(),
        chat_template=st.none() | st.just(Path("/x/y.jinja")),
        max_body_bytes=st.integers(1, 1 << 40),
        keepalive_seconds=st.floats(0.001, 1e6),
    )
)
def test_flags_carry_gateway_settings_unchanged(given_settings):
    assert load(GatewaySettings, *to_flags(given_settings, GatewaySettings)) == given_settings
