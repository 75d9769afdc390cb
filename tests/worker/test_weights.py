"""Weights come back from each kind of file as they were before it was written, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from exact_rig import Worker
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, LLAMA3_ROPE, make_tiny, save_tiny, write_gguf
from torch import Tensor

from protocol.errors import SettingsError
from protocol.model_path import EMBEDDED_MODEL, resolve_model
from worker.model_config import ModelError, load_config
from worker.vectors import HAS_PAIRS
from worker.weights import iter_weights, stored_in_four_bits, weight_names


def read(path: Path) -> dict[str, Tensor]:
    pairs = list(iter_weights(path, load_config(path)))
    weights = dict(pairs)
    assert len(weights) == len(pairs), "a name came twice"
    return weights


def assert_equal(found: dict[str, Tensor], model: Any) -> None:
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True}),
]


@pytest.mark.parametrize("shard_size", [None, "40KB"])
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_directory_gives_back_the_model(
    tmp_path: Path, family: str, changes: dict[str, Any], shard_size: str | None
) -> None:
    model = save_tiny(tmp_path, family, shard_size=shard_size, **changes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size is not None)
    found = read(tmp_path)
    assert_equal(found, model)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == weight_names(load_config(tmp_path))


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_gguf_file_gives_back_the_model(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = make_tiny(family, **changes)
    # The angles that come with Llama 3 are no weights.
    extra = {"rope_freqs.weight": torch.ones(8)} if family == "llama" else None
    write_gguf(tmp_path / "model.gguf", model, extra=extra)
    assert_equal(read(tmp_path / "model.gguf"), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floating_types_come_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save_tiny(tmp_path / "hf", "llama", dtype=dtype)
    assert_equal(read(tmp_path / "hf"), model)

    def encode(_name: str, tensor: Tensor) -> tuple[Any, GGMLQuantizationType]:
        kinds = {
            torch.bfloat16: GGMLQuantizationType.BF16,
            torch.float16: GGMLQuantizationType.F16,
            torch.float32: GGMLQuantizationType.F32,
        }
        return tensor.contiguous().view(torch.uint8).numpy(), kinds[dtype]

    write_gguf(tmp_path / "model.gguf", model, encode=encode)
    assert_equal(read(tmp_path / "model.gguf"), model)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantised_gguf_file_gives_what_the_gguf_package_makes_of_it(tmp_path: Path, kind: str) -> None:
    quantisation = GGMLQuantizationType[kind]
    model = make_tiny("llama", hidden_size=96, intermediate_size=160, head_dim=32)

    def encode(_name: str, tensor: Tensor) -> tuple[Any, GGMLQuantizationType | None]:
        if tensor.ndim == 1:
            return tensor.numpy(), None
        return gguf.quantize(tensor.numpy(), quantisation), quantisation

    write_gguf(tmp_path / "model.gguf", model, encode=encode)
    # Blocks lie within rows, so quantising the rows in their other order gives the same values.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                values = gguf.dequantize(gguf.quantize(parameter.numpy(), quantisation), quantisation)
                parameter.copy_(torch.from_numpy(values))
    assert_equal(read(tmp_path / "model.gguf"), model)


@pytest.mark.parametrize(("kind", "kept"), [("Q4_1", True), ("Q4_0", False), ("Q8_0", False)])
def test_only_a_file_of_q4_1_matrices_is_held_packed_unasked(tmp_path: Path, kind: str, kept: bool) -> None:
    quantised = GGMLQuantizationType[kind]

    def encode(name: str, tensor: Tensor) -> tuple[Any, GGMLQuantizationType | None]:
        values = tensor.float().numpy()
        if name.startswith("model.layers.") and tensor.dim() == 2:
            return gguf.quantize(values, quantised), quantised
        return values, None

    model = make_tiny("llama", hidden_size=96, intermediate_size=160, head_dim=32)
    write_gguf(tmp_path / "model.gguf", model, encode=encode)
    assert stored_in_four_bits(tmp_path / "model.gguf") is kept
    held = Worker(tmp_path / "model.gguf", dtype="auto", kv_memory="16MiB").model.dtype
    assert held == ("int4" if kept and HAS_PAIRS else "float32")
    write_gguf(tmp_path / "plain.gguf", model)
    assert not stored_in_four_bits(tmp_path / "plain.gguf")
    save_tiny(tmp_path / "directory", "llama")
    assert not stored_in_four_bits(tmp_path / "directory")


def test_a_type_that_nobody_can_read_is_refused(tmp_path: Path) -> None:
    def encode(name: str, tensor: Tensor) -> tuple[Any, GGMLQuantizationType | None]:
        if name != "model.norm.weight":
            return tensor.numpy(), None
        return tensor.to(torch.int32).numpy(), GGMLQuantizationType.I32

    write_gguf(tmp_path / "model.gguf", make_tiny("llama"), encode=encode)
    with pytest.raises(ModelError, match=r"output_norm\.weight: no way to read type I32"):
        read(tmp_path / "model.gguf")


def rewrite(directory: Path, change: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a saved model."""
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def test_tensors_that_we_compute_or_hold_already_are_passed_over(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(
        tmp_path,
        {
            "lm_head.weight": model.lm_head.weight.detach().clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        },
    )
    assert_equal(read(tmp_path), model)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"missing model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"lm_head.weight": None}, r"missing lm_head\.weight"),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.ones(96)},
            r"holds model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
        ({"model.norm.weight": torch.ones(47)}, r"model\.norm\.weight must be \[48\] and is \[47\]"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.int8)}, r"model\.norm\.weight: .* torch\.int8"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    tmp_path: Path, change: dict[str, Tensor | None], complaint: str
) -> None:
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=complaint):
        read(tmp_path)


