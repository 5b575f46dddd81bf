"""The draw of the next token: the twin against the host's sampler, and the kernels against the twin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.processors import Processor
from dsv4nb.engine.sampler import choose, random_words
from dsv4nb_kernels import draw as kernel
from dsv4nb_kernels._draw_rules import Settings, Stages
from dsv4nb_kernels.reference import _fixed
from dsv4nb_kernels.reference import draw as twin
from dsv4nb_kernels.reference.draw import NOBODY, Rule

CUT = kernel.Tuning(block=512)
V = 700  # two blocks, the last not whole


def test_m27_masses_ascend_with_their_log_weights_and_stay_near_the_exponential() -> None:
    log_weights = np.sort(np.random.default_rng(0).uniform(-45, 0, 50_000))
    log_weights = np.concatenate((log_weights, np.nextafter(log_weights, -99), [0.0, -0.0, -1e300, -math.inf]))
    log_weights.sort()
    found = _fixed.masses(log_weights)
    assert (np.diff(found) >= 0).all() and found[-1] == _fixed.ONE and found[0] == 0
    assert abs(found / _fixed.ONE - np.exp(log_weights)).max() < 0.5 / _fixed.GRAIN + 2e-14


def test_m27_times_and_scores_are_the_logarithms_rounded() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 50_000, dtype=np.uint32)
    words[:4] = 0, 1, (1 << 32) - 129, (1 << 32) - 1
    u = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    times = _fixed.times(words)
    assert times.tolist() == (-np.log1p(-u.astype(np.float64))).astype(np.float32).tolist()
    scores = _fixed.scores(np.zeros(len(times)), times)
    assert scores.tolist() == (-np.log(times.astype(np.float64)).astype(np.float32)).tolist()


def test_shares_of_a_mass_are_reached_and_passed() -> None:
    assert [_fixed.reaching(4, share) for share in (1e-9, 0.25, 0.5, 0.51, 1.0)] == [1, 1, 2, 3, 4]
    assert [_fixed.passing(4, share) for share in (0.0, 0.25, 0.5, 0.51, 1 - 2**-53)] == [1, 2, 3, 3, 4]


def test_the_twins_words_are_the_hosts() -> None:
    ids = np.arange(100)
    for seed, position, stream in ((0, 0, 0), ((1 << 64) - 3, 1 << 20, 1), (1 << 63, 7, 2)):
        rule = Rule(seed=seed, position=position, stream=stream)
        assert twin.random_words(ids, rule).tolist() == random_words(ids, 100, seed, position, stream).tolist()


def config_of(rule: Rule) -> SamplerConfig:
    """What a person would have set for a row."""
    return SamplerConfig(
        temperature=rule.temperature,
        top_k=rule.top_k,
        top_p=rule.top_p,
        min_p=rule.min_p,
        seed=rule.seed,
        repetition_penalty=rule.repetition,
        frequency_penalty=rule.frequency,
        presence_penalty=rule.presence,
    )


RULES = [
    Rule(seed=(1 << 64) - 5, position=3),
    Rule(top_k=20, seed=7, position=1 << 30),
    Rule(top_p=0.8, temperature=1.3),
    Rule(top_k=30, top_p=0.7, min_p=0.01, temperature=0.8, seed=1 << 40),
    Rule(min_p=0.3, stream=1),
    Rule(temperature=0.0, top_p=0.5),
    Rule(top_k=1, position=9),
    Rule(top_k=5000, top_p=0.999999, position=2, temperature=40.0),
]


def draw_rows(count: int, vocab: int, device: torch.device, seed: int = 0) -> Tensor:
    """A row of numbers, one of many ties, one of equals alone, one with few tokens left, and again."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator) * 4
    for row in range(count):
        if row % 4 == 1:
            logits[row] = logits[row].round()
        elif row % 4 == 2:
            logits[row] = torch.where(torch.rand(vocab, generator=generator) < 0.5, 0.0, -0.0)
        elif row % 4 == 3:
            logits[row, torch.rand(vocab, generator=generator) < 0.98] = -math.inf
    return logits.to(device)


