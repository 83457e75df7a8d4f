"""The sampler's arithmetic: noise, draws and their distribution, penalties, log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from oneloop_kernels.ops.sampling import SAMPLING, Draws, Penalties, Truncation, race, reference
from oneloop_kernels.testing import assert_close

OPS = SAMPLING.resolve(torch.device("cpu"), torch.float32)
MASK64 = (1 << 64) - 1


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def draws(num_rows, *, temperature=1.0, seed=0, index=None, min_p=None, top_k=None, top_p=None):
    """Draws with the same parameters in every row, one output index per row."""
    truncation = None
    if top_k is not None or top_p is not None:
        truncation = Truncation(
            top_k=torch.full((num_rows,), top_k or 0, dtype=torch.int64),
            top_p=torch.full((num_rows,), 1.0 if top_p is None else top_p),
            max_top_k=top_k or 0,
            all_top_k=bool(top_k),
        )
    return Draws(
        temperature=torch.full((num_rows,), temperature),
        seed=torch.full((num_rows,), seed, dtype=torch.int64),
        output_index=torch.arange(num_rows) if index is None else index,
        min_p=None if min_p is None else torch.full((num_rows,), min_p),
        truncation=truncation,
    )


def noise_by_the_book(seed, output_index, token):
    """The documented formula in Python's exact integers."""

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK64
        return z ^ (z >> 31)

    key = mix((mix(seed & MASK64) + (output_index + 1) * 0x9E3779B97F4A7C15) & MASK64)

    def bits(i):
        x = (i * ((key >> 32) | 1) + key) & 0xFFFFFFFF
        x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
        return x ^ (x >> 16)

    def exponential(i):
        return -math.log1p(-min((bits(i) % 2**31 + 0.5) * 2.0**-31, 1 - 2.0**-24))

    group, place = divmod(token, 128)
    own = [2**31 + j * 2**24 + group for j in range(8)]
    firsts = [exponential(own[0]) / 128]
    for j in (1, 2, 3):
        firsts.append(firsts[-1] + exponential(own[j]) / (128 - j))
    steps = []
    for j in (1, 2, 3):
        step = 1 + bits(own[4 + j]) % (128 - j)
        for earlier in sorted(steps):
            step += step >= earlier
        steps.append(step)
    first_place = bits(own[4]) % 128
    places = [first_place, *(first_place ^ step for step in steps)]
    assert len(set(places)) == 4
    variate = firsts[places.index(place)] if place in places else firsts[3] + exponential(token)
    return -math.log(variate)


@pytest.mark.parametrize("seed", [0, 1, -1, 12345678901234567, -(2**63), 2**63 - 1])
def test_noise_is_the_documented_function(seed):
    tokens = [0, 1, 2, 1000, 49151, 151935, 2**31 - 1]
    indices = [0, 1, 77, 2**31 - 1]
    got = OPS.noise(ints(*[seed] * 4), ints(*indices), torch.tensor(tokens, dtype=torch.int32))
    expected = [[noise_by_the_book(seed, index, token) for token in tokens] for index in indices]
    assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_noise_of_a_group_is_independent_gumbel_noise():
    """e^−noise is exponential for every token, and the same to the correlation of two in one group or in two."""
    num_rows = 40_000
    tokens = torch.tensor([0, 1, 64, 127, 128, 300], dtype=torch.int32)
    race = OPS.noise(torch.full((num_rows,), 11), torch.arange(num_rows), tokens).double().neg().exp()
    tolerance = 5 / math.sqrt(num_rows)
    assert (race.mean(0) - 1).abs().max() < tolerance
    assert (race.var(0) - 1).abs().max() < 3 * tolerance  # the variance of the square of its distance is 8
    for limit in (0.001, 0.01, 0.1, 1.0, 3.0):
        expected = 1 - math.exp(-limit)
        share = (race < limit).double().mean(0)
        assert (share - expected).abs().max() < 5 * math.sqrt(expected * (1 - expected) / num_rows)
    correlation = torch.corrcoef(race.T) - torch.eye(len(tokens))
    assert correlation.abs().max() < tolerance
    ends = torch.corrcoef((race < 0.05).double().T) - torch.eye(len(tokens))
    assert ends.abs().max() < tolerance, "nor of the small ones, which win"