def test_a_long_list_of_missing_tensors_is_cut(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, {name: None for name in weight_names(load_config(tmp_path)) if ".layers.1." in name})
    with pytest.raises(ModelError, match=r"layers\.1\.input_layernorm\.weight, .* and 4 more$"):
        read(tmp_path)


def test_unknown_gguf_tensors_are_named_as_they_stand(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_tiny("llama"), extra={"blk.0.ffn_gate_inp.weight": torch.ones(8, 48)})
    with pytest.raises(ModelError, match=r"holds blk\.0\.ffn_gate_inp\.weight"):
        read(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", ["hf", "model.gguf"])
def test_yielded_tensors_do_not_change_with_the_file(tmp_path: Path, kind: str) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    write_gguf(tmp_path / "model.gguf", model)
    found = read(tmp_path / kind)
    file = tmp_path / "hf" / "model.safetensors" if kind == "hf" else tmp_path / kind
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.write(b"\xff" * size)
    assert_equal(found, model)


def test_directories_without_usable_weights_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = load_config(tmp_path)
    single, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"

    single.write_bytes(single.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        list(iter_weights(tmp_path, config))
    single.unlink()
    with pytest.raises(ModelError, match="neither"):
        list(iter_weights(tmp_path, config))
    index.write_text('{"weight_map": []}')
    with pytest.raises(ModelError, match="not an index"):
        list(iter_weights(tmp_path, config))
    for name in ("../secret.safetensors", "/etc/passwd", "absent.safetensors", 7):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ModelError, match="no file in this directory"):
            list(iter_weights(tmp_path, config))


def test_the_embedded_model_has_all_its_tensors() -> None:
    try:
        path = resolve_model(EMBEDDED_MODEL)
    except SettingsError as absent:
        pytest.skip(str(absent))
    names = set()
    for name, tensor in iter_weights(path, load_config(path)):
        assert tensor.dtype == torch.float32
        assert bool(tensor.isfinite().all()), name
        names.add(name)
    assert names == weight_names(load_config(path)).keys()
