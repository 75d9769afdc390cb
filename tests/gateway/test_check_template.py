"""`prefixd check-template`: verdicts, exit codes, and what it says of every template and tokenizer we have."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tiny_model import TEMPLATE, tiny_tokenizer
from tokenizers import Tokenizer

from gateway.check_template import PROBES, _conversation, main
from gateway.model_files import ModelFiles, load_model_files
from gateway.prompts import INSIDE, PromptMaker
from gateway.template_report import report, verdict

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
NAMES = sorted(path.name for path in (SHARED / "chat_templates").glob("*.jinja"))
QWEN = SHARED / "tokenizers" / "qwen3" / "tokenizer.json.gz"

FORGETFUL = TEMPLATE.replace("for message in messages", "for message in messages[-2:]")


@cache
def qwen() -> Tokenizer:
    return Tokenizer.from_buffer(gzip.decompress(QWEN.read_bytes()))


@pytest.mark.skipif(not NAMES, reason="the shared data folder is not here")
@pytest.mark.parametrize(
    ("name", "tokenizer"), [(n, tiny_tokenizer) for n in NAMES] + [(n, qwen) for n in NAMES[::8]]
)
def test_every_boundary_of_every_real_template_is_exact_or_dropped(name: str, tokenizer: Callable[[], Tokenizer]):
    """With tokenizers that know few of the markers, so that many a boundary falls inside a token."""
    source = (SHARED / "chat_templates" / name).read_text()
    maker = PromptMaker(ModelFiles(tokenizer(), {"default": source}, {"bos_token": "<|endoftext|>"}))
    reports = [report(maker, probe, _conversation(body)) for probe, body in PROBES.items()]
    assert verdict(reports)[0] in (0, 1)
    for each in reports:
        assert each.refused is None
        assert [line.message for line in each.boundaries if line.message is not None] == [*range(len(each.roles))]
        counted = {b.position for b in each.boundaries if b.position is not None and b.kind != "interior"}
        assert len(counted) <= len(each.roles) + 1
        for line in each.boundaries:
            assert line.exact is not False
            assert (line.position is None) == (line.reason is not None)


def test_a_stable_template_gives_0_and_one_line(model_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--model", str(model_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "usable and prefix-stable"


def test_a_template_that_rewrites_history_gives_1_and_says_where(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    template = tmp_path / "forgetful.jinja"
    template.write_text(FORGETFUL)
    assert main(["--template", str(template), "--tokenizer", str(model_dir), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "rewrites"
    assert "plain chat" in data["reason"]
    turn = data["conversations"][0]["turns"][0]
    assert (turn["stable"], turn["differs_in"]) == (False, 0)


@pytest.mark.parametrize(("form", "code"), [("%d %B %Y", 0), ("%Y-%m-%d %H:%M", 1)])
def test_a_template_that_writes_the_time_of_day_gives_1(
    model_dir: Path, tmp_path: Path, form: str, code: int, capsys: pytest.CaptureFixture[str]
):
    """Two prompts of one second look as if the one started the other; the date changes once a day."""
    template = tmp_path / "clock.jinja"
    template.write_text("{{ strftime_now('" + form + "') }}\n" + TEMPLATE)
    assert main(["--template", str(template), "--tokenizer", str(model_dir)]) == code
    assert (form in capsys.readouterr().out.splitlines()[-1]) is bool(code)


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{% for %}", "line 1"), ("constant", "does not appear"), ("{{ raise_exception('never') }}", "never")],
)
def test_an_unusable_template_gives_2_and_the_reason(
    model_dir: Path, tmp_path: Path, template: str, reason: str, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "bad.jinja"
    file.write_text(template)
    arguments = ["--template", str(file), "--tokenizer", str(model_dir)]
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "unusable"
    assert reason in data["reason"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--template", "x.jinja"],
        ["--model", "a", "--tokenizer", "b"],
        ["--model", "/no/such/model"],
        ["--model", "MODEL", "--messages", "/no/such/file"],
    ],
)
def test_wrong_usage_gives_2(model_dir: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([str(model_dir) if each == "MODEL" else each for each in arguments]) == 2
    assert capsys.readouterr().err


def test_what_is_wrong_with_the_messages_is_told_by_file_and_field(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "m.json"
    for content, reason in (("", "not JSON"), ('[{"role": "user", "content": 5}]', "messages.0.content must be")):
        file.write_text(content)
        assert main(["--model", str(model_dir), "--messages", str(file)]) == 2
        said = capsys.readouterr().err
        assert f"messages: {file}: " in said
        assert reason in said


def test_messages_without_a_boundary_are_named_for_the_probes_too(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "merging.jinja"
    file.write_text("{%- for m in messages %}{{- 'ck ' + m.content + ' qui' }}{%- endfor %}")
    main(["--template", str(file), "--tokenizer", str(model_dir)])
    lines = capsys.readouterr().out.splitlines()
    assert f"  message 0 (user) has none: {INSIDE}" in lines


def test_a_conversation_of_ones_own_is_shown_boundary_by_boundary(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    messages = [
        {"role": "system", "content": "S <|im_end|>"},
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    file = tmp_path / "messages.json"
    for content in (messages, {"messages": messages, "model": "any"}):
        file.write_text(json.dumps(content))
        assert main(["--model", str(model_dir), "--messages", str(file), "--json"]) == 0
        (shown,) = json.loads(capsys.readouterr().out)["conversations"]
        lines = [(b["message"], b["kind"], b["kept"], b["exact"]) for b in shown["boundaries"]]
        assert lines == [(0, "head", True, True)] + [(at, "message", True, True) for at in (1, 2, 3)]
        assert [turn["messages"] for turn in shown["turns"]] == [2, 4]
        assert shown["turns"][0]["stable"] is True
    assert main(["--model", str(model_dir), "--messages", str(file)]) == 0
    text = capsys.readouterr().out
    assert "kept" in text
    assert "<|im_end|>" in text
    file.write_text("{")
    assert main(["--model", str(model_dir), "--messages", str(file)]) == 2


def test_an_answer_to_be_continued_and_a_boundary_inside_a_token_are_explained(model_dir: Path):
    template = TEMPLATE.replace("'<|im_end|>\\n'", "''").replace("'<|im_start|>' + message.role + '\\n'", "''")
    files = load_model_files(model_dir)
    maker = PromptMaker(ModelFiles(files.tokenizer, {"default": template}, files.special_tokens))
    body = {"messages": [{"role": "user", "content": "hel"}, {"role": "user", "content": "lo"}]}
    shown = report(maker, "merged", _conversation(body))
    assert [line.reason for line in shown.boundaries if line.message == 0] == [INSIDE]