def chi_square(counts, probabilities):
    """(statistic, degrees of freedom), cells of small expectation pooled."""
    expected = probabilities.double() * counts.sum()
    small = expected < 5
    observed = torch.cat((counts[~small].double(), counts[small].sum()[None].double()))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    kept = expected > 0
    statistic = ((observed - expected)[kept].square() / expected[kept]).sum()
    assert observed[~kept].sum() == 0
    return float(statistic), int(kept.sum()) - 1


def fits(counts, probabilities):
    """Whether the counts could be draws of the probabilities: within 5 standard deviations of chi-square."""
    statistic, freedom = chi_square(counts, probabilities)
    return statistic <= freedom + 5 * math.sqrt(2 * freedom)


NUM_DRAWS = 40_000
LOGITS = torch.cat((torch.linspace(-6.0, 2.0, 40), torch.tensor([-20.0, 2.5, 0.5])))


def count_draws(logits=LOGITS, **options):
    rows = logits.repeat(NUM_DRAWS, 1)
    return torch.bincount(OPS.draw(rows, draws(NUM_DRAWS, **options)), minlength=len(logits))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 987654321])
def test_draws_follow_the_softmax(temperature, seed):
    probabilities = (LOGITS / temperature).softmax(-1)
    counts = count_draws(temperature=temperature, seed=seed)
    assert fits(counts, probabilities)
    assert not fits(counts, (LOGITS / (temperature * 1.1)).softmax(-1)), "the check above cannot fail"


def test_draws_from_several_groups_follow_the_softmax():
    logits = torch.linspace(0.0, 3.0, 300)[torch.randperm(300, generator=torch.Generator().manual_seed(2))]
    assert fits(count_draws(logits, seed=5), logits.softmax(-1))
    assert fits(count_draws(torch.zeros(200), seed=6), torch.full((200,), 1 / 200))


def test_draws_over_seeds_follow_the_softmax_too():
    rows = LOGITS.repeat(NUM_DRAWS, 1)
    parameters = draws(NUM_DRAWS, index=torch.zeros(NUM_DRAWS, dtype=torch.int64))
    parameters = Draws(parameters.temperature, torch.arange(NUM_DRAWS), parameters.output_index, None, None)
    assert fits(torch.bincount(OPS.draw(rows, parameters), minlength=len(LOGITS)), LOGITS.softmax(-1))


def test_successive_draws_are_independent():
    """Pairs of successive draws fall on the product distribution."""
    logits = LOGITS[36:]
    tokens = OPS.draw(logits.repeat(NUM_DRAWS, 1), draws(NUM_DRAWS, seed=3))
    pairs = tokens[:-1] * len(logits) + tokens[1:]
    probabilities = logits.softmax(-1)
    joint = torch.outer(probabilities, probabilities).flatten()
    assert fits(torch.bincount(pairs, minlength=len(joint)), joint)


