"""`kbit bench workload`: distributions, the scheduler by hand and by invariants, scenarios, the command."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kbit.backends.cuda import tables as choices
from kbit.bench import kernel_rows, shapes
from kbit.bench.kernel_rows import BASELINE, OURS
from kbit.bench.plots import figure_of
from kbit.bench.workload import distributions, scenarios, scheduler, tables
from kbit.bench.workload import plot as plots
from kbit.bench.workload import times as measured
from kbit.bench.workload.distributions import Lengths, Traffic, Turn
from kbit.bench.workload.model_layers import ModelLayers, active_experts, layers_of
from kbit.bench.workload.scheduler import Limits, Step
from kbit.bench.workload.times import Curve, NotMeasured
from kbit.cli import app
from made_up_rows import made_up

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "h200-kernels.json"
HOPPER = {"gpu": "made up", "compute_capability": "9.0"}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> Path:
    """The user may have a table of choices for the GPU of a result."""
    monkeypatch.setenv("KBIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: object):
    return CliRunner().invoke(app, ["bench", "workload", *map(str, arguments)])


def test_files_that_are_read_are_not_overwritten(tmp_path):
    table, out = tmp_path / "kernels.json", tmp_path / "out.png"
    table.write_bytes(RESULT.read_bytes())
    (tmp_path / "link.json").symlink_to(table)
    read = ("--experts", table)  # by another option
    for options in (("--json", table), ("--json", tmp_path / "link.json"), (*read, "--json", table)):
        assert "is read, too. Name another file" in str(run(table, *options).exception)
    assert "is that of another option, too" in str(run(table, "--json", out, "--plot", out).exception)
    assert "must end with one of .png, .svg, .pdf" in run(table, "--plot", tmp_path / "out.xyz").output
    assert table.read_bytes() == RESULT.read_bytes()


# -- distributions -------------------------------------------------------------------------------------------


def test_shipped_distribution():
    traffic = distributions.load()
    for lengths in (traffic.prompts, traffic.answers):
        assert math.isclose(math.fsum(lengths.frequencies.values()), 1, rel_tol=1e-12)
    assert 1000 < traffic.prompts.mean < 2000
    assert 50 < traffic.answers.mean < 200


def written(tmp_path, prompts, answers, **more):
    file = tmp_path / "mine.json"
    data = {"input_tokens_per_turn": {"freq": prompts}, "generated_tokens_per_turn": {"freq": answers}}
    file.write_text(json.dumps(data | more))
    return file


def test_own_distribution(tmp_path):
    traffic = distributions.load(written(tmp_path, {"10": 0.25, "30": 0.75}, {"4": 1.0}, description="mine"))
    assert traffic == Traffic("mine", Lengths({10: 0.25, 30: 0.75}), Lengths({4: 1.0}))
    assert traffic.prompts.mean == 25
    turns = traffic.turns(2000, seed=3)
    assert turns == traffic.turns(2000, seed=3) != traffic.turns(2000, seed=4)
    assert {turn.answer for turn in turns} == {4}
    assert 0.7 < sum(turn.prompt == 30 for turn in turns) / 2000 < 0.8


def test_log_keeps_prompts_with_their_answers(tmp_path):
    file = tmp_path / "requests.jsonl"
    lines = [
        {"input_tokens": 5, "generated_tokens": 2, "prompt": "a\u2028b\x85c\x1ed"},  # no ends of lines
        {"input_tokens": 900, "generated_tokens": 70},
    ]
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    file.write_text("\n".join(texts) + "\n\n", encoding="utf-8")
    traffic = distributions.load(file)
    assert traffic.log == (Turn(5, 2), Turn(900, 70))
    assert traffic.prompts == Lengths({5: 0.5, 900: 0.5})
    assert set(traffic.turns(50, 0)) == set(traffic.log)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "is not JSON .*nested too deeply"),
        ("a.jsonl", "[" * 100_000, "line 1 of .* is no request .*nested too deeply"),
        ("a.json", "[]", "no frequencies under input_tokens_per_turn"),
        ("a.json", '{"input_tokens_per_turn": {"freq": {"x": 1}}}', "invalid literal"),
        ("a.json", '{"input_tokens_per_turn": {"freq": {"0": 1}}}', "length 0 with frequency 1"),
        ("a.json", '{"input_tokens_per_turn": {"freq": {"1": -1, "2": 2}}}', "frequency -1"),
        ("a.json", '{"input_tokens_per_turn": {"freq": {"1": NaN}}}', "frequency nan"),
        ("a.json", '{"input_tokens_per_turn": {"freq": {"1": 3, "2": 1}}}', "sum to 4"),
        ("a.jsonl", "\n", "holds no request"),
        ("a.jsonl", '{"input_tokens": 5}', "line 1 .*KeyError: 'generated_tokens'"),
        ("a.jsonl", '{"input_tokens": 5, "generated_tokens": 0}', "at least 1"),
        ("a.jsonl", '{"input_tokens": true, "generated_tokens": 1}', "whole numbers"),
    ],
)
def test_wrong_files_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        distributions.load(tmp_path / name)


# -- the scheduler, by hand ----------------------------------------------------------------------------------


def simulated(turns, users, limits):
    """What was served, and (prompt tokens, decode steps) that each remaining turn still needs."""
    engine = scheduler._Engine(turns, users, limits)
    served = engine.run()
    left = [(tokens, turn.answer - 1) for tokens, turn in engine.waiting]
    return served, left + [(0, end - engine.now) for end in engine.ends]


def test_one_user_by_hand():
    """Prompt 5 in chunks of 4: 4 and 1. The second gives the first token, two more are decoded."""
    served, left = simulated([Turn(5, 3)], users=1, limits=Limits(chunk=4, budget=8))
    assert served.steps == Counter({Step(0, 4): 1, Step(0, 1): 1, Step(1, 0): 2})
    assert left == []
    assert served.iterations == 4


def test_two_users_by_hand():
    """Decoding first, then one chunk.

    1: A's 3 prompt tokens, A has 1 of 4.  2: A decodes (2), B's first 4 of 6.  3: A (3), B's other 2: its
    only token, so B asks again: C.  4: A (4, done), C's 1 token; nobody is left to ask for A.
    """
    turns = [Turn(3, 4), Turn(6, 1), Turn(1, 9)]
    served, left = simulated(turns, users=2, limits=Limits(chunk=4, budget=8))
    assert served.steps == Counter({Step(0, 3): 1, Step(1, 4): 1, Step(1, 2): 1, Step(1, 1): 1})
    assert left == [(0, 8)]


def test_budget_cuts_chunks_beside_decoding():
    """3 users, budget 4: with two decoding, 2 tokens are left for the third's prompt of 5."""
    turns = [Turn(1, 100), Turn(1, 100), Turn(5, 1)]
    served = scheduler.serve(turns, users=3, limits=Limits(chunk=4, budget=4))
    assert served.steps == Counter({Step(0, 1): 1, Step(1, 1): 1, Step(2, 2): 2, Step(2, 1): 1})