def test_m27_the_twin_draws_what_the_host_draws() -> None:
    places = 0
    for turn in range(60):
        rules = [replace(rule, position=rule.position + turn) for rule in RULES]
        for shift in range(4):
            logits = draw_rows(len(rules), V, torch.device("cpu"), seed=turn).roll(shift, 0)
            drawn = twin.draw(logits, rules)
            expected = [
                NOBODY
                if not row.amax().isfinite()
                else choose(row.numpy(), config_of(rule), rule.position, rule.stream)
                for row, rule in zip(logits, rules, strict=True)
            ]
            assert drawn.ids.tolist() == expected
            places += len(set(expected))
    assert places > 500


def draw_extras(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Biases, some of them bans, and counts of a window."""
    generator = torch.Generator().manual_seed(rows)
    bias = torch.where(torch.rand(rows, vocab, generator=generator) < 0.1, 0.1, 0.0).double()
    bias[:, ::7] = -math.inf
    counts = torch.randint(0, 4, (rows, vocab), generator=generator, dtype=torch.int32)
    return bias.to(device), (counts - 1).clamp_min(0).to(device)


PENALISED = [replace(rule, repetition=1.3, frequency=0.2, presence=-0.1) for rule in RULES]


def test_m25_the_twin_processes_a_row_as_the_host_does() -> None:
    bias, counts = draw_extras(len(RULES), V, torch.device("cpu"))
    for i, (row, rule) in enumerate(zip(draw_rows(len(RULES), V, torch.device("cpu")), PENALISED, strict=True)):
        pairs = tuple((token, value) for token, value in enumerate(bias[i].tolist()) if value)
        window = [token for token, count in enumerate(counts[i].tolist()) for _ in range(count)]
        host = Processor(replace(config_of(rule), logit_bias=pairs), window, V)
        given = row.clone()
        assert torch.equal(twin.process(given, rule, bias[i], counts[i]), torch.from_numpy(host.apply(row.numpy())))
        assert torch.equal(given, row)


def run(
    logits: Tensor, rules: list[Rule], bias: Tensor | None = None, counts: Tensor | None = None
) -> tuple[kernel.Drawn, Stages]:
    """Holds the kernels to their own rows and to every element of them."""
    rows, device, cut = logits.shape[0], logits.device, CUT if logits.shape[1] < 10_000 else kernel.TUNING
    stages = Stages.of(rules, biased=bias is not None, penalised=counts is not None)
    ids = torch.full((rows + 4,), -7, dtype=torch.int32, device=device)
    room = torch.full((rows + 4,), 7.0, device=device)
    out = kernel.Drawn(ids[:rows], room[:rows])
    before = logits.clone()
    kernel.launch(logits, Settings.of(rules, device), stages, cut, bias=bias, counts=counts, out=out)
    assert (ids[rows:] == -7).all() and (room[rows:] == 7).all()
    assert torch.equal(logits.nan_to_num(5), before.nan_to_num(5))
    return out, stages


def require_twin(logits: Tensor, rules: list[Rule], bias: Tensor | None = None, counts: Tensor | None = None) -> None:
    drawn, _ = run(logits, rules, bias, counts)
    host = [None if given is None else given.cpu() for given in (bias, counts)]
    expected = twin.draw(logits.cpu(), rules, bias=host[0], counts=host[1])
    assert drawn.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(
        drawn.log_probs.cpu(), expected.log_probs.float(), rtol=2e-6, atol=2e-6, equal_nan=True, check_dtype=False
    )


@pytest.mark.kernels
@pytest.mark.parametrize("shift", [0, 1])
def test_m27_the_kernels_draw_what_the_twin_draws(shift: int, place: torch.device) -> None:
    require_twin(draw_rows(8, V, place).roll(shift, 0).contiguous(), RULES)


@pytest.mark.kernels
@pytest.mark.parametrize("rule", [RULES[0], RULES[1], RULES[2], RULES[6]], ids=["race", "top-k", "top-p", "greedy"])
def test_m27_each_choice_of_launches_draws_what_the_twin_draws(rule: Rule, place: torch.device) -> None:
    require_twin(draw_rows(2, V, place, seed=5), [replace(rule, position=i) for i in range(2)])


@pytest.mark.kernels
def test_m25_the_kernels_process_as_the_twin_does(place: torch.device) -> None:
    bias, counts = draw_extras(4, V, place)
    logits = draw_rows(4, V, place)
    require_twin(logits, PENALISED[:4], bias, counts)
    require_twin(logits[:2], PENALISED[4:6], counts=counts[:2])
    require_twin(logits[:2], RULES[4:6], bias[:2])


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, which interprets
def test_rows_without_a_choice_have_no_token(place: torch.device) -> None:
    logits = draw_rows(4, V, place)
    logits[0] = -math.inf
    logits[1, 300] = math.nan
    logits[2, 699] = math.inf
    rules = [Rule(), Rule(top_p=0.5), Rule(top_k=3), Rule()]
    drawn, _ = run(logits, rules)
    assert drawn.ids.tolist()[:3] == [NOBODY] * 3 and drawn.ids[3] != NOBODY
    assert drawn.log_probs[:3].isnan().all() and drawn.log_probs[3].isfinite()
    assert twin.draw(logits.cpu(), rules).ids.tolist() == drawn.ids.tolist()


@pytest.mark.kernels
def test_m34_a_border_among_equals_keeps_the_lowest_ids(place: torch.device) -> None:
    logits = torch.zeros(2, V, device=place)
    for rules in (
        [Rule(top_k=300, position=m, seed=m) for m in (1, 2)],
        [Rule(top_p=0.25, position=m) for m in (1, 2)],
    ):
        assert all(token < (300 if rules[0].top_k else 175) for token in run(logits, rules)[0].ids.tolist())
        require_twin(logits, rules)


@pytest.mark.kernels
def test_m28_a_row_of_a_step_is_the_row_alone(place: torch.device) -> None:
    logits, rules = draw_rows(3, V, place), RULES[1:4]
    together, _ = run(logits, rules)
    for row in range(3):
        alone, _ = run(logits[row : row + 1].clone(), rules[row : row + 1])
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.kernels
def test_m28_a_key_by_the_place_in_the_step_is_caught(place: torch.device) -> None:
    logits = draw_rows(1, V, place).repeat(4, 1)
    together, _ = run(logits, [Rule(position=i) for i in range(4)])
    assert len(set(together.ids.tolist())) > 1  # so a position that counted within a step would show


@pytest.mark.kernels
def test_the_kernels_refuse_by_name(place: torch.device) -> None:
    logits, rules = draw_rows(2, V, place), RULES[:2]
    settings, stages = Settings.of(rules, place), Stages.of(rules)
    bias, counts = draw_extras(2, V, place)
    other = kernel.Scratch.empty(1, V, place, CUT)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel.draw(logits[0], settings, stages), r"logits must be \[T, V\]"),
        (lambda: kernel.draw(torch.zeros(9, V, device=place), settings, stages), "logits must have 1 to 8 rows; got 9"),
        (lambda: kernel.draw(torch.zeros(1, 1 << 17, device=place), settings, stages), "1 to 131071 columns"),
        (lambda: kernel.draw(logits.double(), settings, stages), r"logits must be torch\.float32"),
        (lambda: kernel.draw(logits[:1], settings, stages), "settings numbers must have shape"),
        (lambda: kernel.draw(logits, settings, stages, bias=bias), "bias must be given when the stages have it"),
        (lambda: kernel.draw(logits, settings, stages._replace(penalised=True)), "counts must be given when"),
        (
            lambda: kernel.draw(logits, settings, stages._replace(penalised=True), counts=counts.long()),
            r"counts must be torch\.int32",
        ),
        (
            lambda: kernel.draw(logits, settings, stages._replace(biased=True), bias=bias.float()),
            r"bias must be torch\.float64",
        ),
        (lambda: kernel.launch(logits, settings, stages, CUT, scratch=other), "scratch row must have shape"),
        (
            lambda: kernel.draw(logits, settings, stages, out=kernel.Drawn(torch.zeros(2), torch.zeros(2))),
            r"out ids must be torch\.int32",
        ),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()


def test_stages_cover_what_needs_fewer_launches() -> None:
    plain, greedy, filtered = Stages.of([Rule()]), Stages.of([Rule(top_k=1, top_p=0.5)]), Stages.of(RULES)
    assert plain == (True, False, False, False, False) and greedy == (False,) * 5
    assert filtered.covers(plain) and plain.covers(greedy)
    assert not plain.covers(filtered) and not filtered.covers(Stages.of(RULES, biased=True))


VOCAB = 129_280


@pytest.mark.gpu
@pytest.mark.parametrize("penalised", [False, True])
def test_m27_the_models_rows_are_drawn_as_on_the_host(penalised: bool) -> None:
    device, rules = torch.device("cuda"), PENALISED if penalised else RULES
    bias, counts = draw_extras(8, VOCAB, device) if penalised else (None, None)
    for turn in range(4):
        logits = draw_rows(8, VOCAB, device, seed=turn).roll(turn, 0).contiguous()
        moved = [replace(rule, position=rule.position + turn) for rule in rules]
        require_twin(logits, moved, bias, counts)


@pytest.mark.gpu
def test_m27_many_draws_are_the_hosts() -> None:
    device = torch.device("cuda")
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3)).mul_(3)
    on_device, stages = logits.to(device), Stages.of([Rule(top_p=0.9, top_k=2)])
    scratch = kernel.Scratch.empty(8, VOCAB, device)
    kinds = [Rule(), Rule(top_p=0.95), Rule(top_k=50, temperature=1.5), Rule(min_p=0.05)]
    for turn in range(40):
        rules = [replace(kinds[(turn + i) % 4], position=8 * turn + i, seed=turn) for i in range(8)]
        drawn = kernel.draw(on_device, Settings.of(rules, device), stages, scratch=scratch)
        expected = [
            choose(row.numpy(), config_of(rule), rule.position) for row, rule in zip(logits, rules, strict=True)
        ]
        assert drawn.ids.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_draws_follow_their_inputs(rows: int) -> None:
    device = torch.device("cuda")
    logits, rules = draw_rows(rows, VOCAB, device), PENALISED[:rows]
    bias, counts = draw_extras(rows, VOCAB, device)
    settings, stages = Settings.of(rules, device), Stages.of(RULES, biased=True, penalised=True)
    scratch = kernel.Scratch.empty(rows, VOCAB, device)
    outs = [kernel.Drawn.empty(rows, device) for _ in range(3)]

    def chain(dependent: bool) -> None:
        for out in outs:
            kernel.draw(
                logits, settings, stages, bias=bias, counts=counts, scratch=scratch, out=out, dependent=dependent
            )

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for turn in range(3):
        logits.copy_(draw_rows(rows, VOCAB, device, seed=turn + 9))
        counts.copy_(counts.roll(turn, 1))
        rules = [replace(rule, position=turn) for rule in (PENALISED * 2)[turn : turn + rows]]
        settings.set(rules)
        expected, _ = run(logits, rules, bias, counts)
        for _ in range(3):
            for out in outs:
                out.ids.fill_(-9)
            graph.replay()
            assert all(torch.equal(out.ids, expected.ids) for out in outs)
            assert all(torch.equal(out.log_probs, expected.log_probs) for out in outs)