def dense_truncated(logits, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """Probabilities after min_p, top_k and top_p by sorting everything, in double precision."""
    scaled = logits.double() / temperature
    probabilities = scaled.softmax(-1)
    scaled[probabilities < min_p * probabilities.max()] = -torch.inf
    order = scaled.argsort(descending=True)
    if top_k:
        scaled[order[top_k:]] = -torch.inf
    if top_p < 1:
        mass = scaled.softmax(-1)[order].cumsum(-1)
        first_beyond = int((mass >= top_p).nonzero()[0]) + 1
        scaled[order[first_beyond:]] = -torch.inf
    return scaled.softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.7},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
        {"top_p": 0.6, "min_p": 0.15, "temperature": 0.6},
    ],
    ids=str,
)
def test_truncated_draws_follow_the_dense_reference(options):
    probabilities = dense_truncated(LOGITS, **options)
    counts = count_draws(seed=11, **options)
    assert bool((counts[probabilities == 0] == 0).all())
    assert bool((counts[probabilities > 1e-3] > 0).all())
    assert fits(counts, probabilities)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_where_the_likeliest_are_not_enough(monkeypatch, top_p):
    """The same draws as with all tokens among the likeliest, and from exactly the nucleus."""
    flat = torch.randn(400, generator=torch.Generator().manual_seed(7)) * 0.3
    flat[5] = -torch.inf
    rows = flat.repeat(4000, 1)
    expected = OPS.draw(rows.clone(), draws(4000, top_p=top_p, seed=5))
    monkeypatch.setattr(reference, "_NUM_LIKELIEST", 4)
    tokens = OPS.draw(rows, draws(4000, top_p=top_p, seed=5))
    assert torch.equal(tokens, expected)
    kept = dense_truncated(flat, top_p=top_p) > 0
    assert bool(kept[tokens].all())
    assert len(set(tokens.tolist())) > 0.9 * int(kept.sum())


def winners(logits, parameters):
    """The draw by its definition: every token's noise."""
    tokens = torch.arange(logits.shape[1], dtype=torch.int32)
    scaled = (logits - logits.amax(-1, keepdim=True)) / parameters.temperature[:, None]
    if parameters.min_p is not None:
        scaled[scaled < parameters.min_p.log()[:, None]] = -torch.inf
    return (scaled + OPS.noise(parameters.seed, parameters.output_index, tokens)).argmax(-1)


def models_logits(num_rows, vocab_size, seed):
    """As a model gives them: few likely tokens, a long tail."""
    generator = torch.Generator().manual_seed(seed)
    ranked = -1.6 * torch.arange(1, vocab_size + 1).log()
    order = torch.rand(num_rows, vocab_size, generator=generator).argsort(-1)
    return ranked[order] + torch.randn(num_rows, vocab_size, generator=generator)


@pytest.mark.parametrize("vocab_size", [97, 128, 3000, 49152])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 30.0])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_groups_that_are_not_looked_at_cannot_win(vocab_size, temperature, is_transposed):
    logits = models_logits(40, vocab_size, seed=vocab_size)
    logits[3, : vocab_size - 2] = -torch.inf
    logits[4] = 0.0
    given = logits.T.contiguous().T if is_transposed else logits.clone()
    for min_p in (None, 0.02):
        parameters = draws(40, temperature=temperature, seed=vocab_size, min_p=min_p)
        assert torch.equal(OPS.draw(given.clone(), parameters), winners(logits, parameters))


def test_few_groups_are_looked_at(monkeypatch):
    looked_at = []
    run = race._run
    monkeypatch.setattr(race, "_run", lambda *given: looked_at.append(len(given[1])) or run(*given))
    OPS.draw(models_logits(64, 49152, seed=1), draws(64))
    assert sum(looked_at) < 64 * 49152 / 128 / 8


def test_many_groups_are_looked_at_in_parts(monkeypatch):
    logits = torch.zeros(23, 3000)
    whole = OPS.draw(logits.clone(), draws(23))
    monkeypatch.setattr(race, "_GROUPS_AT_ONCE", 7)
    assert torch.equal(OPS.draw(logits.clone(), draws(23)), whole)
    assert torch.equal(whole, winners(logits, draws(23)))


@pytest.mark.parametrize(
    "options", [{}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}], ids=str
)
def test_a_draw_among_some_tokens_is_the_draw_with_the_others_masked(options):
    logits = models_logits(60, 1000, seed=3)
    token_ids = torch.stack([torch.randperm(1000)[:30].sort().values for _ in range(60)])
    among = logits.gather(1, token_ids)
    among[:20, 25:] = -torch.inf
    masked = torch.full_like(logits, -torch.inf).scatter_(1, token_ids, among)
    expected = OPS.draw(masked, draws(60, temperature=0.9, seed=4, **options))
    tokens = OPS.draw_among(among, token_ids, draws(60, temperature=0.9, seed=4, **options))
    assert torch.equal(tokens, expected)
    assert len(set(tokens.tolist())) > 20


