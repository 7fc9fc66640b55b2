"""What is read off the rows of `kbit bench kernels`: tables, targets, `check`, `dequant` and `plot`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench_runs import refuse, run
from kbit.bench import check, dequant, kernel_rows, kernel_tables, plots, quality_plot, targets
from kbit.bench.text_table import in_sections, text_table
from kbit.bench.workload import times
from made_up_rows import BANDWIDTH, made_up, problem, result_file


def text_of(table) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


# -- rows and tables -----------------------------------------------------------------------------------------


def test_a_line_stands_between_rows_of_different_keys_only():
    table = text_table("title", ("name", "M"), left=("name",))
    for name, tokens in in_sections(table, [("a", 1), ("b", 1), ("c", 2)], lambda row: row[1]):
        table.add_row(name, str(tokens))
    assert [row.end_section for row in table.rows] == [False, True, False]
    assert [column.justify for column in table.columns] == ["left", "right"]


def test_rates_of_a_row():
    row = made_up("sq8k", 2, "kbit", 10.0)
    assert row.gb_s == pytest.approx(8192 * 8192 * 4.25 / 8 / 10e-6 / 1e9)
    assert row.tflop_s == pytest.approx(2 * 2 * 8192 * 8192 / 10e-6 / 1e12)


def test_best_is_ours_and_fastest():
    (item,) = kernel_rows.compare([*problem("q", 1, 8.0, 4.0), made_up("q", 1, "kbit KERNEL=x", 3.0)])
    assert item.best.kernel == "kbit KERNEL=x"
    assert item.dispatched.kernel == "kbit"
    assert item.speedup(item.dispatched) == 2.0


def test_problems_where_another_kernel_wins_are_listed():
    base, ours, slow, _ = problem("q", 1, 8.0, 4.0)
    assert list(kernel_tables.losses([base, ours, slow, made_up("q", 1, "kbit KERNEL=x", 3.9)])) == []
    (line,) = kernel_tables.losses([base, ours, slow, made_up("q", 1, "kbit KERNEL=x", 3.0)])
    assert line == "q M=1 k=4 fp16: kbit KERNEL=x takes 3.0 us, kbit 4.0 us"
    (line,) = kernel_tables.losses(problem("q", 1, 8.0, 4.0))
    assert line == "q M=1 k=4 fp16: humming takes 2.0 us, kbit 4.0 us"


def test_rows_without_a_baseline_are_left_out():
    assert kernel_rows.compare(problem("q", 1, 8.0, 4.0)[1:]) == []
    assert kernel_rows.compare(problem("q", 1, 8.0, 4.0)[:1]) == []


def test_totals_count_layers_as_often_as_they_run():
    rows = [*problem("l8b", 1, 30.0, 10.0), *problem("l8b_down", 1, 25.0, 20.0), *problem("q", 1, 8.0, 4.0)]
    by_model = {total.model: total for total in kernel_rows.totals(kernel_rows.compare(rows))}
    llama = by_model["llama-3-8b"]
    assert (llama.us, llama.baseline_us, llama.speedup) == (40.0, 85.0, 85.0 / 40.0)
    assert by_model["qwen3-coder-next"].speedup == 2.0


def test_one_table_per_m_and_dtype_with_every_kernel_and_totals():
    rows = [
        *problem("gateup", 1, 8.0, 4.0),
        *problem("gateup", 1, 8.0, 16.0, bits=5)[1:],
        *problem("q", 1, 7.0, 3.5),
        *problem("q", 16, 7.0, 5.0),
        *problem("q", 1, 7.0, 3.5, dtype="bf16"),
    ]
    tables = list(kernel_tables.tables(rows, BANDWIDTH))
    assert [table.title for table in tables] == ["M=1, fp16", "M=16, fp16", "M=1, bf16"]
    text = text_of(tables[0])
    header = re.split(r"[┃\s]{2,}", text.splitlines()[2].strip(" ┃"))
    assert header[:6] == ["shape", "k", "kbit", "dq+cublas", "humming", "fp16"]
    assert header[6:] == ["best", "vs fp16", "spread", "GB/s", "% read", "floor/goal"]
    (gateup,) = (line for line in text.splitlines() if re.match(r"│ gateup\s+│\s+4 ", line))
    cells = [cell.strip() for cell in gateup.strip("│").split("│")]
    gb_s = 2048 * 5120 * 4.25 / 8 / 4e3
    assert cells[:9] == ["gateup", "4", "4.0", "12.0", "2.0", "8.0", "kbit", "2.00x", "2%"]
    assert cells[9:] == [f"{gb_s:.0f}", f"{100 * gb_s / BANDWIDTH:.0f}", "2/2.8: floor"]
    assert re.search(r"TOTAL qwen3-coder-next", text)
    assert re.search(r"k=4\s+│\s+4 │.*15\.0 │ 7\.5\s+│\s+2\.00x", text)
    assert re.search(r"k=5\s+│\s+5 │.*8\.0 │ 16\.0\s+│\s+0\.50x", text)


def test_a_kernel_that_is_missing_for_a_row_is_a_dash():
    rows = [*problem("gateup", 1, 8.0, 4.0), *problem("q", 1, 7.0, 3.5)[:2]]
    (table,) = kernel_tables.tables(rows, BANDWIDTH)
    (line,) = (line for line in text_of(table).splitlines() if line.startswith("│ q "))
    assert [cell.strip() for cell in line.split("│")][3:7] == ["3.5", "-", "-", "7.0"]


def test_impossible_bandwidth_is_pointed_out():
    (table,) = kernel_tables.tables(problem("l70b", 1, 110.0, 20.0), BANDWIDTH)
    assert "warm?" in text_of(table)


def test_other_widths_are_held_against_four_bits():
    rows = [*problem("l70b", 1, 110.0, 30.0), *problem("l70b", 1, 110.0, 21.0, bits=2)[1:]]
    (table,) = kernel_tables.tables(rows, BANDWIDTH)
    assert "0.70 of k=4, at most 0.62: below" in text_of(table)


def test_json_of_rows_reads_back(tmp_path):
    rows = problem("q", 1, 8.0, 4.0)
    items = kernel_rows.as_json(rows)
    assert [item["vs_fp16"] for item in items] == [1.0, 2.0, 0.667, 4.0]
    assert items[1]["gb_s"] == round(rows[1].gb_s, 1)
    result, read = kernel_rows.load(result_file(tmp_path / "rows.json", rows))
    assert (result["read_bandwidth_gb_s"], read) == (BANDWIDTH, rows)


WRONG_FILES = {
    "": "is not JSON",
    "{": "is not JSON",
    "\x80": "is not UTF-8 text",
    "{}": "is not a result of .*it has no 'rows'",
    '{"rows": [{"shape": "q"}]}': "is not a result of",
    '{"rows": 5}': "is not a result of",
    '{"rows": [], "machine": "h200"}': "is not a result of",
    "[1]": "is not a result of",
}


@pytest.mark.parametrize(("text", "message"), WRONG_FILES.items())
def test_a_file_that_is_no_result_is_named(tmp_path, text, message):
    file = tmp_path / "other.json"
    file.write_bytes(text.encode("latin-1"))
    for command, load in (("kernels", kernel_rows.load), ("moe", times.load_grouped)):
        if command == "kernels" or "[{" not in text:
            with pytest.raises(
                ValueError, match=rf"other\.json {message}.* kbit bench {command} --json FILE$"
            ):
                load(file)


@pytest.mark.parametrize("path", ["missing.json", "."])
@pytest.mark.parametrize("command", [("check", "--from"), ("plot",), ("workload",)])
def test_a_file_that_cannot_be_read_is_named_with_its_remedy(tmp_path, command, path):
    message = refuse(*command, tmp_path / path)
    assert re.search(rf"{tmp_path / path} cannot be read: \w.* Make one: kbit bench kernels --json", message)


@pytest.mark.parametrize(
    ("field", "value"), [("us", "fast"), ("us", 0.0), ("us", None), ("us", float("nan")), ("bits", "4")]
)
def test_a_row_of_nonsense_is_named(tmp_path, field, value):
    rows = [replace(row, **{field: value}) for row in problem("q", 1, 8.0, 4.0)]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [vars(row) for row in rows]}))
    assert f"a row's {field} is {value!r}" in refuse("check", "--from", file)


def test_plots_need_a_bandwidth_and_a_folder(tmp_path):
    file = result_file(tmp_path / "rows.json", problem("q", 1, 8.0, 4.0))
    for folder in (file, file / "inside"):
        result = run("plot", file, "--out", folder)
        assert result.exit_code == 2
        assert "is a file. Name a folder." in " ".join(result.output.split())
    (tmp_path / "bare.json").write_text(json.dumps({"rows": json.loads(file.read_text())["rows"]}))
    assert "read_bandwidth_gb_s of the file is None" in refuse(
        "plot", tmp_path / "bare.json", "--out", tmp_path
    )


# -- targets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rows", "floor", "goal"),
    [
        ("gateup", 1, 2.0, 2.8),
        ("gateup", 2, 1.8, 2.6),
        ("gateup", 8, 1.8, 2.6),
        ("q", 16, 1.5, 2.3),
        ("down", 32, 1.3, 2.0),
        ("kv", 64, 1.4, 2.0),
        ("l8b", 128, 1.05, 1.25),
        ("l70b", 512, 0.98, 1.08),
        ("sq8k", 8192, 0.98, 1.08),
    ],
)
def test_targets_by_shape_and_tokens(shape, rows, floor, goal):
    assert targets.speedup(shape, rows, 4) == targets.Target(floor, goal)


def test_problems_without_a_target_have_none():
    assert targets.speedup("l8b_q", 1, 4) is None
    assert targets.speedup("l8b", 1, 3) is None
    assert targets.width_ratio("l70b", 1, 4) is None
    assert targets.width_ratio("l70b", 2, 3) is None
    assert targets.width_ratio("l70b", 1, 3) == 0.82
    assert targets.read_bandwidth("l70b", 1, 4) == targets.Target(0.75, 0.88)
    assert targets.read_bandwidth("kv", 1, 4) is None
    assert targets.dequantize_bandwidth(4096 * 14336) == 0.8
    assert targets.dequantize_bandwidth(2048 * 512) is None


def test_verdicts_of_a_target():
    target = targets.Target(1.0, 2.0)
    assert [target.verdict(value) for value in (0.99, 1.0, 1.99, 2.0)] == ["below", "floor", "floor", "goal"]


@pytest.mark.parametrize(
    ("shape", "rows", "bits", "bound"),
    [
        ("l70b", 1, 4, 0.98),
        ("l8b", 256, 4, 0.97),
        ("gateup", 256, 4, 0.9),
        ("gateup", 1024, 4, 0.93),
        ("l8b_q", 1024, 4, 0.93),
        ("l70b", 1024, 5, 0.9),
    ],
)
def test_bound_that_no_problem_may_cross(shape, rows, bits, bound):
    assert targets.never_slower(shape, rows, bits) == bound


# -- check, dequant, plot ------------------------------------------------------------------------------------


def test_check_lists_what_falls_below_its_bound(tmp_path):
    rows = [*problem("q", 1, 8.0, 4.0), *problem("l70b", 1024, 600.0, 630.0)]
    assert [verdict.holds for verdict in check.verdicts(rows)] == [True, False]
    result = run("check", "--from", result_file(tmp_path / "rows.json", rows))
    assert result.exit_code == 1
    assert "l70b M=1024 k=4 fp16: 630.0 us against 600.0 us, 0.952 < 0.98" in result.output
    assert "1 of 2 problems keep the bound" in result.output
    assert "Drop one of them" in refuse(
        "check", "--from", tmp_path / "rows.json", "--json", tmp_path / "verdicts.json"
    )
    good = run("check", "--from", result_file(tmp_path / "good.json", rows[:4]))
    assert good.exit_code == 0, good.output


def test_check_of_some_of_a_result(tmp_path):
    rows = [*problem("q", 1, 8.0, 4.0), *problem("l70b", 1024, 600.0, 630.0)]
    command = "check", "--from", result_file(tmp_path / "rows.json", rows)
    for chosen in (("--shape", "q"), ("--rows", "1,2"), ("--shape", "q", "--bits", 4, "--dtype", "fp16")):
        result = run(*command, *chosen)
        assert (result.exit_code, result.output.strip()) == (0, "1 of 1 problems keep the bound")
    assert run(*command, "--shape", "q,l70b").exit_code == 1
    for none in (("--bits", 3), ("--dtype", "bf16"), ("--shape", "l8b")):
        assert "no kernel beside" in refuse(*command, *none)
    assert "--dtype takes" in refuse(*command, "--dtype", "fp8")


def test_check_of_nothing_is_no_success(tmp_path):
    assert "no kernel beside" in refuse("check", "--from", result_file(tmp_path / "rows.json", []))


def test_dequantize_table_shows_the_ratio_and_its_bandwidth():
    row = dequant.DequantizeRow("l8b", 4096, 14336, 64, 4, "fp16", 33.0, 40.0, 66.0, 3700.0)
    (table,) = dequant.tables([row, replace(row, rows=256)], BANDWIDTH)
    assert table.title == "k=4: dequantize + cuBLAS, us"
    (line,) = (line for line in text_of(table).splitlines() if " 64 " in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["l8b", "64", "33.0", "40.0", "66.0", "0.50x", "3700", "82"]
    assert dequant.as_json([row])[0]["ratio"] == 0.5


def test_plots_say_what_can_be_drawn(tmp_path):
    (tmp_path / "other.json").write_text('{"rows": 5}')
    message = refuse("plot", tmp_path / "other.json", "--out", tmp_path)
    assert "kbit bench kernels --json FILE" in message
    assert "`kbit bench chat`, `kbit profile` and `kbit eval --bits`" in message


def test_plots_are_drawn_from_a_result(tmp_path):
    rows = [row for count in (1, 16, 4096) for row in problem("q", count, 8.0 + count, 4.0 + count)]
    assert plots.speedups(rows, "qwen3-coder-next", "fp16") == {4: {1: 9 / 5, 16: 24 / 20, 4096: 4104 / 4100}}
    result = run("plot", result_file(tmp_path / "rows.json", rows), "--out", tmp_path / "plots")
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["roofline-fp16.png", "speedup-models-k4-fp16.png", "speedup-qwen3-coder-next-fp16.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())


def test_quality_is_drawn_from_a_result_of_eval(tmp_path):
    file = Path(__file__).parent.parent / "benchmarks" / "results" / "quality-tiny-moe.json"
    found = json.loads(file.read_text())
    assert quality_plot.is_quality(found)
    assert [bits for bits, _ in quality_plot.lines(found, "perplexity")["search"]] == [2.25, 3.25, 4.25, 5.25]
    assert run("plot", file, "--out", tmp_path).exit_code == 0
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_plots_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = result_file(tmp_path / "rows.json", problem("q", 1, 8.0, 4.0))
    assert "pip install matplotlib" in refuse("plot", file, "--out", tmp_path)
    assert "nothing to draw" in refuse("plot", result_file(tmp_path / "none.json", []), "--out", tmp_path)