def test_alone_is_exact():
    """Prompts of 3 (half) and 10 (half) under a budget of 4: 3; 4 + 4 + 2. Answers of 1 and 5: 2 steps."""
    traffic = Traffic("", Lengths({3: 0.5, 10: 0.5}), Lengths({1: 0.5, 5: 0.5}))
    steps = scheduler.alone(traffic, budget=4)
    assert steps == {Step(0, 3): 0.5, Step(0, 4): 1.0, Step(0, 2): 0.5, Step(1, 0): 2.0}
    assert scheduler.by_tokens(steps) == {1: 2.0, 2: 0.5, 3: 0.5, 4: 1.0}


def test_limits_that_starve_prompts_are_refused():
    with pytest.raises(ValueError, match="budget of 4 .* at least 5"):
        scheduler.serve([Turn(1, 1)] * 9, users=5, limits=Limits(chunk=4, budget=4))
    with pytest.raises(ValueError, match="3 users need at least as many turns, got 2"):
        scheduler.serve([Turn(1, 1)] * 2, users=3)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        scheduler.serve([Turn(1, 1)], users=0)


# -- the scheduler, by its invariants ------------------------------------------------------------------------

TURNS = st.lists(st.builds(Turn, st.integers(1, 60), st.integers(1, 40)), min_size=6, max_size=40)


