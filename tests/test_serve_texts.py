"""Prompts longer than the model: found before all of their text is tokenized."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.cli.serving.utils import BaseHandler

from kbit.cli import serve_texts
from kbit.cli.serve_fields import RequestError

PIECE = serve_texts._PIECE


def counted(text, per_character, positions):
    """The characters that a text's look took, of a tokenizer that makes so many tokens of each."""
    taken = []

    def count(piece):
        taken.append(len(piece))
        return int(len(piece) * per_character)

    try:
        serve_texts.check_text(text, count, positions)
    except RequestError as error:
        return sum(taken), str(error)
    return sum(taken), None


@pytest.mark.parametrize("positions", [100, 2048, 10**5])
def test_what_is_short_is_not_looked_at(positions):
    most = max(PIECE, 8 * positions)
    assert counted("x" * most, 1, positions) == (0, None)
    assert counted("x" * (most + 1), 0.001, positions) == (most + 1, None)


@pytest.mark.parametrize(("positions", "pieces"), [(2048, 1), (2**17, 9)])
def test_the_look_at_a_long_prompt_ends_with_the_positions(positions, pieces):
    taken, told = counted("x" * 2**22, 0.25, positions)
    assert taken == pieces * PIECE
    assert told == (
        f"the prompt's 4,194,304 characters have more tokens than the {positions} positions that the model "
        f"knows (max_position_embeddings), of which an answer needs at least 1. Shorten it."
    )


def test_long_tokens_fit():
    """As those of spaces, and words that are unknown."""
    assert counted("x" * 2**22, 1 / 128, 2**15) == (2**22, None)
    assert counted("x" * 2**22, 0, 100) == (2**22, None)


def test_where_positions_are_unknown_characters_are_counted(monkeypatch):
    monkeypatch.setattr(serve_texts, "MOST_CHARACTERS", 10**6)
    assert counted("x" * 10**6, 1, None) == (0, None)
    told = "the prompt may have at most 1,000,000 characters, got 1,000,001. Shorten it."
    assert counted("x" * (10**6 + 1), 1, None) == (0, told)


def test_only_requests_are_looked_at(monkeypatch):
    for owner, name in ((BaseHandler, "_resolve_model"), (PreTrainedTokenizerBase, "__call__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=9))
    model.config.get_text_config = lambda **_: model.config
    monkeypatch.setattr(BaseHandler, "_resolve_model", lambda self, body: ("name", model, None))
    serve_texts.refuse_long_texts()
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    long, sparse = "a " * PIECE, "a" + " " * PIECE * 2
    assert len(tokenizer(long)["input_ids"]) == PIECE
    token = serve_texts._model.set(None)
    try:
        BaseHandler._resolve_model(None, {})
        for text in (long, [long], ["a", long]):
            with pytest.raises(RequestError, match="more tokens than the 9 positions"):
                tokenizer(text)
        assert tokenizer(sparse)["input_ids"] == [1]
        assert tokenizer([["a", "a"]], is_split_into_words=True)["input_ids"] == [[1, 1]]
    finally:
        serve_texts._model.reset(token)