def test_wide_nuclei_and_penalties_are_computed_in_parts(monkeypatch):
    logits = torch.randn(9, len(LOGITS), generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(reference, "_NUM_LIKELIEST", 4)
    counts = (logits > 0.5).to(torch.int32)
    penalties = Penalties(
        repetition=torch.linspace(1, 2, 9), presence=torch.linspace(0, 1, 9), frequency=torch.linspace(1, 0, 9),
        in_prompt=logits < -1, output_counts=counts,
    )  # fmt: skip

    def run():
        penalized = logits.clone()
        OPS.penalize(penalized, penalties)
        return penalized.clone(), OPS.draw(penalized, draws(9, top_p=0.9)), widest[0]

    widest = [0]
    nucleus = reference._nucleus

    def watched(scaled, top_p):
        widest[0] = max(widest[0], len(scaled))
        return nucleus(scaled, top_p)

    monkeypatch.setattr(reference, "_nucleus", watched)
    whole, tokens, num_rows = run()
    assert num_rows > 2
    widest[0] = 0
    monkeypatch.setattr(reference, "_MAX_SCRATCH_ELEMENTS", 2 * len(LOGITS))
    in_parts, same_tokens, num_rows = run()
    assert num_rows == 2
    assert torch.equal(whole, in_parts)
    assert torch.equal(tokens, same_tokens)


def test_mixed_truncation_in_one_call_equals_each_row_alone():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3000, generator=generator) * 2
    top_k, top_p = ints(0, 7, 0, 2000, 3), torch.tensor([0.5, 1.0, 0.9999, 0.8, 0.3])
    seed, index = ints(1, 2, 3, 4, 5), ints(9, 0, 4, 2, 1)
    ones = torch.ones(5)
    together = OPS.draw(logits.clone(), Draws(ones, seed, index, None, Truncation(top_k, top_p, 2000, False)))
    for row in range(5):
        one = slice(row, row + 1)
        alone = Draws(
            ones[one],
            seed[one],
            index[one],
            None,
            Truncation(top_k[one], top_p[one], int(top_k[row]), bool(top_k[row])),
        )
        assert OPS.draw(logits[one].clone(), alone).item() == together[row].item()


def test_a_row_draws_the_same_whatever_the_batch():
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1))
    seeds, indices, ones = torch.arange(64) * 7 - 100, torch.arange(64) % 5, torch.ones(64)
    together = OPS.draw(logits.clone(), Draws(ones, seeds, indices, None, None))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    shuffled = OPS.draw(logits[order], Draws(ones, seeds[order], indices[order], None, None))
    assert torch.equal(shuffled, together[order])
    assert len(set(together.tolist())) > 40


def logits_with(value):
    """Rows in which the value is everywhere, once, and almost everywhere; then finite ones."""
    logits = torch.zeros(6, 37)
    logits[0] = value
    logits[1, 5] = value
    logits[2, 1:] = value
    logits[3, ::2] = value
    logits[4] = 3e38
    return logits


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_ids_stay_in_range_and_rows_without_a_distribution_have_none(options, value):
    tokens = OPS.draw(logits_with(value), draws(6, **options))
    is_none = torch.tensor([value > -torch.inf or value != value] * 4 + [False] * 2)
    assert torch.equal(tokens == -1, is_none)
    assert bool(((tokens >= -1) & (tokens < 37)).all())
    assert torch.equal(OPS.likeliest(logits_with(value)) == -1, is_none)


