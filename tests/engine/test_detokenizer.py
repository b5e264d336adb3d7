"""Text from tokens: whole characters only, and stop strings never shown, however tokens cut them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from attn_backends.engine.live import Detokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_llama)


def pieces(tokenizer: PreTrainedTokenizerBase, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    """What is shown for each token (one a byte), and at the end."""
    detokenizer = Detokenizer(tokenizer, stop)
    shown = []
    for token in tokenizer(text).input_ids:
        shown.append(detokenizer.add(token))
        if detokenizer.stopped:
            break
    shown.append(detokenizer.finish())
    return shown, detokenizer


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20))
def test_any_text_comes_out_whole(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    shown, detokenizer = pieces(tokenizer, text)
    assert "".join(shown) == detokenizer.text == text


def test_no_half_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    shown, _ = pieces(tokenizer, "aé€😀")
    assert [piece for piece in shown if piece] == ["a", "é", "€", "😀"]


@given(before=st.text("abE", max_size=8), after=st.text("abEND", max_size=8))
def test_stop_strings_never_show(tokenizer: PreTrainedTokenizerBase, before: str, after: str) -> None:
    text = before + "END" + after
    shown, detokenizer = pieces(tokenizer, text, ("END", "ENDx"))
    assert "".join(shown) == detokenizer.text == text.partition("END")[0]
    assert detokenizer.stopped


def check_stops(tokenizer: PreTrainedTokenizerBase, text: str, stops: list[str]) -> None:
    """The token that completes a stop string ends the text, where the earliest of those then in it begins."""
    ends = [text[:n] for n in range(1, len(text) + 1) if any(stop in text[:n] for stop in stops)]
    expected = text if not ends else ends[0][: min(ends[0].find(stop) for stop in stops if stop in ends[0])]
    shown, detokenizer = pieces(tokenizer, text, tuple(stops))
    assert "".join(shown) == detokenizer.text == expected, (text, stops)
    assert detokenizer.stopped == bool(ends)


@settings(max_examples=300, derandomize=True)
@given(text=st.text("abc", max_size=10), stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=4))
def test_the_earliest_stop_string_cuts_in_whatever_order_they_are_listed(
    tokenizer: PreTrainedTokenizerBase, text: str, stops: list[str]
) -> None:
    check_stops(tokenizer, text, stops)
    check_stops(tokenizer, text, stops[::-1])


@given(token_ids=st.lists(st.integers(0, 258), max_size=30), stop=st.sampled_from([(), ("END",), ("b", "ab")]))
def test_kept_tokens_give_the_text_of_added_ones(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], stop: tuple[str, ...]
) -> None:
    """Also of bytes that are no characters, and of tokens that have no text."""
    added, kept = Detokenizer(tokenizer, stop), Detokenizer(tokenizer, stop)
    for token_id in token_ids:
        if not added.stopped:
            added.add(token_id)
    added.finish()
    kept.keep(token_ids)
    assert kept.finish() == kept.text == added.text
    assert kept.stopped == added.stopped


def test_what_could_have_become_a_stop_string_is_shown_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    shown, detokenizer = pieces(tokenizer, "the EN", ("END",))
    assert shown[-1] == "EN"
    assert detokenizer.text == "the EN"
    assert not detokenizer.stopped
