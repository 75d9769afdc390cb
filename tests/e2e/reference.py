"""Greedy answers as `transformers` gives them: model, template and tokenizer read without any code of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

Messages = Sequence[dict[str, Any]]


class Reference:
    """One model. Answers are computed once and remembered."""

    def __init__(self, model: Any, tokenizer: Any, end_id: int, threads: int | None = None) -> None:
        """`threads` to compute with; as many as there are cores if None."""
        self._threads = threads or torch.get_num_threads()
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def prompt_ids(self, messages: Messages) -> list[int]:
        """The whole prompt, with what asks for an answer."""
        return self._ids(messages, True)

    def plain_ids(self, text: str) -> list[int]:
        """Text as it is."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def history_tokens(self, messages: Messages) -> int:
        """How many tokens stand before the end of the last message: where its boundary is."""
        return len(self._ids(messages, False))

    def text(self, messages: Messages, count: int = 12) -> str:
        """The answer of up to `count` tokens."""
        return self.continuation(self.prompt_ids(messages), count)

    def continuation(self, ids: Sequence[int], count: int = 12) -> str:
        chosen = self._answers.get(tuple(ids), [])
        if len(chosen) < count and self._end_id not in chosen:
            chosen = self._answers[tuple(ids)] = self._generate(ids, count)
        chosen = chosen[:count]
        return self._tokenizer.decode(chosen[: chosen.index(self._end_id)] if self._end_id in chosen else chosen)

    def next_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of the token after `ids`."""
        with torch.inference_mode(), self._on_threads():
            return self._model(torch.tensor([list(ids)])).logits[0, -1].log_softmax(-1)

    @contextmanager
    def _on_threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _ids(self, messages: Messages, ask: bool) -> list[int]:
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
        return self.plain_ids(text)

    def _generate(self, ids: Sequence[int], count: int) -> list[int]:
        inputs = torch.tensor([list(ids)])
        with self._on_threads():
            found = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=self._end_id,
                pad_token_id=self._end_id,
            )
        return found[0, len(ids) :].tolist()


def of_directory(folder: Path, end_id: int) -> Reference:
    """The reference of a small random model in Hugging Face layout, which more threads would make slower."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.chat_template = AutoTokenizer.from_pretrained(folder).chat_template
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Reference(model, tokenizer, end_id, threads=1)


def of_gguf(file: Path) -> Reference:
    """The reference of a Llama in GGUF that asks for SmolLM's splitting of digits, which `transformers` leaves out.

    Its weights are read with the `gguf` package: the loader of `transformers` needs one more dependency.
    """
    reader = GGUFReader(file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return Reference(_llama(reader), tokenizer, _field(reader, "tokenizer.ggml.eos_token_id"))


_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def _llama(reader: GGUFReader) -> LlamaForCausalLM:
    heads = {name: _field(reader, f"llama.attention.head_count{name}") for name in ("", "_kv")}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads[""],
        num_key_value_heads=heads["_kv"],
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
    )
    state = {}
    for name, tensor in tensors.items():
        shape = [int(size) for size in reversed(tensor.shape)]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float().reshape(shape)
        *layer, part, _ = name.split(".")
        if part in ("attn_q", "attn_k"):  # neighbouring rows are the two halves of a rotated pair
            count = heads["" if part == "attn_q" else "_kv"]
            values = values.view(count, -1, 2, shape[1]).transpose(1, 2).reshape(shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        state[f"{prefix}{_GGUF_NAMES[part]}.weight"] = values
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied to the embeddings
    return model


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()