def test_the_only_token_left_is_always_drawn():
    """No value of the noise can hide it: 200,000 draws, more than enough for the hash's largest values at one token."""
    logits = torch.full((1, 3), -torch.inf).repeat(200_000, 1)
    logits[:, 1] = 0.0
    assert bool((OPS.draw(logits, draws(200_000)) == 1).all())
    extremes = -torch.log(-torch.log1p(-torch.tensor([2.0**-32, 1 - 2.0**-24])))
    assert bool(extremes.isfinite().all())


def test_low_temperature_is_greedy_and_does_not_overflow():
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(3)) * 1e4
    assert torch.equal(OPS.draw(logits.clone(), draws(50, temperature=1e-5)), logits.argmax(-1))


def test_penalties():
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 0.5], [2.0, -2.0, 1.0, -1.0, 0.5]])
    in_prompt = torch.tensor([[True, True, False, False, False], [False] * 5])
    counts = torch.tensor([[0, 3, 1, 0, 0], [0, 0, 2, 1, 0]], dtype=torch.int32)
    penalties = Penalties(
        repetition=torch.tensor([2.0, 1.0]),
        presence=torch.tensor([0.25, 0.5]),
        frequency=torch.tensor([0.5, -1.0]),
        in_prompt=in_prompt,
        output_counts=counts,
    )
    OPS.penalize(logits, penalties)
    expected = [
        [1.0, -4.0 - 3 * 0.5 - 0.25, 0.5 - 0.5 - 0.25, -1.0, 0.5],
        [2.0, -2.0, 1.0 + 2 - 0.5, -1.0 + 1 - 0.5, 0.5],
    ]
    torch.testing.assert_close(logits, torch.tensor(expected))


def test_repetition_penalty_is_that_of_transformers():
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 90, generator=generator)
    sequences = torch.randint(0, 90, (3, 40), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(sequences, logits.clone())
    in_prompt = torch.zeros(3, 90, dtype=torch.bool).scatter_(1, sequences[:, :25], True)
    counts = torch.zeros(3, 90, dtype=torch.int32)
    counts.scatter_add_(1, sequences[:, 25:], torch.ones(3, 15, dtype=torch.int32))
    zeros = torch.zeros(3)
    OPS.penalize(logits, Penalties(torch.full((3,), 1.3), zeros, zeros, in_prompt, counts))
    assert_close(logits, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_top_logprobs(transposed):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(5)) * 3
    expected = logits.double().log_softmax(-1)
    chosen = ints(7, int(logits[1].argmax()), int(logits[2].argmin()), 299)
    given = logits.t().contiguous().t() if transposed else logits
    top = OPS.top_logprobs(given, chosen, 5)
    assert torch.equal(top.token_ids[:, 0], chosen)
    assert torch.equal(top.token_ids[:, 1:], logits.topk(5).indices)
    assert_close(top.logprobs, expected.gather(1, top.token_ids), torch.float32)
    ranks = [(logits[row] > logits[row, token]).sum() + 1 for row, token in enumerate(chosen.tolist())]
    assert top.ranks.tolist() == [int(rank) for rank in ranks]
    assert (top.ranks[1], top.ranks[2]) == (1, 300)
    assert OPS.top_logprobs(given, chosen, 0).logprobs.shape == (4, 1)


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 100])
def test_masks_are_read_bit_by_bit(vocab_size):
    """The lowest bit of the first word is token 0; the highest bit of a word is one like the others."""
    logits = torch.arange(3 * vocab_size, dtype=torch.float32).reshape(3, vocab_size)
    allowed = [{0, vocab_size - 1}, {30}, set(range(0, vocab_size, 3))]
    words = torch.zeros(3, -(-vocab_size // 32), dtype=torch.int64)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= 1 << token % 32
    masked = logits.clone()
    OPS.mask(masked, words.to(torch.int32))
    for row, tokens in enumerate(allowed):
        for token in range(vocab_size):
            assert masked[row, token] == (logits[row, token] if token in tokens else -torch.inf)