@given(turns=TURNS, users=st.integers(1, 6), chunk=st.integers(1, 20), room=st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_no_token_is_lost_and_limits_hold(turns, users, chunk, room):
    limits = Limits(chunk, users + room)
    served, left = simulated(turns, users, limits)
    assert served == scheduler.serve(turns, users, limits)
    prefilled = sum(step.prefill * count for step, count in served.steps.items())
    decoded = sum(step.decode * count for step, count in served.steps.items())
    assert prefilled + sum(prompt for prompt, _ in left) == sum(turn.prompt for turn in turns)
    assert decoded + sum(steps for _, steps in left) == sum(turn.answer - 1 for turn in turns)
    assert len(left) < users
    for step, count in served.steps.items():
        assert count > 0
        assert 0 <= step.decode <= users
        assert step.prefill <= chunk
        assert 1 <= step.tokens <= limits.budget
        # Without a prompt all users decode: nobody is ever idle.
        assert step.prefill or step.decode == users


def slow_serve(turns, users, limits):
    """The same rules, one iteration after the other, without heap or shortcuts."""
    coming, steps = iter(turns), Counter()
    waiting = [[turn.prompt, turn.answer] for turn in (next(coming) for _ in range(users))]
    decoding: list[int] = []
    while True:
        chunk = min(waiting[0][0], limits.chunk, limits.budget - len(decoding)) if waiting else 0
        steps[Step(len(decoding), chunk)] += 1
        decoding = [left - 1 for left in decoding]
        if waiting:
            waiting[0][0] -= chunk
            if not waiting[0][0]:
                decoding.append(waiting.pop(0)[1] - 1)
        done = decoding.count(0)
        decoding = [left for left in decoding if left]
        for _ in range(done):
            turn = next(coming, None)
            if turn is None:
                return steps
            waiting.append([turn.prompt, turn.answer])


@given(turns=TURNS, users=st.integers(1, 6), chunk=st.integers(1, 20), room=st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_shortcuts_change_nothing(turns, users, chunk, room):
    limits = Limits(chunk, users + room)
    assert scheduler.serve(turns, users, limits).steps == slow_serve(turns, users, limits)


@given(turns=TURNS)
@settings(max_examples=100, deadline=None)
def test_alone_is_the_mean_of_simulated_turns(turns):
    """With chunks as large as the budget, one simulated user computes what the sum over the log says."""
    traffic = distributions.from_log(turns, "here")
    steps = scheduler.serve(turns, 1, Limits(chunk=16, budget=16)).steps
    exact = scheduler.alone(traffic, budget=16)
    assert set(exact) == set(steps)
    for step, count in steps.items():
        assert math.isclose(exact[step] * len(turns), count, rel_tol=1e-9)


# -- times ---------------------------------------------------------------------------------------------------


def test_interpolation_by_hand():
    curve = Curve(((1, 8.0), (4, 8.0), (16, 32.0)))
    assert [curve.at(m) for m in (1, 2, 4, 8, 16)] == pytest.approx([8, 8, 8, 16, 32])
    for outside in (0.5, 17):
        with pytest.raises(NotMeasured, match=f"{outside} is outside of the measured 1 to 16"):
            curve.at(outside)


@given(
    points=st.dictionaries(st.integers(1, 5000), st.floats(0.1, 1e4), min_size=1, max_size=8),
    where=st.integers(1, 5000),
)
def test_interpolation_stays_between_its_neighbours(points, where):
    curve = Curve(tuple(sorted(points.items())))
    for place, value in points.items():
        assert curve.at(place) == value
    if curve.covers(where):
        below = points[max(place for place in points if place <= where)]
        above = points[min(place for place in points if place >= where)]
        assert min(below, above) * (1 - 1e-9) <= curve.at(where) <= max(below, above) * (1 + 1e-9)


def problem(shape, rows, base, ours, bits=4):
    """cuBLAS, the dispatched kernel, and a faster one of ours that is not dispatched."""
    return [
        made_up(shape, rows, "cublas", base, None, BASELINE),
        made_up(shape, rows, "kbit", ours, bits, OURS),
        made_up(shape, rows, "kbit KERNEL=stream", ours / 2, bits, OURS),
    ]


def glm_rows(bits=(4,)):
    """2048 -> 10240 at M = 1, 16 and 1024: 10, 10 and 640 us of cuBLAS, 4, 8 and 800 us of ours."""
    return [
        row
        for width in bits
        for count, base, ours in ((1, 10.0, 4.0), (16, 10.0, 8.0), (1024, 640.0, 800.0))
        for row in problem("glm_gu", count, base, ours, width)
    ]


GLM = layers_of("glm-4.7-flash")


def test_times_are_of_what_is_dispatched():
    times = measured.from_result({"machine": HOPPER}, glm_rows(), "fp16")
    (shape,) = GLM.dense
    assert times.us(shape, 4, 1) == 4
    assert times.us(shape, None, 1024) == 640
    assert times.us(shape, 4, 4) == pytest.approx(4 * math.sqrt(2))
    names = [times.kernel(shape, 4, tokens) for tokens in (1, 8, 9, 1000)]
    assert names == ["stream", "stream", "wgmma", "wgmma"]
    unknown = measured.from_result({}, glm_rows(), "fp16")
    assert unknown.kernel(shape, 4, 1) == "kbit"


def test_kernels_are_named_by_the_table_of_the_gpu_where_it_has_them(empty_cache):
    (shape,) = GLM.dense
    problem = choices.Problem(shape.out_features, shape.in_features, 4, False, "fp16")
    row = choices.Row(16, "cublas", None, 5.0, None, None)
    device = {"multiprocessors": 132, "shared_bytes": 232448, "arch": "90a"}
    file = choices.user_file("made up")
    assert file.is_relative_to(empty_cache)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"version": 1, "device": device, "rows": [choices.write_row(problem, row)]}))
    times = measured.from_result({"machine": HOPPER}, glm_rows(), "fp16")
    assert [times.kernel(shape, 4, tokens) for tokens in (7, 8, 16, 17)] == [
        "stream",
        "dq+cublas",
        "dq+cublas",
        "wgmma",
    ]
    file.write_text("damaged")
    assert measured.from_result({"machine": HOPPER}, glm_rows(), "fp16").kernel(shape, 4, 16) == "wgmma"


