"""Grammars that answers must follow: which tokens may come next, by llguidance.

A grammar looks at tokens alone: as the bytes that a gateway has told for each id. It decides about the rows of logits
of its own choice and nothing else: no state, no key and no other row knows of it.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from protocol.messages import Vocabulary

_MAX_REASON = 500  # characters of an error that are passed on
_MAX_ITEMS = 20_000  # that may come next at one place: some for each optional property and each tool
_NO_DETAILS = "\n<non-verbose/>"  # ends errors that we ask to be short


class GrammarError(Exception):
    """A grammar that cannot be followed; the message says why."""


class Constraint:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Constraint:
        """Another answer, at the same place."""
        return Constraint(self._matcher.deep_copy())

    @property
    def ended(self) -> bool:
        """The grammar is satisfied and nothing more can come."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> bytearray:
        """A byte for each token: 0 where it may not come next. Tokens that end an answer may where it can end.

        Raises `GrammarError` where the grammar has failed, as by going over its limits.
        """
        allowed = bytearray(self._matcher.compute_logit_bias())
        if self._matcher.is_error():
            reason = self._matcher.get_error().removesuffix(_NO_DETAILS)
            raise GrammarError(f"it failed on its way: {reason[:_MAX_REASON]}")
        return allowed

    def accept(self, token: int) -> None:
        """Go on by a token. One that does not fit makes the next `mask` fail."""
        self._matcher.consume_token(token)


class Compiler:
    """Compiles grammars for one vocabulary, whose tokenizer is made for the first. Not for two threads at once."""

    def __init__(self, vocab_size: int, vocabulary: Vocabulary) -> None:
        self._vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None

    def constraint(self, grammar: str) -> Constraint:
        """The start of an answer. Raises `GrammarError`."""
        if self._tokenizer is None:
            self._tokenizer = self._build()
        limits = LLParserLimits(max_items_in_row=_MAX_ITEMS, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error()[:_MAX_REASON])
        return Constraint(matcher)

    def _build(self) -> LLTokenizer:
        try:
            tokens = [bytes.fromhex(token) for token in self._vocabulary.tokens.split(" ")]
        except ValueError as error:
            raise GrammarError(f"the vocabulary is not hex: {error}") from error
        size = self._vocab_size
        tokens = (tokens + [b""] * (size - len(tokens)))[:size]  # rows of logits without a token never come
        ends = [token for token in self._vocabulary.end_token_ids if 0 <= token < size]
        special = [token for token in self._vocabulary.special_token_ids if 0 <= token < size]
        if not ends:  # llguidance would add one of its own, for which rows of logits have no place
            raise GrammarError("the vocabulary has no token that ends an answer")
        source = _Tokens(tokens, special, ends[0])
        # In two steps: either lets no other thread run, not even the one that tells gateways that we are alive.
        bare = LLTokenizer(TokenizerWrapper(source), eos_token=ends, slices=[])
        source.trie = bare
        return bare.with_slices(LLTokenizer.general_slices())


class _Tokens:
    """What `TokenizerWrapper` asks for. Text is cut greedily: needed only where a grammar forces text."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self.trie: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        if self.trie is None or not isinstance(text, str):
            raise TypeError("only text, and once the vocabulary is known")
        return self.trie.greedy_tokenize(text)
