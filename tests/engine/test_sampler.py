"""Sampled frequencies are the distribution's, and no request's tokens depend on its neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_backends.engine.config import SamplingParams
from attn_backends.engine.request import Request
from attn_backends.engine.sampler import PendingTokens, Sampler, _thresholds

PROBABILITIES = [0.4, 0.3, 0.15, 0.1, 0.05]


def make(name: str = "r", num_output_tokens: int = 0, **sampling: object) -> Request:
    request = Request(name, [1], SamplingParams.model_validate(sampling))
    request.token_ids += [0] * num_output_tokens
    return request


def frequencies(probabilities: list[float], num_draws: int = 20_000, **sampling: object) -> list[float]:
    logits = torch.tensor(probabilities).log().expand(num_draws, -1)
    drawn = Sampler().sample(logits, [make(str(i), **{"temperature": 1.0, **sampling}) for i in range(num_draws)])
    return (torch.bincount(torch.tensor(drawn), minlength=len(probabilities)) / num_draws).tolist()


def normalised(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, [p**2 for p in PROBABILITIES]),
        ({"temperature": 1e-30}, [1, 0, 0, 0, 0]),
        ({"top_k": 2}, [0.4, 0.3, 0, 0, 0]),
        ({"top_k": 99}, PROBABILITIES),
        ({"top_p": 0.35}, [1, 0, 0, 0, 0]),  # never none at all
        ({"top_p": 0.6}, [0.4, 0.3, 0, 0, 0]),
        ({"top_p": 0.8}, [0.4, 0.3, 0.15, 0, 0]),
        ({"top_k": 2, "top_p": 0.55}, [1, 0, 0, 0, 0]),  # of the top two alone, the first has 0.57
        ({"top_k": 4, "top_p": 0.999}, [0.4, 0.3, 0.15, 0.1, 0]),
    ],
)
def test_frequencies_are_the_distributions(sampling: dict[str, object], weights: list[float]) -> None:
    order = [3, 0, 4, 1, 2]  # the vocabulary is not sorted
    shuffled = frequencies([PROBABILITIES[i] for i in order], **sampling)
    assert shuffled == pytest.approx([normalised(weights)[i] for i in order], abs=0.012)
    assert [f == 0 for f in shuffled] == [weights[i] == 0 for i in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_and_leaves_the_logits_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 100).to(dtype)
    before = logits.clone()
    rows = [make(str(i), temperature=1.0 if i == 3 else 0.0, top_k=1 if i == 3 else None) for i in range(5)]
    assert Sampler().sample(logits, rows) == logits.argmax(-1).tolist()
    Sampler().sample(logits, [make(str(i), temperature=0.8, top_p=0.9) for i in range(5)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [1, 97, 96, 512, 960, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_equal_logits_is_taken(dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (7, vocab), generator=generator).to(dtype)
    logits[1] = -torch.inf
    logits[1, vocab // 2] = -5
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert Sampler().sample(logits, [make() for _ in range(7)]) == expected


def test_no_rows_give_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, 100), []) == []


settings_of_a_row = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        "top_k": st.sampled_from([None, 1, 3, 300, 5000]),
        "top_p": st.sampled_from([0.01, 0.5, 0.95, 1.0]),
        "seed": st.sampled_from([None, 0, 7, -1, 2**70]),
    }
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(settings_of_a_row, min_size=1, max_size=6), order=st.randoms(), bfloat16=st.booleans())
def test_a_rows_token_does_not_depend_on_the_batch(
    rows: list[dict[str, object]], order: object, bfloat16: bool
) -> None:
    logits = torch.randn(len(rows), 6000, generator=torch.Generator().manual_seed(1)) * 2
    logits = logits.bfloat16() if bfloat16 else logits  # bfloat16 has ties
    requests = [make(str(i), num_output_tokens=i, **row) for i, row in enumerate(rows)]
    together = Sampler(3).sample(logits, requests)
    alone = [Sampler(3).sample(logits[i : i + 1], [request])[0] for i, request in enumerate(requests)]
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    moved = Sampler(3).sample(logits[shuffled], [requests[i] for i in shuffled])
    assert together == alone
    assert moved == [together[i] for i in shuffled]


def test_the_nucleus_is_the_same_whether_found_among_few_tokens_or_all() -> None:
    flat, peaked = torch.zeros(1, 9000), torch.zeros(1, 9000)
    flat[0] = torch.linspace(0, 1, 9000)
    peaked[0, 17], peaked[0, 4711] = 20, 19
    rows = [make("flat", temperature=1.0, top_p=0.5), make("peaked", temperature=1.0, top_p=0.5)]
    weights = flat[0].softmax(-1).double().sort(descending=True).values
    smallest = 9000 - int((weights.cumsum(-1) - weights < 0.5).sum())  # logits ascend with the token id
    for n in range(50):
        rows = [make(r.request_id, n, temperature=1.0, top_p=0.5) for r in rows]
        token, peak = Sampler().sample(torch.cat([flat, peaked]), rows)
        assert token >= smallest
        assert peak == 17


@pytest.mark.parametrize(("top_p", "least"), [(0.25, 4.0), (0.5, 4.0), (0.51, 2.0), (0.75, 2.0), (0.76, 1.0)])
def test_a_nucleus_ends_where_the_sum_is_reached(top_p: float, least: float) -> None:
    weights = torch.tensor([[1.0, 4.0, 2.0, 1.0]])
    assert _thresholds(weights, [SamplingParams(top_p=top_p)]).tolist() == [[least]]


def test_a_large_top_k_keeps_them_all() -> None:
    logits = torch.linspace(0, 1, 2000).expand(2000, -1)  # ascending with the token id
    drawn = set(Sampler().sample(logits, [make(str(i), temperature=1.0, top_k=500) for i in range(2000)]))
    assert min(drawn) >= 1500
    assert len(drawn) > 450


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2.0**-53, 3)])
def test_extreme_random_numbers_stay_among_tokens_that_have_a_weight(
    monkeypatch: pytest.MonkeyPatch, uniform: float, token: int
) -> None:
    monkeypatch.setattr(Sampler, "_uniform", lambda self, request, num_ahead: uniform)
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, -1.0, -torch.inf]])
    assert Sampler().sample(logits, [make(temperature=1.0)]) == [token]


def test_seeds_and_positions_choose_the_random_numbers() -> None:
    logits = torch.zeros(1, 10_000)

    def tokens(engine_seed: int, name: str, seed: int | None) -> list[int]:
        rows = [make(name, n, temperature=1.0, seed=seed) for n in range(20)]
        return [Sampler(engine_seed).sample(logits, [row])[0] for row in rows]

    assert tokens(0, "a", 5) == tokens(1, "b", 5)  # a seed of its own is all that counts
    assert tokens(0, "a", 5) != tokens(0, "a", 6)
    assert tokens(0, "a", None) == tokens(0, "a", None)  # else engine seed and request
    assert tokens(0, "a", None) != tokens(1, "a", None)
    assert tokens(0, "a", None) != tokens(0, "b", None)
    assert len(set(tokens(0, "a", 5))) > 15  # a new number for each token


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_name_their_request(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 50)
    logits[1, 20] = bad
    rows = [make(name, temperature=temperature) for name in ("fine", "broken", "good")]
    with pytest.raises(FloatingPointError, match=r"request 'broken' \(1 of 3 rows\): logits are not finite"):
        Sampler().sample(logits, rows)


def test_a_step_that_is_not_finite_is_found_among_several_and_its_tokens_can_be_fed_on() -> None:
    requests = [make("fine"), make("broken", temperature=1.0)]
    logits = torch.zeros(3, 2, 4)
    logits[1, 1, 2] = float("nan")
    steps = [Sampler().choose(each, requests, ahead) for ahead, each in enumerate(logits)]
    assert all(0 <= token < 4 for tokens, _ in steps for token in tokens.tolist())
    tokens, largest = zip(*steps, strict=True)
    pending = PendingTokens(tokens, largest).wait()
    assert pending == [(each.tolist(), lost) for each, lost in zip(tokens, ([], [1], []), strict=True)]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((200, 50), -torch.inf)
    logits[:, 30] = 1.0
    assert set(Sampler().sample(logits, [make(str(i), temperature=2.0) for i in range(200)])) == {30}


def test_rows_and_requests_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows for 1 requests"):
        Sampler().sample(torch.zeros(2, 5), [make()])