def test_small_weights_for_many_tokens_are_decoded_in_front_of_cublas():
    rows = [row for count in (1, 4096) for row in problem("kv", count, 10.0, 5.0)]
    times = measured.from_result({"machine": HOPPER}, rows, "fp16")
    (shape,) = shapes.select(["kv"])
    assert times.kernel(shape, 4, 4096) == "dq+cublas"


def test_what_was_not_measured_is_refused_with_what_to_measure():
    times = measured.from_result({"machine": HOPPER}, glm_rows(), "fp16")
    (shape,) = GLM.dense
    with pytest.raises(NotMeasured, match=r"M=1025 is outside of the measured 1 to 1024.*--rows"):
        times.us(shape, 4, 1025)
    with pytest.raises(NotMeasured, match="glm_gu in 3 bits, fp16: not in the table.*--bits 3"):
        times.us(shape, 3, 1)
    with pytest.raises(NotMeasured, match="no bf16 rows"):
        measured.from_result({}, glm_rows(), "bf16")
    assert times.bits(GLM) == [4]
    assert times.bits(layers_of("llama-3-8b")) == []


# -- experts -------------------------------------------------------------------------------------------------


def test_active_experts():
    assert active_experts(512, 10, 1) == pytest.approx((10, 1))
    active, each = active_experts(512, 10, 100_000)
    assert (active, each) == pytest.approx((512, 100_000 * 10 / 512))
    active, each = active_experts(4, 1, 2)
    assert (active, each) == pytest.approx((4 * (1 - 0.75**2), 2 / 1.75))


def grouped(shape, bits=4, factor=1.0):
    """us = factor * experts * sqrt(tokens): interpolated exactly, in both directions."""
    return [
        measured.GroupedRow(
            shape, experts, each, width, "fp16", kernel, kind, scale * experts * math.sqrt(each)
        )
        for experts in (8, 512)
        for each in (1, 64)
        for width, kernel, kind, scale in (
            (None, "bmm", "baseline", 3.0),
            (None, "grouped_mm", "baseline", 2.0),
            (bits, "kbit", "ours", factor),
        )
    ]


def test_grouped_rows_by_hand():
    times = measured.from_result({"machine": HOPPER}, glm_rows(), "fp16", grouped("moe_gu"))
    shape = next(shape for shape in shapes.SHAPES if shape.name == "moe_gu")
    active, each = active_experts(512, 10, 20)
    assert times.grouped_us(shape, 4, 10, 20) == pytest.approx(active * math.sqrt(each))
    assert times.grouped_us(shape, None, 10, 20) == pytest.approx(2 * active * math.sqrt(each))
    with pytest.raises(NotMeasured, match="no grouped rows around"):
        times.grouped_us(shape, 4, 10, 10_000)


