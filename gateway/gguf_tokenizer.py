"""A `tokenizers` tokenizer from the metadata of a GGUF file.

GGUF stores the vocabulary but names the pre-tokenizer by a word (`tokenizer.ggml.pre`); what the words mean is
listed here. A word that is not listed is refused by name: a wrong split changes the model's input silently.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from protocol.errors import SettingsError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DIGIT = r"\p{N}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES.partition('|')[2]}"
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")  # for files older than the words

# Each word's splits, one after the other.
_PRE: dict[str, tuple[str, ...]] = {
    "default": _UNNAMED,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum", "trillion", "a.x-4.0"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGIT, _GPT2)
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "seed-coder": (_SEED,),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
}
# Words of the vocabulary skip the merges; plain text begins with BOS where the file does not say.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
_COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen")  # their tokenizers compose characters (NFC) first


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describe. Raises `SettingsError` for a kind that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise SettingsError(f"model: GGUF tokenizer model {kind!r} is not supported (gpt2 and llama are)")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, token_kind in zip(tokens, kinds, strict=False)
        if token_kind == _CONTROL
    ]
    plain = [
        AddedToken(token, special=False, normalized=False)
        for token, token_kind in zip(tokens, kinds, strict=False)
        if token_kind == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    _add_ends(tokenizer, metadata, kind)
    return tokenizer


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    pre = _pre(metadata)
    if pre not in _PRE:
        raise SettingsError(f"model: GGUF pre-tokenizer {pre!r} is not supported; known: {', '.join(_PRE)}")
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(metadata, "merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    tokenizer.pre_tokenizer = _pre_tokenizer(_PRE[pre])
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed(metadata: dict[str, Any], name: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise SettingsError(f"model: the GGUF file lacks tokenizer.ggml.{name}")
    return value


def _pre(metadata: dict[str, Any]) -> Any:
    return metadata.get("tokenizer.ggml.pre", "default")


def _pre_tokenizer(splits: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if split == _DIGIT
        else pre_tokenizers.Split(Regex(split), behavior="isolated")
        for split in splits
    ]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    """A SentencePiece BPE model. GGUF keeps scores instead of merges: the better score merges first."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores: list[float] = _listed(metadata, "scores")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [
            (token[:at], token[at:])
            for at in range(1, len(token))
            if token[:at] in vocabulary and token[at:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, pair) for pair in pairs]
    merges.sort(key=lambda merge: merge[0], reverse=True)  # stable: pairs of one token stay in order
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [pair for _, pair in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # The blank is put before any text that stands at the start or behind an added token, also before one that it has.
    prefix = [normalizers.Prepend("▁")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _add_ends(tokenizer: Tokenizer, metadata: dict[str, Any], kind: str) -> None:
    """Make plain encoding add the tokens that the metadata say it adds."""
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    usual = kind == "llama" or _pre(metadata) in _WHOLE_WORDS
    add_bos = bos is not None and metadata.get("tokenizer.ggml.add_bos_token", usual)
    add_eos = eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False)
    if not (add_bos or add_eos):
        return
    single = ([tokens[bos]] if add_bos else []) + ["$A"] + ([tokens[eos]] if add_eos else [])
    special = ([(tokens[bos], bos)] if add_bos else []) + ([(tokens[eos], eos)] if add_eos else [])
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
