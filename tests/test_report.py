"""`kbit bench report`: the page is well-formed, self-contained and accessible, and says what is absent."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from kbit.bench import kernel_rows
from kbit.bench.report import markup, page, results, svg
from kbit.bench.report.svg import Axis, Chart, Series
from kbit.cli import app
from made_up_results import FILES
from made_up_rows import problem

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
VOID = {"meta", "line", "circle", "rect", "polyline", "polygon", "br"}
MACHINE = {
    "gpu": "made up",
    "date": "2026-01-02",
    "commit": "abc",
    "driver": "1",
    "compute_capability": "9.0",
}


class Page(HTMLParser):
    """Every element with its attributes and the names of its parents; fails on tags that do not match."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


EXTERNAL = re.compile(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#|data:)[^"')\s>]+""", re.IGNORECASE)


def external_references(page: str) -> list[str]:
    """What a page would load or link to outside of itself; a report has none."""
    return EXTERNAL.findall(page)


def kernels_file(folder: Path, name: str = "kernels.json", **more) -> None:
    rows = [
        row
        for shape, bits, count in itertools.product(("gateup", "q", "glm_gu"), (2, 4), (1, 64))
        for row in problem(shape, count, 40.0 + count, 10.0 + count * bits / 4, bits)
    ]
    header = {"machine": MACHINE, "read_bandwidth_gb_s": 4500.0, "timer": "graph", "repeats": 11}
    (folder / name).write_text(json.dumps(header | {"rows": kernel_rows.as_json(rows)} | more))


PART = {"kernel": "stream", "group": "kbit", "calls": 3, "us": 50.0, "share": 0.5}
PART |= {"step_without_us": 50.0, "ceiling": 2.0}
PLAN = {"prompt": 8, "steps": 4, "prefill": 64}
ARMS = [
    {
        "name": name,
        "weight_bytes": 10**9,
        "build_peak_bytes": None,
        "run_peak_bytes": None,
        "absent": None,
        "prefill_tokens_s": 123.4,
        "decode": [
            {"arm": name, "batch": 1, "ms": ms, "spread": 0.01, "tokens_s": 1e3 / ms, "vs_bf16": 8 / ms}
            | {"reason": None, "profile": {"by_kind_us": {"kbit": 1e3 * ms}, "kernels": []}}
        ],
    }
    for name, ms in (("kbit k=4", 4.0), ("bf16", 8.0))
]


@pytest.fixture
def everything(tmp_path):
    """A folder with a file of every kind."""
    kernels_file(tmp_path, peers_absent={"humming": ["cannot be imported <here>"]})
    files = {
        "dequant": {
            "read_bandwidth_gb_s": 4500.0,
            "rows": [
                {
                    "shape": "q",
                    "in_features": 2048,
                    "out_features": 4096,
                    "rows": 64,
                    "bits": 4,
                    "dtype": "fp16",
                }
                | {"fp16_us": 8.0, "dequantize_us": 4.0, "total_us": 12.5, "gb_s": 4000.0, "ratio": 0.64}
            ],
        },
        "decode": {"decode": {"model": {"decode_tokens_s": 30.25, "prompt_tokens": 64}}},
        "model": {
            "model": "big",
            "layers": 2,
            "plan": {"prompt": 8, "steps": 4, "prefill": 64},
            "arms": ARMS,
        },
        "moe": {
            "read_bandwidth_gb_s": 4500.0,
            "dtype": "bf16",
            "rows": [
                {
                    "problem": "gu, 8 experts",
                    "rows": 4,
                    "kernel": kernel,
                    "kind": kind,
                    "us": us,
                    "bits": bits,
                }
                | {"spread": 0.01, "gb_s": 900.0, "vs_best_16_bit": 20 / us, "vs_bmm": None}
                for kernel, kind, us, bits in (("bmm", "baseline", 20.0, None), ("kbit", "ours", 7.0, 4))
            ],
        },
        "profile": {
            "profiles": [
                {
                    "model": "tiny",
                    "arm": "kbit k=4",
                    "device": "cuda",
                    "batch": 1,
                    "step_us": 100.0,
                    "busy": 0.9,
                    "groups": [PART | {"kernel": "kbit"}],
                    "kernels": [PART],
                }
            ]
        },
        "sanitizer": {"shapes": [], "runs": [{"tool": "memcheck", "exit_code": 1, "summary": ["1 error"]}]},
        "strange": {"answers": [{"model": "m", "figure": 0.123456, "none": None}]},
    }
    files |= {name: made() for name, made in FILES.items()}
    for name, data in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": MACHINE} | data))
    for name in ("cpu", "demo", "quality-tiny-moe"):
        (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    command = [
        "bench",
        "workload",
        str(RESULTS / "h200-kernels.json"),
        "--turns",
        "300",
        "--model",
        "llama-3-8b",
    ]
    assert CliRunner().invoke(app, [*command, "--json", str(tmp_path / "workload.json")]).exit_code == 0
    return tmp_path


def rendered(folder: Path) -> tuple[Page, str, list[str]]:
    text, absent = page.render(results.load(folder), folder)
    return Page(text), text, absent


# -- structure -----------------------------------------------------------------------------------------------


def check_structure(parsed: Page, text: str) -> None:
    assert text.startswith("<!doctype html>")
    assert external_references(text) == []
    assert not re.search(r"https?://|@import|<script|<link|<iframe|<object|<img", text)
    assert parsed.all("html")[0]["lang"] == "en"
    assert parsed.all("meta")[0] == {"charset": "utf-8"}
    titles = [tag for tag, _, parents in parsed.elements if tag == "title" and parents[-1] == "head"]
    assert len(parsed.all("h1")) == len(parsed.all("main")) == len(titles) == 1
    names = [attributes["id"] for _, attributes, _ in parsed.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for link in parsed.all("a"):
        assert link["href"].removeprefix("#") in names
    for section in parsed.all("section"):
        assert section["aria-labelledby"] in names
    for tag, attributes, parents in parsed.elements:
        if tag == "table":
            assert parents[-1] == "div", "a table is not in a container that scrolls"
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if tag == "svg":
            hidden = attributes.get("aria-hidden") == "true"
            assert hidden or (attributes["role"] == "img" and attributes["aria-label"])
    for box in (box for box in parsed.all("div") if box.get("class") == "scroll"):
        assert (box["role"], box["tabindex"]) == ("region", "0")
        assert box["aria-label"]


def test_page_of_everything(everything):
    parsed, text, absent = rendered(everything)
    check_structure(parsed, text)
    assert absent == []
    assert len(parsed.all("section")) == len(page.SECTIONS) + 2
    assert "Absent" not in parsed.text


def test_page_of_the_committed_results():
    parsed, text, _ = rendered(RESULTS)
    check_structure(parsed, text)
    for path in RESULTS.glob("*.json"):
        assert path.name in parsed.text


def test_rows_have_as_many_cells_as_their_header(everything):
    _, text, _ = rendered(everything)
    tables = re.findall(r"<table>.*?</table>", text, re.S)
    assert len(tables) > 20
    for table in tables:
        counts = {len(re.findall(r"<t[hd][ >]", row)) for row in re.findall(r"<tr.*?</tr>", table, re.S)}
        assert len(counts) == 1, table[:200]


def test_every_figure_of_the_kernel_table_is_there(everything):
    parsed, text, _ = rendered(everything)
    # 41 us of cuBLAS against 10.5 of 2 bits, and the block's total, at M=1; the worst at M=64.
    assert '<td class="h4">3.90</td>' in text
    assert "3.90x" in parsed.text
    assert "12 of 12" in parsed.text
    assert "qwen3-coder-next" in parsed.text
    # Experts: 16 us of the faster 16-bit way against 8.
    assert '<td class="h3">2.00</td>' in text
    assert "cannot be imported <here>" in parsed.text
    assert "FAILED" in parsed.text
    # Half a billion weights a second: 80 billion in 160 seconds.
    assert "<td>500</td>" in text
    assert "<td>2.7</td>" in text
    # A training step of 160 ms against 200; three latencies and none; a kernel alone at 80%.
    assert '<td class="h2">1.25</td>' in text
    assert "<td>0.75</td>" in text
    assert "<td>80</td>" in text
    assert "from 16 users on (RTX 4090)" in parsed.text


# -- what is absent ------------------------------------------------------------------------------------------


def test_absent_sections_say_how_to_make_them(tmp_path):
    kernels_file(tmp_path)
    parsed, text, absent = rendered(tmp_path)
    check_structure(parsed, text)
    assert set(absent) == {section.title for section in page.SECTIONS} - {
        "Kernels, per number of tokens",
        "Speed-up against the number of tokens",
        "Roofline",
    }
    for section in page.SECTIONS:
        if section.title in absent:
            assert section.command.format(folder=tmp_path.as_posix()) in parsed.text
            assert f"{section.title} (absent)" in parsed.text


@pytest.mark.parametrize("section", page.SECTIONS, ids=lambda section: section.anchor)
def test_commands_exist(section):
    """What the page tells people to type is a command of this version, with options it has."""
    words = shlex.split(section.command.format(folder="results"))
    if words[0] != "kbit":
        assert words[0] in ("make", "python")
        return
    command, rest = get_command(app), words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= options


# -- damaged files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a.json is not JSON"),
        ("[]", "holds a list"),
        ('{"rows": [], "window": 5, "model": "m"}', "a.json cannot be shown under 'Quality'.*IndexError"),
        ('{"rows": [{"x": 1}], "read_bandwidth_gb_s": 5}', "a.json cannot be shown under 'Kernels.*KeyError"),
        ('{"workload": [], "scheduler": {}}', "cannot be shown under 'Traffic'"),
        ('{"rows": 5, "read_bandwidth_gb_s": 5}', "a.json has no list of objects.*TypeError"),
        ('{"peers_absent": [1]}', "a.json cannot be shown under 'Environment.*AttributeError"),
        ('{"text": "\\ud800"}', "a.json is not JSON .*surrogates not allowed"),
    ],
)
def test_damaged_files_are_named(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        page.write(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_of_several_files_the_damaged_one_is_named(tmp_path):
    kernels_file(tmp_path, "good.json")
    content = json.loads((tmp_path / "good.json").read_text())
    content["rows"][0]["us"] = 0
    (tmp_path / "zero.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="report: zero.json cannot be shown under .*ZeroDivisionError"):
        page.write(tmp_path, tmp_path / "report.html")


def test_no_folder_and_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        results.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no \.json file"):
        results.load(tmp_path)


def test_text_of_files_is_never_markup(tmp_path):
    hostile = '"><script>alert(1)</script><img src=http://x.y/z>'
    kernels_file(tmp_path, f"{'a' * 3}.json", machine=MACHINE | {"gpu": hostile})
    (tmp_path / "b.json").write_text(json.dumps({"machine": {"cpu": hostile}, hostile: [{hostile: hostile}]}))
    parsed, text, _ = rendered(tmp_path)
    assert not parsed.all("script")
    assert not parsed.all("img")
    assert "<script" not in text
    assert hostile in parsed.text


def test_external_references_are_seen():
    for text in ('<img src="http://a/b">', "<a href='//a'>", "url(x.png)", '<link href="a.css">'):
        assert external_references(text)
    assert external_references('<a href="#top"><img src="data:image/png;base64,AA">') == []


# -- pieces --------------------------------------------------------------------------------------------------


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_enclose_the_data(low, span):
    for ticks in (svg.nice_ticks(low, low + span), svg.log_ticks(low, low + span)):
        assert ticks == sorted(ticks)
        assert ticks[0] <= low * (1 + 1e-6)
        assert ticks[-1] >= (low + span) * (1 - 1e-6)
        assert 1 <= len(ticks) <= 42


def test_ticks_by_hand():
    assert svg.nice_ticks(0, 3) == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert svg.nice_ticks(14.2, 21.9) == [14, 16, 18, 20, 22]
    assert svg.log_ticks(0.004, 0.5) == pytest.approx([0.001, 0.01, 0.1, 1])
    assert svg.log_ticks(30, 60) == pytest.approx([20, 50, 100])


def test_points_are_where_they_belong():
    """Corners of the plot: the first tick is at the lower left, the last at the upper right."""
    series = [Series("a", [(1, 0), (16, 4)], "k4", line=False)]
    drawn = svg.draw(Chart("t", Axis("x", log=True, ticks=(1, 16)), Axis("y", ticks=(0, 4)), series))
    places = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)[:2]
    corners = [(svg.LEFT, svg.HEIGHT - svg.BOTTOM), (svg.WIDTH - svg.RIGHT, svg.TOP)]
    assert [tuple(map(float, place)) for place in places] == corners
    axes = Axis("x", log=True, ticks=(1, 16)), Axis("y", ticks=(0, 4))
    middle = svg.draw(Chart("t", *axes, [Series("a", [(4, 2)], "k4")]))
    assert f'cx="{(svg.LEFT + svg.WIDTH - svg.RIGHT) / 2}"' in middle


def test_empty_charts_are_refused():
    with pytest.raises(ValueError, match="chart 't' has no points"):
        svg.draw(Chart("t", Axis("x"), Axis("y"), []))


def test_heat():
    styles = [markup.heat(ratio).style for ratio in (0.5, 0.95, 0.999, 1.0, 1.2, 2.0, 3.0)]
    assert styles == ["l2", "l1", "l1", "h1", "h2", "h3", "h4"]
    assert markup.heat(math.pi).text == "3.14"


def test_command(tmp_path):
    kernels_file(tmp_path)
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["bench", "report", str(tmp_path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "absent: Decoding in front of cuBLAS" in result.output
    Page(out.read_text())


def test_a_page_is_no_result(tmp_path):
    file = tmp_path / "kernels.json"
    result = CliRunner().invoke(app, ["bench", "report", str(tmp_path), "--out", str(file)])
    assert result.exit_code == 2
    assert "would not be JSON" in result.output
    assert not file.exists()