def test_results_of_bench_moe_are_grouped_rows(tmp_path):
    row = {"problem": "gu, 128 experts", "rows": 4, "bits": 4, "kernel": "kbit", "kind": "ours", "us": 9.5}
    layer = row | {"problem": "layer, zipf"}
    (tmp_path / "moe.json").write_text(json.dumps({"dtype": "bf16", "rows": [row, layer]}))
    (found,) = measured.load_grouped(tmp_path / "moe.json")
    assert found == ("moe_gu", 128, 4, 4, "bf16", "kbit", "ours", 9.5)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is not a result of `kbit bench moe"):
        measured.load_grouped(tmp_path / "other.json")
    moe = {"machine": {"gpu": "one"}, "dtype": "bf16", "rows": [row]}
    (tmp_path / "moe.json").write_text(json.dumps(moe))
    assert measured.load_grouped(tmp_path / "moe.json", "one") == [found]
    with pytest.raises(ValueError, match=r"moe\.json is of one, and the kernel table of another"):
        measured.load_grouped(tmp_path / "moe.json", "another")


# -- scenarios -----------------------------------------------------------------------------------------------


def test_scenario_by_hand():
    """3 iterations of M=1 and 1 of M=16; the layer runs twice in a block."""
    times = measured.from_result({"machine": HOPPER}, glm_rows(), "fp16")
    steps = {Step(1, 0): 3.0, Step(0, 16): 1.0}
    found = scenarios.scenario(GLM, times, steps, users=1, bits=4)
    assert found.us == pytest.approx(2 * (3 * 4 + 8) / 4)
    assert found.baseline_us == pytest.approx(2 * 10)
    assert found.speedup == pytest.approx(2.0)
    assert found.shares == {"stream": pytest.approx(0.6), "wgmma": pytest.approx(0.4)}
    assert (found.decode_only, found.tokens) == (0.75, 19 / 4)


def test_shares_by_hand():
    times = measured.from_result({"machine": HOPPER}, glm_rows(), "fp16")
    found = scenarios.scenario(GLM, times, {Step(1, 0): 400.0, Step(0, 1024): 1.0}, users=1, bits=4)
    assert found.shares == {"stream": pytest.approx(1600 / 2400), "wgmma": pytest.approx(800 / 2400)}
    assert found.speedup == pytest.approx((4000 + 640) / 2400)


@given(ratio=st.floats(0.25, 4), users=st.sampled_from([1, 2, 5]), seed=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_a_constant_ratio_is_the_speedup(ratio, users, seed):
    """Whatever the traffic, kernels that take 1 / ratio of the time at every M are ratio times as fast."""
    rows = [
        row for m, us in ((1, 3.0), (64, 9.0), (4096, 99.0)) for row in problem("glm_gu", m, us, us / ratio)
    ]
    times = measured.from_result({"machine": HOPPER}, rows, "fp16")
    steps = scenarios.steps_of(distributions.load(), [users], Limits(), 200, seed)
    (found,) = scenarios.analyse(GLM, times, steps, [4]).scenarios
    assert found.speedup == pytest.approx(ratio)
    assert math.fsum(found.shares.values()) == pytest.approx(1)


MOE = ModelLayers("mixed", shapes.select(["glm_gu"]), layers_of("qwen3-coder-next").experts[:1], 10)


def test_experts_count_where_measured_and_are_left_out_with_a_note():
    steps = {1: {Step(1, 0): 1.0}}
    with_experts = measured.from_result({}, glm_rows(), "fp16", grouped("moe_gu"))
    found = scenarios.analyse(MOE, with_experts, steps, [4])
    assert found.notes == ()
    assert found.scenarios[0].us == pytest.approx(2 * 4 + 10)
    assert found.scenarios[0].shares["experts"] == pytest.approx(10 / 18)
    without = measured.from_result({}, glm_rows(), "fp16")
    found = scenarios.analyse(MOE, without, steps, [4])
    assert found.notes == ("expert layers (moe_gu) left out: there are no grouped rows in fp16",)
    assert found.scenarios[0].us == pytest.approx(2 * 4)
    far = {1: {Step(0, 1024): 1.0}}
    (note,) = scenarios.analyse(
        MOE, measured.from_result({}, glm_rows(), "fp16", grouped("moe_gu")[:6]), far, [4]
    ).notes
    assert "no grouped rows around 512 experts" in note


def test_missing_widths_are_named():
    times = measured.from_result({"machine": HOPPER}, glm_rows((2, 4)), "fp16")
    found = scenarios.analyse(GLM, times, {1: {Step(1, 0): 1.0}})
    assert [item.bits for item in found.scenarios] == [2, 4]
    assert found.notes[0].startswith("k = 3, 5 left out")
    assert "--bits 3,5" in found.notes[0]
    with pytest.raises(NotMeasured, match="glm_gu in 3 bits"):
        scenarios.analyse(GLM, times, {1: {Step(1, 0): 1.0}}, [3])


def test_slower_from():
    times = measured.from_result({"machine": HOPPER}, glm_rows(), "fp16")
    found = scenarios.analyse(GLM, times, {1: {Step(1, 0): 1.0}, 9: {Step(0, 1024): 1.0}})
    assert found.slower_from(4) == 9
    (line,) = tables.verdicts(found)
    assert "slower than fp16 from 9 users on; the kernels before these: from 16 users on (RTX 4090)" in line
    found = scenarios.analyse(GLM, times, {1: {Step(1, 0): 1.0}})
    assert "at no number of users up to 1" in next(tables.verdicts(found))


# -- the command ---------------------------------------------------------------------------------------------


def test_command_on_the_committed_table(tmp_path):
    """Deterministic, whole, and of the documented structure."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    arguments = (RESULT, "--turns", 400, "--users", "1,4,16,64")
    picture = tmp_path / "users.png"
    result = run(*arguments, "--json", files[0], "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "vs fp16" in result.output
    assert "Nothing is extrapolated" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    run(*arguments, "--json", files[1])
    assert files[0].read_text() == files[1].read_text()
    written = json.loads(files[0].read_text())
    assert written["earlier"]["slower_than_fp16_from_users"] == 16
    assert written["scheduler"] == {"chunk": 512, "budget": 2048, "turns": 400, "seed": 0}
    header, _ = kernel_rows.load(RESULT)
    assert written["machine"] == header["machine"]
    assert {model["model"] for model in written["workload"]} <= set(shapes.MODELS)
    for model in written["workload"]:
        for item in model["scenarios"]:
            assert sum(item["shares"].values()) == pytest.approx(1, abs=1e-3)
            assert item["speedup"] == pytest.approx(item["baseline_us"] / item["us"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt"), "unknown model gpt"),
        (("--users", "0"), "--users takes positive"),
        (("--bits", "7"), "7"),
        (("--budget", "9000", "--users", "1"), "outside of the measured"),
        (("--budget", "8", "--users", "16"), "--budget of at least 16"),
        (("--dtype", "int8"), "--dtype takes fp16 or bf16; got 'int8'"),
        (("--turns", "3", "--users", "4"), "at least as many turns"),
    ],
)
def test_command_refuses(arguments, message):
    result = run(RESULT, *arguments)
    assert result.exit_code == 1
    assert message in str(result.exception)


def test_plot_marks_where_the_earlier_kernels_fell_behind(tmp_path, monkeypatch):
    models = [
        {
            "model": "m",
            "scenarios": [
                {"users": users, "bits": bits, "dtype": "fp16", "speedup": 1 + 1 / users}
                for users in (1, 16, 64)
                for bits in (2, 3, 4)
            ],
        }
    ]
    made = []
    monkeypatch.setattr(plots, "figure_of", lambda *size: made.append(figure_of(*size)) or made[-1])
    plots.write({"workload": models, "earlier": tables.earlier()}, tmp_path / "users.png")
    assert (tmp_path / "users.png").stat().st_size > 1000
    [(_, panels)] = made
    assert [axes.get_title() for axes in panels] == ["k=2", "k=3", "k=4", ""]
    assert [axes.axison for axes in panels] == [True, True, True, False]
    for axes in panels[:3]:
        assert any("slower than fp16" in text.get_text() for text in axes.texts)
        assert axes.lines[0].get_label() == "m"
        assert any(list(line.get_xdata()) == [16, 16] for line in axes.lines)
